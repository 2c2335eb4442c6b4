"""All clients save a checkpoint at the same step and end, before one of them is preempted."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from dmesh._log import announce, logger
from dmesh.collectives.objects import broadcast_object
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.preemption import PreemptionNotice, PreemptionSync
from dmesh.coordination.preemption_signals import SignalHook
from dmesh.coordination.waiting import Worker
from dmesh.devices.device import this_client
from dmesh.distribute.failure_handling.termination import TerminationConfig
from dmesh.errors import BarrierError, CoordinationError, DMeshError, StrategyTypeError
from dmesh.runtime.exits import EXIT_LOST_PEER
from dmesh.runtime.system import shutdown_accelerator_system
from dmesh.train.checkpoint_manager import CheckpointManager
from dmesh.train.checkpoints import Checkpoint, read_values

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver

__all__ = ["PreemptionCheckpointHandler"]

_POLL = 1.0
"""Seconds between two calls of the termination watcher."""
_STEPS_KEPT = 6
"""Number of steps that fit into the rest of the grace period."""
_SAVED_BARRIER = "dmesh/preemption-checkpoint"


class PreemptionCheckpointHandler:
    """Saves a checkpoint at the same step of all clients when one of them is about to be preempted.

    ```python
    checkpoint = dmesh.train.Checkpoint(weights=weights, step=step)
    handler = dmesh.distribute.experimental.PreemptionCheckpointHandler(None, checkpoint, "checkpoints")
    while int(step) < last:  # where the checkpoint left off, if there is one
        handler.run(train_step)
        step.assign_add(1)
    ```

    All clients make it, after `dmesh.initialize_accelerator_system`, and call `run` (or
    `save_checkpoint_if_preempted`) equally often. A client that receives SIGTERM, or whose
    `termination_watcher_fn` returns True, announces it to the others; then all save before their next common
    step and leave the cluster, and their processes end with exit code 75, or do what `exit_fn` says.
    The checkpoint is restored when they are started again and make the handler.

    Of a `Checkpoint`, client 0 writes and reads the files, and sends their content to the others, so the
    directory needs to be there for client 0 only. A manager's `save` and `restore_or_initialize` are called
    on every client.

    Args:
        cluster_resolver: Resolver that found the clients, as in TensorFlow; without influence.
        checkpoint_or_checkpoint_manager: A `dmesh.train.Checkpoint`; or a manager: an object with `save`, and
            perhaps `restore_or_initialize`, such as a `dmesh.train.CheckpointManager`.
        checkpoint_dir: Directory of a `Checkpoint`'s files, of which the latest is kept.
        termination_config: Detection of a preemption, and what follows.

    Raises:
        NotInitializedError: `dmesh.initialize_accelerator_system` has not been called.
        StrategyTypeError: An argument has the wrong type, or a `Checkpoint` has no directory.
        CheckpointError: The latest checkpoint is damaged, or does not fit.
        ConfigurationError: SIGTERM is to be handled, but this is not the main thread.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        config = TerminationConfig() if termination_config is None else termination_config
        if not isinstance(config, TerminationConfig):
            raise StrategyTypeError(
                f"termination_config must be a TerminationConfig or None, got {type(config).__name__}"
            )
        self._manager, self._own = _checked_manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config = config
        self._agent = current_agent()
        self._is_chief = this_client().client_id == 0
        self._runs = np.zeros((), np.int64)
        self._average = 0.0
        """Mean seconds of a step so far."""
        self._final = False
        """True once the next checkpoint is the last one."""
        self._asked = False
        """True once this client, which will be preempted, has requested the last checkpoint."""
        self._notice: tuple[float, bool] | None = None
        """Time of the announcement of a preemption, and whether this client made it."""
        self._failure: BaseException | None = None
        """Exception that the termination watcher raised."""
        self._ended = threading.Event()
        self._restore()
        self._watch()

    # What users call ----------------------------------------------------------------------------------------

    @property
    def total_run_calls(self) -> int:
        """Number of steps so far, including steps before the restored checkpoint."""
        return int(self._runs)

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step, after saving a checkpoint and ending if this is where all clients stop.

        Args:
            distributed_train_function: The step: a function that calls `Strategy.run`, say.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returned.
        """
        self._save_if_preempted((), {})
        began = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._runs += 1
        self._average += (time.monotonic() - began - self._average) / int(self._runs)
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, and end, if this is where all clients stop. For programs that do not use `run`.

        Args:
            *args: Arguments of the manager's `save`, or of `save_fn`.
            **kwargs: Its keyword arguments.
        """
        self._save_if_preempted(args, kwargs)
        self._runs += 1

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Do nothing: `run` saves checkpoints with every strategy."""
        yield

    # Inside -------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        checkpoint = getattr(self._manager, "checkpoint", None)
        if isinstance(checkpoint, Checkpoint):
            checkpoint.track_optional("preemption_run_calls", self._runs)
        if not self._own:
            restore = getattr(self._manager, "restore_or_initialize", None)
            if restore is not None:
                restore()
            return
        found: Any = None
        if self._is_chief and (path := self._manager.latest_checkpoint) is not None:
            found = (path, read_values(path))
        found = broadcast_object(found)
        if found is not None:
            path, values = found
            self._manager.checkpoint.assign_values(values)
            logger.info("restored %s", path)

    def _watch(self) -> None:
        if self._config.termination_watcher_fn is None:
            SignalHook.install([signal.SIGTERM])
        else:
            Worker(partial(self._poll, self._agent.preemption), "dmesh-termination-watcher").start()
        self._agent.preemption.add_listener(self._note)

    def _poll(self, sync: PreemptionSync) -> None:
        watcher = self._config.termination_watcher_fn
        assert watcher is not None
        try:
            while not watcher():
                if sync.wait_closed(_POLL) or self._ended.is_set():
                    return
        except Exception as error:  # noqa: BLE001 -- raised to the program by its next step
            self._failure = error
        else:
            self._announce("its termination watcher says so")

    def _announce(self, reason: str) -> None:
        with contextlib.suppress(CoordinationError):  # it has been shut down meanwhile, or fenced
            self._agent.preemption.announce(reason)

    def _note(self, notice: PreemptionNotice) -> None:
        identity = self._agent.identity
        own = (notice.task, notice.pid) == (str(identity.task), identity.process.pid)
        self._notice = (time.monotonic(), own)

    def _save_if_preempted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._final and not self._asked:
            self._ask_for_the_last()
        if not self._agent.preemption.reached(self.total_run_calls):
            return
        self._save(args, kwargs)
        grace = self._config.grace_period
        if grace and not self._final:
            self._final = True
            announce(f"saved a checkpoint; training continues for the grace period of {grace:g} s")
            return
        self._ended.set()
        announce("saved a checkpoint because a client will be preempted; this client exits")
        (self._config.exit_fn or _leave_and_exit)()
        self._final = False

    def _ask_for_the_last(self) -> None:
        """Announce the preemption again if this client's time is almost over."""
        if self._notice is None or not self._notice[1]:
            return
        grace = self._config.grace_period or 0.0
        if time.monotonic() >= self._notice[0] + grace - _STEPS_KEPT * self._average:
            self._asked = True
            # On a thread of its own: steps go on until the others know.
            Worker(
                lambda: self._announce("its grace period is almost over"), "dmesh-preemption-again"
            ).start()

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        elif not self._own:
            self._manager.save(*args, **kwargs)
        else:
            values = self._manager.checkpoint.values()  # on every client: it may be a collective
            if self._is_chief:
                self._manager.save_values(values, *args, **kwargs)
        try:
            self._agent.barrier(_SAVED_BARRIER)  # no client ends while another still writes
        except BarrierError as error:
            announce(f"not all clients have saved: {error}")


def _checked_manager(given: Any, directory: str | PathLike[str] | None) -> tuple[Any, bool]:
    """Return a manager, and whether this function created it."""
    if isinstance(given, Checkpoint):
        if directory is None:
            raise StrategyTypeError("a Checkpoint needs a checkpoint_dir to be saved in")
        return CheckpointManager(given, directory, max_to_keep=1), True
    if not callable(getattr(given, "save", None)):
        raise StrategyTypeError(
            "checkpoint_or_checkpoint_manager must be a dmesh.train.Checkpoint, or an object with a method "
            f"save(), got {type(given).__name__}"
        )
    return given, False


def _leave_and_exit() -> None:
    """Leave the cluster, and end the process with an exit code that requests a restart."""
    try:
        shutdown_accelerator_system()
    except DMeshError as error:  # another client is lost: there is nothing more to do for it
        announce(f"not all clients reached the shutdown: {error}")
    sys.exit(EXIT_LOST_PEER)

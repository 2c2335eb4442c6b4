"""Preemption: all clients save at the same step and end; whoever starts them again goes on from there."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.e2e.clients import run_clients

import dmesh
from dmesh import coordination
from dmesh.distribute.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from dmesh.distribute.failure_handling import checkpoint_handler
from dmesh.errors import CheckpointError, NotInitializedError, StrategyTypeError, StrategyValueError
from dmesh.testing import FakeCluster
from dmesh.train import Checkpoint, CheckpointManager


class Stop(Exception):
    """Raised by the tests' `exit_fn`: sys.exit would do the same."""


def stop():
    raise Stop


def never() -> bool:
    return False


def train(handler, total, last=100_000):
    """Takes steps until all clients stop; returns how many there are."""
    try:
        while handler.total_run_calls < last:
            handler.run(lambda: total.__iadd__(int(dmesh.collectives.all_reduce(1))))
    except Stop:
        return handler.total_run_calls
    return None


def test_all_save_at_the_same_step_and_go_on_from_there(tmp_path):
    """The directory is there for client 0 only."""
    told = threading.Event()

    def program():
        rank = dmesh.client_id()
        total = np.zeros((), np.int64)
        watcher = told.is_set if rank == 1 else never
        config = TerminationConfig(termination_watcher_fn=watcher, exit_fn=stop)
        place = tmp_path if rank == 0 else tmp_path / "nowhere"
        handler = PreemptionCheckpointHandler(None, Checkpoint(total=total), place, config)
        began = (handler.total_run_calls, int(total))
        if began[0] == 0:
            while handler.total_run_calls < 5:
                handler.run(lambda: total.__iadd__(int(dmesh.collectives.all_reduce(1))))
            told.set()
        return began, train(handler, total, began[0] + 5 if began[0] else 100_000), int(total)

    with FakeCluster(3, timeout=30.0) as cluster:
        [(began, steps, total), *others] = cluster.run(program)
        assert others == [(began, steps, total)] * 2
        assert (began, total) == ((0, 0), 3 * steps)
        assert steps >= 5
    told.clear()
    with FakeCluster(3, timeout=30.0) as cluster:
        assert cluster.run(program) == [((steps, total), None, total + 15)] * 3
    assert os.listdir(tmp_path) == ["ckpt-1.npz"]


def test_the_termination_watcher_ends_with_the_session(tmp_path):
    """Whoever shuts down in good order is not asked for ever whether the machine will be taken away."""

    def program():
        config = TerminationConfig(termination_watcher_fn=never)
        PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, config)

    with FakeCluster(2, timeout=30.0) as cluster:
        cluster.run(program)
        watchers = [one for one in threading.enumerate() if one.name == "dmesh-termination-watcher"]
        assert len(watchers) == 2
    for watcher in watchers:
        watcher.join(30.0)
        assert not watcher.is_alive()


class LateClock:
    """Time that the test moves on."""

    ahead = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return time.monotonic() + cls.ahead


def test_during_a_grace_period_training_goes_on(tmp_path, monkeypatch):
    """The first checkpoint is saved at once, the second and last one just before the time is over."""
    monkeypatch.setattr(checkpoint_handler, "time", LateClock)
    monkeypatch.setattr(LateClock, "ahead", 0.0)
    saved: list[tuple[int, int]] = []

    def program():
        rank, after = dmesh.client_id(), [0]

        def save() -> None:
            saved.append((rank, handler.total_run_calls))

        def step() -> None:
            after[0] += int(dmesh.collectives.all_reduce(len(saved) >= 2, "max"))
            if after[0] == 5:
                LateClock.ahead = 2000.0

        config = TerminationConfig(lambda: rank == 1, stop, 1000.0, save)
        handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, config)
        try:
            while True:
                handler.run(step)
        except Stop:
            return handler.total_run_calls

    with FakeCluster(2, timeout=30.0) as cluster:
        last = cluster.run(program)
    assert last[0] == last[1]
    first = min(step for _, step in saved)
    assert sorted(saved) == sorted((rank, at) for rank in (0, 1) for at in (first, last[0]))
    assert last[0] >= first + 5


def test_a_manager_saves_on_every_client_with_the_given_arguments(tmp_path):
    calls = []

    class Manager:
        def restore_or_initialize(self):
            calls.append("restored")

        def save(self, *args, **kwargs):
            calls.append((args, kwargs))

    def program():
        config = TerminationConfig(lambda: dmesh.client_id() == 0, stop)
        handler = PreemptionCheckpointHandler(None, Manager(), termination_config=config)
        with handler.watch_preemption_scope(), pytest.raises(Stop):
            while True:
                dmesh.collectives.barrier()
                handler.save_checkpoint_if_preempted(7, name="x")

    with FakeCluster(2, timeout=30.0) as cluster:
        cluster.run(program)
    assert calls == ["restored"] * 2 + [((7,), {"name": "x"})] * 2


def test_an_exit_function_that_returns_lets_the_program_go_on(tmp_path):
    def program():
        total = np.zeros((), np.int64)
        ends = []
        config = TerminationConfig(lambda: dmesh.client_id() == 0, lambda: ends.append(1))
        manager = CheckpointManager(Checkpoint(total=total), tmp_path / str(dmesh.client_id()), 1)
        handler = PreemptionCheckpointHandler(None, manager, termination_config=config)
        while not int(dmesh.collectives.all_reduce(len(ends), "max")):
            handler.run(lambda: None)
        steps = handler.total_run_calls
        handler.run(lambda: None)
        return len(ends), handler.total_run_calls - steps, manager.latest_checkpoint is not None

    with FakeCluster(2, timeout=30.0) as cluster:
        assert cluster.run(program) == [(1, 1, True)] * 2


def test_what_the_watcher_raises_is_raised_by_a_step(tmp_path):
    def program():
        def broken() -> bool:
            raise OSError("no such metadata")

        handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, TerminationConfig(broken))
        with pytest.raises(OSError, match="no such metadata"):
            while True:
                handler.run(lambda: None)

    with FakeCluster(1) as cluster:
        cluster.run(program)


def test_a_checkpoint_that_does_not_fit_is_an_error_on_all_clients(tmp_path):
    Checkpoint(total=np.zeros(3)).save(tmp_path / "ckpt")

    def program():
        config = TerminationConfig(never)
        with pytest.raises(CheckpointError, match="total is int64 of shape"):
            PreemptionCheckpointHandler(None, Checkpoint(total=np.zeros((), np.int64)), tmp_path, config)

    with FakeCluster(2, timeout=30.0) as cluster:
        cluster.run(program)


def test_a_watcher_knows_who_will_be_taken_away():
    def program():
        watcher = PreemptionWatcher()
        assert watcher.preemption_message is None
        assert watcher.block_until_worker_exit()
        dmesh.collectives.barrier()
        heard = threading.Event()
        coordination.add_preemption_listener(lambda notice: heard.set())
        if dmesh.client_id() == 1:
            dmesh.coordination.agent_source.current_agent().preemption.announce("maintenance")
        assert heard.wait(30.0)
        if dmesh.client_id() == 1:
            coordination.key_value_get("waits", timeout=30.0)  # a collective of both could still be under way
            raise Stop
        coordination.key_value_set("waits", "")
        assert watcher.block_until_worker_exit(30.0)
        return watcher.preemption_message

    with FakeCluster(2, timeout=30.0) as cluster:
        message, error = cluster.run(program, check=False)
    assert isinstance(error, Stop)
    assert message.startswith("/job:worker/task:1")
    assert message.endswith("is about to be preempted: maintenance")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: TerminationConfig(exit_fn=3),
            StrategyTypeError,
            "exit_fn must be a function or None, got 3",
        ),
        (lambda: TerminationConfig(grace_period=-1), StrategyValueError, "from 0, or None; got -1"),
        (
            lambda: PreemptionCheckpointHandler(None, Checkpoint()),
            StrategyTypeError,
            "needs a checkpoint_dir",
        ),
        (lambda: PreemptionCheckpointHandler(None, 3), StrategyTypeError, r"a method save\(\), got int"),
        (lambda: PreemptionCheckpointHandler(None, Checkpoint(), "x", 3), StrategyTypeError, "got int"),
        (lambda: PreemptionCheckpointHandler(None, Checkpoint(), "x"), NotInitializedError, "initialize"),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


TRAIN = """
import numpy as np, dmesh
dmesh.initialize_accelerator_system()
strategy = dmesh.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = dmesh.Variable(0, aggregation=dmesh.VariableAggregation.SUM)
handler = dmesh.distribute.experimental.PreemptionCheckpointHandler(
    None, dmesh.train.Checkpoint(total=total), "{place}"
)
print("began at", handler.total_run_calls, int(total), flush=True)
while handler.total_run_calls < {last}:
    handler.run(strategy.run, lambda: total.assign_add(1) and None)
    if handler.total_run_calls == 5:
        print("running", flush=True)
print("ended at", handler.total_run_calls, int(total), flush=True)
dmesh.shutdown_accelerator_system()
"""


def test_a_signal_ends_all_processes_which_begin_again_where_they_were(tmp_path):
    with run_clients(3, TRAIN.format(place=tmp_path, last=10**9)) as clients:
        for client in clients.values():
            client.wait_for("running")
        clients[2].signal(signal.SIGTERM)
        assert [client.wait() for client in clients.values()] == [75] * 3, clients[0].err
        assert "it received SIGTERM" in clients[0].err
        assert "saved a checkpoint" in clients[0].err
    [file] = os.listdir(tmp_path)
    steps = int(np.load(tmp_path / file)["preemption_run_calls"])
    with run_clients(3, TRAIN.format(place=tmp_path, last=steps + 2)) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert client.out.splitlines()[0] == f"began at {steps} {3 * steps}"
            assert client.out.splitlines()[-1] == f"ended at {steps + 2} {3 * steps + 6}"

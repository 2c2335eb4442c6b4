"""MPI launch of this process: the MPI rank of each client, and the communicators of groups.

`join` is the only step in which all clients take part together. It comes before anything else is sent, and
fails on all of them alike if the launch does not fit `DTENSOR_JOBS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import queue
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol

from dmesh._log import announce, logger
from dmesh.collectives.backends.base import Exchange
from dmesh.collectives.backends.tcp.channel import Waits
from dmesh.coordination.waiting import Worker, take
from dmesh.errors import (
    CollectiveError,
    ConfigurationError,
    InitializationTimeoutError,
    JobMismatchError,
    MissingExtraError,
)

_CARD = struct.Struct("!qq16s8s")
TOKEN_BYTES = 16
_CREATED_WITHIN = 10.0
"""Seconds in which a group's communicator must be there."""
_REPORT_EVERY = 10.0
_NAP = 0.001
_PROGRESS_EVERY = 0.02
"""Seconds between the calls that keep MPI going while the program computes."""
_MOVING_EVERY = 0.001
"""The same while calls move data. A process whose threads wake so often soon gets a busy core back."""
MOVING_FOR = 0.1
"""Seconds for which that lasts after data has moved."""
_HOW_TO_START = (
    "Start all clients by one `mpirun -n N`, with the same DTENSOR_JOBS and each with a DTENSOR_CLIENT_ID of "
    "its own, for example: mpirun -n 4 sh -c 'DTENSOR_CLIENT_ID=$OMPI_COMM_WORLD_RANK exec python train.py' "
    "(Open MPI; elsewhere $PMI_RANK or $SLURM_PROCID)"
)
_UNFINISHED: list[object] = []
"""Memory of launches that did not come together: MPI may still use it, until the process ends."""


class MemoryUser(Protocol):
    """Holder of memory that MPI uses."""

    def is_done_with_memory(self) -> bool:
        """Return whether MPI has let go of the memory."""


class MpiWorld:
    """The clients as MPI knows them, and memory that MPI uses.

    Its communicator has all clients, in the order of MPI ranks, and nothing else uses it. Errors in it are
    exceptions. It is never freed, because MPI could give its number, and messages for it, to a later one.
    """

    def __init__(self, mpi: Any, comm: Any, clients: Sequence[int], token: bytes) -> None:
        self.mpi = mpi
        self.comm = comm
        self.token = token  # random, the same on all clients of the launch
        self._ranks = {client: rank for rank, client in enumerate(clients)}
        self._held: dict[MemoryUser, bool] = {}  # True if retired
        self.moving_until = 0.0  # set by calls while they move data
        self._closed = False

    def group_of(self, clients: Sequence[int]) -> Any:
        """Return the MPI group of some clients."""
        return self.comm.Get_group().Incl([self._ranks[client] for client in clients])

    def start(self) -> None:
        """Start the progress thread: MPI makes progress on sends only while it is called."""
        Worker(self._keep_going, "dmesh-mpi-progress").start()

    def close(self) -> None:
        """End that thread; does not wait."""
        self._closed = True

    def hold(self, user: MemoryUser) -> None:
        """Keep a user's memory until it is released, or retired and let go by MPI. Any thread."""
        self._held[user] = False

    def release(self, user: MemoryUser) -> None:
        """Let go of memory that MPI does not use any more. Any thread."""
        self._held.pop(user, None)

    def retire(self, user: MemoryUser) -> None:
        """Let go of memory as soon as MPI does, which may be never. Any thread."""
        self._held[user] = True

    def sweep(self) -> None:
        """Let go of retired memory that MPI has let go of. The world's thread."""
        for user in list(self._held):
            if self._held.get(user):
                try:
                    if user.is_done_with_memory():
                        self.release(user)
                except self.mpi.Exception:
                    self.hold(user)  # for good

    def _keep_going(self) -> None:
        try:
            while not self._closed:
                moving = time.monotonic() < self.moving_until
                time.sleep(_MOVING_EVERY if moving else _PROGRESS_EVERY)
                self.comm.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG)
                self.sweep()
        except self.mpi.Exception as error:  # the calls of groups find out for themselves
            logger.debug("MPI has failed: %s", error)


def load() -> Any:
    """Return the module `mpi4py.MPI`; importing it starts MPI."""
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the mpi backend needs the mpi extra ({error}): pip install 'dmesh[mpi]'"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            f"mpi4py is installed, but finds no MPI library that it can use ({error}). Install one, such as "
            "Debian's libopenmpi-dev, load your system's module, or name the library in MPI4PY_LIBMPI"
        ) from error
    check_threads(mpi)
    return mpi


def check_threads(mpi: Any) -> None:
    """Raise ConfigurationError unless MPI runs and several threads may use it: each call has its own."""
    if not mpi.Is_initialized() or mpi.Is_finalized():
        state = "has ended already" if mpi.Is_initialized() else "has not been started"
        raise ConfigurationError(
            f"the mpi backend needs a running MPI, which {state}: let mpi4py start and end it (the default), "
            "or call MPI.Init_thread(MPI.THREAD_MULTIPLE) before dmesh is initialized"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        levels = {getattr(mpi, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED")}
        raise ConfigurationError(
            "the mpi backend needs MPI_THREAD_MULTIPLE, but MPI was started with or offers no more than "
            f"MPI_THREAD_{levels[mpi.Query_thread()]}. Leave mpi4py.rc.thread_level as it is "
            "('multiple'), and use an MPI library that was built with support for threads"
        )


def join(mpi: Any, client: int, jobs: Sequence[str], timeout: float) -> MpiWorld:
    """Meet all other clients within some seconds; all of them must call it."""
    size = mpi.COMM_WORLD.Get_size()
    if size == 1 and len(jobs) > 1:
        raise ConfigurationError(
            f"DTENSOR_JOBS has {len(jobs)} entries, but MPI knows of this process alone: it was not started "
            f"by mpirun, or by that of another MPI library. {_HOW_TO_START}"
        )
    deadline = time.monotonic() + timeout
    digest = hashlib.blake2b(",".join(jobs).encode(), digest_size=16).digest()
    card = _CARD.pack(client, len(jobs), digest, os.urandom(8))
    table = bytearray(_CARD.size * size)
    begun: list[object] = [card, table]
    try:
        comm, made = mpi.COMM_WORLD.Idup()
        begun += comm, made
        _await(made, f"all {size} MPI ranks", deadline, timeout)
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        exchanged = comm.Iallgather(card, table)
        begun.append(exchanged)
        _await(exchanged, f"the client ids of all {size} MPI ranks", deadline, timeout)
    except mpi.Exception as error:
        raise CollectiveError(f"MPI cannot connect its {size} ranks: {error}") from error
    finally:
        _UNFINISHED.extend(begun)  # the others may come when this client has given up
    clients = _check([_CARD.unpack_from(table, rank * _CARD.size)[:3] for rank in range(size)])
    world = MpiWorld(mpi, comm, clients, hashlib.blake2b(table, digest_size=TOKEN_BYTES).digest())
    world.start()
    return world


def _check(cards: Sequence[tuple[int, int, bytes]]) -> tuple[int, ...]:
    """Return the client at each MPI rank, unless they are not the clients of one job, once each.

    A card has the client's id, the number of its job list's entries, and their hash.
    """
    size = len(cards)
    clients = tuple(client for client, _, _ in cards)
    for rank, (_, count, _) in enumerate(cards):
        if count != size:
            raise ConfigurationError(
                f"DTENSOR_JOBS has {count} {'entry' if count == 1 else 'entries'} in the client at MPI rank "
                f"{rank}, but mpirun has started {size} {'process' if size == 1 else 'processes'}: there "
                f"must be as many. {_HOW_TO_START}"
            )
    for rank, (_, _, digest) in enumerate(cards):
        if digest != cards[0][2]:
            raise JobMismatchError(
                f"the clients at the MPI ranks 0 and {rank} have different DTENSOR_JOBS: all must have the "
                f"same. {_HOW_TO_START}"
            )
    for client in clients:
        twice = [str(rank) for rank, other in enumerate(clients) if other == client]
        if len(twice) > 1:
            raise ConfigurationError(
                f"DTENSOR_CLIENT_ID is {client}{' (the default)' if not client else ''} at the MPI ranks "
                f"{', '.join(twice)}. {_HOW_TO_START}"
            )
    return clients


def create(exchange: Exchange, world: MpiWorld, ranks: tuple[int, ...], name: str) -> Waits[Any]:
    """Make a group's communicator, in its first call; return it, or why that failed, as text.

    The group's name in its generation is the same on all members, and of no other group.
    """
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # In a thread, because MPI has no way of making a communicator that does not block.
    Worker(lambda: made.put(_create(world, ranks, name)), "dmesh-mpi-group").start()
    found: list[Any] = []
    give_up_at = time.monotonic() + _CREATED_WITHIN

    def is_made(seconds: float) -> bool:
        exchange.check()
        with contextlib.suppress(queue.Empty):
            found.append(take(made, min(seconds, 0.2)))
        return bool(found) or time.monotonic() > give_up_at

    yield is_made
    return found[0] if found else f"MPI made no communicator within {_CREATED_WITHIN:g} s"


def _create(world: MpiWorld, ranks: Sequence[int], name: str) -> Any:
    """Return a communicator for a group; why there is none, if MPI fails."""
    most = world.comm.Get_attr(world.mpi.TAG_UB)
    tag = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % most
    try:
        comm = world.comm.Create_group(world.group_of(ranks), tag)
        comm.Set_errhandler(world.mpi.ERRORS_RETURN)
    except world.mpi.Exception as error:
        logger.warning("MPI cannot make a communicator: %s", error)
        return f"MPI cannot make a communicator: {error}"
    return comm


def _await(request: Any, what: str, deadline: float, timeout: float) -> None:
    began = reported = time.monotonic()
    while not request.Test():
        now = time.monotonic()
        if now >= deadline:
            raise InitializationTimeoutError(
                f"{what} did not all arrive within {timeout:g} s; MPI does not report which are missing. "
                "Look for a process that ended before it called initialize_accelerator_system, never called "
                "it, or chose another backend; DMESH_INIT_TIMEOUT sets the limit"
            )
        if now >= reported + _REPORT_EVERY:
            reported = now
            announce(
                f"has waited {now - began:.0f} s (of {timeout:g} s) for {what}; MPI does not report "
                "which are missing"
            )
        time.sleep(_NAP)

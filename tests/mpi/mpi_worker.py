"""One process of an MPI launch: does one thing, and writes the outcome into a file of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.collectives.process_checks import CHECKS
from tests.collectives.process_worker import check
from tests.collectives.properties import run

import dmesh
from dmesh.errors import DMeshError
from dmesh.testing.backends import check_values

OPERATIONS = [
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
    "permute", "send_recv", "barrier", *CHECKS,
]  # fmt: skip


def say(**told: Any) -> None:
    """Answers; whole or not at all."""
    target = Path(sys.argv[2]) / f"{os.environ.get('DTENSOR_CLIENT_ID', '0')}-{os.getpid()}.json"
    target.with_suffix(".new").write_text(json.dumps(told))
    target.with_suffix(".new").rename(target)


def error_of(do: Callable[[], object]) -> dict[str, Any]:
    """Does something that fails; returns how, and how long it took."""
    began = time.monotonic()
    try:
        do()
    except DMeshError as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "missing": list(getattr(error, "missing", ())),
            "rank": getattr(error, "rank", None),
            "seconds": time.monotonic() - began,
        }
    raise AssertionError("it did not fail")


def backend() -> str:
    """Return the backend that carries out the calls of the group of all clients."""
    return dmesh.collectives.world()._generation.backends[0].name


def operations() -> None:
    """Every collective, against NumPy."""
    for operation in OPERATIONS:
        check(dmesh.collectives.world(), operation)
    say(backend=backend())


def properties() -> None:
    """Cases of all public functions, in turns in groups of all sizes."""
    rank, size = dmesh.client_id(), dmesh.num_clients()
    made = {n: dmesh.collectives.new_group(range(n)) for n in range(1, size) if rank < n}
    made[size] = dmesh.collectives.world()
    cases = json.loads(Path(os.environ["CASES"]).read_text())
    for number, case in enumerate(cases):
        fails = case["call"] == "reset"
        if fails:
            dmesh.coordination.barrier(f"before case {number}")  # all have left the call before
        if (group := made.get(size if fails else number % size + 1)) is not None:
            run(group, [case])
    say(backend=backend(), cases=len(cases))


def conformance() -> None:
    """Every call of the public conformance tests."""
    done = check_values(dmesh.collectives.world(), "mpi")
    say(backend=backend(), operations=len(done))


def large() -> None:
    """Arrays of many pieces, in both directions at once, checked byte by byte."""
    rank, size = dmesh.client_id(), dmesh.num_clients()
    world = dmesh.collectives.world()
    world.barrier()
    for count in (65_536, 65_537, 1_048_576 + 64, 5_000_011):
        mine = np.random.default_rng(rank).integers(0, 256, count).astype(np.uint8)
        sent = world.send(mine, (rank + 1) % size, async_op=True)
        theirs = world.recv(np.empty_like(mine), (rank - 1) % size)
        sent.result(60)
        expected = np.random.default_rng((rank - 1) % size).integers(0, 256, count).astype(np.uint8)
        assert (theirs == expected).all()
    say(backend=backend())


def groups() -> None:
    """Groups that overlap, made and used at once by threads, on each rank in another order."""
    rank, size = dmesh.client_id(), dmesh.num_clients()
    made = [
        dmesh.collectives.new_group(ranks, name=f"{ranks}")
        for ranks in ([0, 1, 2], [2, 1], [3, 0], [1, 3, 2], [0, 1, 2, 3], [0, 2], [3, 1])
        if rank in ranks
    ]
    failures: list[BaseException] = []

    def use(group: Any) -> None:
        try:
            for number in range(30):
                count = 40_000 if number % 10 == 9 else 10
                total = group.all_reduce(np.full(count, float(rank + number)))
                assert (total == sum(group.ranks) + number * group.size).all()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    made = made[rank % size :] + made[: rank % size]
    threads = [threading.Thread(target=use, args=(group,), daemon=True) for group in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    assert {group._generation.backends[0].name for group in made} == {"mpi"}
    dmesh.collectives.barrier()
    say(backend=backend())


def exchange() -> None:
    """All ranks send to each other before they receive: small sends are buffered, and large ones wait."""
    rank, size = dmesh.client_id(), dmesh.num_clients()
    world = dmesh.collectives.world()
    world.barrier()
    right, left = (rank + 1) % size, (rank - 1) % size
    for number in range(100):
        world.send(np.full(1000, number + rank), right)
    for number in range(100):
        assert (world.recv(np.empty(1000, int), left) == number + left).all()
    waits = error_of(lambda: world.send(np.zeros(1_000_000), right, timeout=1.0))
    assert waits["error"] in ("CollectiveTimeoutError", "CollectiveError"), waits
    say(backend=backend())
    dmesh.coordination.barrier("all have seen it", timeout=60)


def forked() -> None:
    """A forked child may not call; its parent goes on."""
    dmesh.collectives.all_reduce(np.ones(3))
    child = os.fork()
    if not child:
        told = error_of(lambda: dmesh.collectives.all_reduce(np.ones(3)))
        os._exit(0 if told["error"] == "NotInitializedError" else 1)
    assert os.waitpid(child, 0)[1] == 0
    total = dmesh.collectives.all_reduce(np.ones(100_000))
    assert (total == dmesh.num_clients()).all()
    say(backend=backend())


def beside() -> None:
    """The program's own MPI messages, on the communicator of all and with our tags, while collectives run."""
    from mpi4py import MPI

    comm, rank, size = MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    ended = threading.Event()
    failures: list[BaseException] = []

    def talk() -> None:
        try:
            for number in range(300):
                for tag in (1, 2):
                    got = bytearray(8)
                    mine = (rank * 1000 + number).to_bytes(8, "big")
                    comm.Sendrecv(mine, (rank + 1) % size, tag, got, (rank - 1) % size, tag)
                    assert int.from_bytes(got, "big") == (rank - 1) % size * 1000 + number
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
        ended.set()

    threading.Thread(target=talk, daemon=True).start()
    for number in range(100):
        count = 100_000 if number % 10 == 0 else 100
        total = dmesh.collectives.all_reduce(np.full(count, number + dmesh.client_id()))
        assert (total == number * size + size * (size - 1) // 2).all()
    assert ended.wait(60)
    assert not failures, failures
    say(backend=backend())


def mismatch() -> None:
    """Rank 1 calls something else than all others."""
    shape = 4 if dmesh.client_id() == 1 else 3
    say(**error_of(lambda: dmesh.collectives.all_reduce(np.ones(shape))))


def missing() -> None:
    """Rank 2 comes too late to a collective."""
    dmesh.collectives.barrier()
    if dmesh.client_id() == 2:
        threading.Event().wait(3.0)
        say(error=None)
    else:
        say(**error_of(lambda: dmesh.collectives.all_reduce(np.ones(3), timeout=1.0)))
    dmesh.coordination.barrier("the others have given up", timeout=60)


def skipped() -> None:
    """Rank 2 goes on to a barrier without a collective that the others make."""
    dmesh.collectives.barrier()
    if dmesh.client_id() == 2:
        say(**error_of(lambda: dmesh.coordination.barrier("beyond", timeout=60)))
    else:
        say(**error_of(lambda: dmesh.collectives.all_reduce(np.ones(3), timeout=30)))
        dmesh.coordination.barrier("beyond", timeout=60)


def raising() -> None:
    """Rank 2 fails: the others are told why."""
    dmesh.collectives.barrier()
    if dmesh.client_id() == 2:
        say(error=None)
        raise ZeroDivisionError("the learning rate")
    say(**error_of(lambda: dmesh.collectives.all_reduce(np.ones(3))))


def killed() -> None:
    """A rank is killed. Whether the others live to tell is up to MPI."""
    dmesh.collectives.barrier()
    dmesh.coordination.barrier("all have met")  # what it has said may die with it
    if dmesh.client_id() == int(os.environ["VICTIM"]):
        threading.Event().wait(1.0)  # the service, which may die with it, has to tell all that they have met
        os.kill(os.getpid(), signal.SIGKILL)
    say(**error_of(lambda: dmesh.collectives.all_reduce(np.ones(100_000), timeout=60)))
    threading.Event().wait(1.0)  # the others have pieces for this process, and nobody to say that it ended
    os._exit(0)


def killed_midway() -> None:
    """Rank 1 is stopped, and then killed, while large arrays are on their way to it and from it."""
    array = np.ones(4_000_000)
    dmesh.collectives.all_reduce(array)
    if dmesh.client_id() == 1:
        say(pid=os.getpid())
    told = error_of(lambda: _reduce_for_ever(array, timeout=60))
    say(**told, at=time.monotonic(), share=share())
    os._exit(0)


def frozen() -> None:
    """Rank 1 is stopped while it is sent large arrays: the others' calls end, and so does all else."""
    world = dmesh.collectives.world()
    array = np.ones(4_000_000)
    world.all_reduce(array)
    if dmesh.client_id() == 1:
        say(pid=os.getpid())
    out = np.empty_like(array)
    told = error_of(lambda: _reduce_for_ever(array, out=out))
    array[:], out[:] = np.nan, -1.0  # their owner's again
    say(**told)
    if dmesh.client_id() != 1:
        threading.Event().wait(2.0)  # rank 1 goes on, and MPI with it
        assert (out == -1.0).all(), "MPI has written to the caller's array"
        say(**told, untouched=True)


def _reduce_for_ever(array: np.ndarray, timeout: float = 3.0, out: np.ndarray | None = None) -> None:
    while True:
        total = dmesh.collectives.all_reduce(array, out=out, timeout=timeout)
        assert (total == dmesh.num_clients()).all()


def again() -> None:
    """A second life in the same processes."""
    dmesh.collectives.all_reduce(np.ones(3))
    dmesh.shutdown_accelerator_system()
    dmesh.initialize_accelerator_system()
    total = dmesh.collectives.all_reduce(np.ones(100_000))
    assert (total == dmesh.num_clients()).all()
    say(backend=backend())


def share() -> float:
    """How much of a core this process takes for some time, from soon on."""
    pause = threading.Event()
    pause.wait(0.5)
    before, began = time.process_time(), time.monotonic()
    pause.wait(2.0)
    return (time.process_time() - before) / (time.monotonic() - began)


def idle() -> None:
    """Nothing, for a while: tells how busy that was."""
    dmesh.collectives.barrier()
    say(share=share())
    dmesh.coordination.barrier("all have rested", timeout=60)


def waiting() -> None:
    """Rank 0 comes late to a collective, for which the others wait: tells how busy that was."""
    shares: list[float] = []
    measuring = threading.Thread(target=lambda: shares.append(share()))
    dmesh.collectives.barrier()
    measuring.start()
    if dmesh.client_id() == 0:
        measuring.join()
    dmesh.collectives.all_reduce(np.ones(100_000))
    measuring.join()
    say(share=shares[0])


def refused() -> None:
    """The start itself fails."""
    say(**error_of(initialize))


def funneled() -> None:
    """MPI was started for programs of one thread."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    refused()


def initialize() -> None:
    dmesh.initialize_accelerator_system(enable_coordination_service=os.environ.get("SERVER") != "none")


def main() -> None:
    do = sys.argv[1]
    if do not in ("refused", "funneled"):
        initialize()
    {
        each.__name__: each
        for each in (
            operations, properties, conformance, large, groups, exchange, forked, beside, again, idle,
            waiting, mismatch, missing, skipped, raising, killed, killed_midway, frozen, refused, funneled,
        )
    }[do]()  # fmt: skip
    if dmesh.runtime.context.current_or_none() is not None:
        dmesh.shutdown_accelerator_system()


if __name__ == "__main__":
    main()

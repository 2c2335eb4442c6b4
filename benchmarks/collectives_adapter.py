"""Adapters of dmesh for the harness of the collectives' benchmarks; see `collectives.py`.

The harness starts one process for each rank, and tells it its rank, the number of ranks, and a directory
that all of them see. An adapter has one method for each operation, on arrays that it allocates.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

Array = Any


class Dmesh:
    """A user's path: public functions, default settings with a coordinator, plain NumPy arrays.

    Results go to the arrays that the harness reuses, as with the peers.
    """

    def __init__(self, rank: int, world: int, rendezvous: str, port: int) -> None:
        del port
        self.rank, self.world = rank, world
        host = os.environ.get("BP_HOST", "127.0.0.1")
        os.environ.update(
            DTENSOR_JOBS=",".join(_addresses(Path(rendezvous), rank, world, host)),
            DTENSOR_CLIENT_ID=str(rank),
            DTENSOR_JOB_NAME="worker",
        )
        import dmesh
        from dmesh import native

        dmesh.initialize_accelerator_system()
        self._dmesh = dmesh
        self._calls = dmesh.collectives
        self._calls.barrier()
        core = "pure Python" if native.core() is None else "native core"
        self.info = f"dmesh {dmesh.__version__}, {core}"

    def alloc(self, count: int, dtype: Any) -> Array:
        """Where the user's arrays live."""
        return np.empty(count, dtype)

    def release(self) -> None:
        """After a case, when its arrays are gone."""

    def allreduce(self, a: Array) -> Array:
        return self._calls.all_reduce(a, out=a)

    def allreduce_new(self, a: Array) -> Array:
        return self._calls.all_reduce(a)

    def allgather(self, a: Array, o: Array) -> Array:
        self._calls.all_gather(a, axis=0, out=o)
        return o

    def reduce_scatter(self, a: Array, o: Array) -> Array:
        self._calls.reduce_scatter(a, axis=0, out=o)
        return o

    def broadcast(self, a: Array, root: int) -> Array:
        return self._calls.broadcast(a, root, out=a)

    def alltoall(self, a: Array, o: Array) -> Array:
        self._calls.all_to_all(a, out=o)
        return o

    def send(self, a: Array, dst: int) -> None:
        self._calls.send(a, dst)

    def recv(self, a: Array, src: int) -> None:
        self._calls.recv(a, src, out=a)

    def barrier(self) -> None:
        self._calls.barrier()

    def close(self) -> None:
        self._dmesh.shutdown_accelerator_system()


class DmeshShared(Dmesh):
    """The user's arrays live in memory that all ranks of the host have mapped."""

    def alloc(self, count: int, dtype: Any) -> Array:
        """As `dmesh.empty`."""
        return self._dmesh.empty(count, dtype, shared=True)


class DmeshResults(DmeshShared):
    """Besides, results that all ranks of the host read in the same memory, where there is a plan for that."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._plans: dict[tuple[str, int], Any] = {}

    def release(self) -> None:
        """Forgets the case's plan, and gives its memory back."""
        self._plans.clear()

    def _plan(self, kind: str, a: Array) -> Any:
        plan = self._plans.get((kind, a.size))
        if plan is None:
            make = getattr(self._dmesh.collectives, kind)
            plan = self._plans[kind, a.size] = make(a)
        return plan

    def allreduce(self, a: Array) -> Array:
        return self._plan("plan_shared_all_reduce", a)(a)

    def allgather(self, a: Array, o: Array) -> Array:
        return self._plan("plan_all_gather", a)(a)

    def broadcast(self, a: Array, root: int) -> Array:
        return self._plan("plan_broadcast", a)(a)


class DmeshPure(Dmesh):
    """Without the native core."""

    def __init__(self, *arguments: Any) -> None:
        os.environ["DMESH_NATIVE"] = "0"
        super().__init__(*arguments)


class DmeshTcp(Dmesh):
    """As if every rank were on a host of its own."""

    def __init__(self, *arguments: Any) -> None:
        os.environ["DMESH_SHARED_MEMORY"] = "0"
        super().__init__(*arguments)


def _addresses(directory: Path, rank: int, world: int, host: str) -> list[str]:
    """Tells the others at which free port this rank will listen, and waits to be told theirs."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        mine = directory / f"address-{rank}"
        mine.with_suffix(".new").write_text(f"{host}:{probe.getsockname()[1]}")
        mine.with_suffix(".new").rename(mine)
    files = [directory / f"address-{other}" for other in range(world)]
    give_up = time.monotonic() + 60
    while not all(file.exists() for file in files):
        if time.monotonic() > give_up:
            raise TimeoutError(f"not all of the {world} ranks came")
        time.sleep(0.01)
    return [file.read_text() for file in files]

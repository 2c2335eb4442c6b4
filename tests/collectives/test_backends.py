"""The public conformance tests pass for our backends; `test_backends_conformance.py` shows that they fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from tests.collectives.ranks import Cluster, cluster

from dmesh import native
from dmesh.testing.backends import BackendConformance, Ranks

needs_core = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


class Connected:
    """Ranks of a test cluster; see `Ranks`."""

    def __init__(self, ranks: Cluster) -> None:
        self.ranks = ranks

    def run(self, body, ranks: Sequence[int] | None = None):
        return self.ranks.run(lambda c: body(c.world), None if ranks is None else tuple(ranks))

    def kill(self, rank: int) -> None:
        self.ranks.network.kill(rank, "killed by the test")


class InCluster(BackendConformance):
    """The tests, with ranks of a test cluster."""

    shm: tuple[str, ...] = ()

    @contextmanager
    def open_ranks(self, size: int) -> Iterator[Ranks]:
        with cluster(size, shm=self.shm) as ranks:
            yield Connected(ranks)


class TestMessages(InCluster):
    name = "messages"
    sizes = (2, 5)


@needs_core
class TestSharedMemory(InCluster):
    name = "shm"
    shm = ("native",)
    sizes = (2, 5)


@needs_core
class TestDedicatedConnections(InCluster):
    name = "tcp"
    shm = ("dedicated",)


@needs_core
class TestHierarchical(InCluster):
    name = "hierarchical"
    shm = ("native@a", "native@b")
    sizes = (4, 6)
    size = 4
    in_rank_order = False


class TestMpi(InCluster):
    """MPI made of threads; `tests/mpi` compares results under a real mpirun."""

    name = "mpi"

    @contextmanager
    def open_ranks(self, size: int) -> Iterator[Ranks]:
        with cluster(size, shm=("no",), mpi=True) as ranks:
            yield Connected(ranks)

"""The NCCL backend passes the public conformance tests, with a fake CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
from tests.collectives.ranks import cluster
from tests.collectives.test_backends import Connected

from dmesh.testing.backends import BackendConformance, Ranks


class OnDevices(Connected):
    """Ranks of a test cluster, each with a GPU of its own."""

    def __init__(self, ranks, cupy: ModuleType) -> None:
        super().__init__(ranks)
        self._cupy = cupy

    def run(self, body, ranks=None):
        def on_device(group):
            with self._cupy.cuda.Device(group.rank):
                return body(group)

        return super().run(on_device, ranks)


class TestNccl(BackendConformance):
    name = "nccl"
    in_rank_order = False

    @pytest.fixture(autouse=True)
    def _cupy(self, cupy: ModuleType) -> None:
        self.cupy = cupy

    @contextmanager
    def open_ranks(self, size: int) -> Iterator[Ranks]:
        with cluster(size) as ranks:
            yield OnDevices(ranks, self.cupy)

    def as_array(self, x: np.ndarray):
        return self.cupy.asarray(x)

    def as_numpy(self, x) -> np.ndarray:
        return x.get()

    def overwrite(self, x, value: int) -> None:
        with x.device:
            x[...] = value

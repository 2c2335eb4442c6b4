"""The real thing: the GPUs of this machine, one for each rank; ranks are threads. Skipped without a GPU.

With NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1, there are two ranks, which may share a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from types import ModuleType

import numpy as np
import pytest
from tests.collectives.gpu.test_gpu_values import CALLS, numbers
from tests.collectives.ranks import LIMIT, cluster
from tests.waiting import eventually

from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda() -> ModuleType:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, about where it finds CUDA
        import cupy

        if not cupy.is_available():
            pytest.skip("there is no GPU")
        return cupy


@pytest.fixture
def ranks(cuda):
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    with cluster(2 if shared else min(cuda.cuda.runtime.getDeviceCount(), 4)) as made:
        yield made
    # Communicators on one GPU must not be made while others are destroyed.
    eventually(lambda: not any(thread.name.startswith("dmesh-nccl") for thread in threading.enumerate()))


def device_of(cuda, communicator):
    return cuda.cuda.Device(communicator.rank % cuda.cuda.runtime.getDeviceCount())


def run(ranks, cuda, call, like):
    def body(communicator):
        with device_of(cuda, communicator):
            found = call(communicator.world, cuda.asarray(like(communicator.rank)))
            return None if found is None else cuda.asnumpy(found)

    return ranks.run(body)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "i8", "u1", "c8"])
@pytest.mark.parametrize("call", CALLS)
def test_gpu_arrays_give_what_numpy_arrays_give(ranks, cuda, call, dtype):
    shape = (ranks.size * 2, ranks.size)

    def like(rank):
        return numbers(rank, shape, dtype)

    expected = ranks.all(lambda c: CALLS[call](c.world, like(c.rank)))
    for _ in range(2):
        for found, wanted in zip(run(ranks, cuda, CALLS[call], like), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_large_arrays_in_place(ranks, cuda):
    def call(group, x):
        for _ in range(5):
            assert group.all_reduce(x, "mean", out=x) is x
        return x

    for found in run(ranks, cuda, call, lambda rank: np.full(10_000_000, 2.0, "f4")):
        assert (found == 2.0).all()


def test_the_input_is_what_the_current_stream_makes_of_it(ranks, cuda):
    def body(communicator):
        with device_of(cuda, communicator), cuda.cuda.Stream(non_blocking=True):
            x = cuda.zeros(1_000_000, "f4")
            for _ in range(100):
                x += 1
            return cuda.asnumpy(communicator.world.all_reduce(x, async_op=True).result(LIMIT))

    for found in ranks.all(body):
        assert (found == 100 * ranks.size).all()


def test_a_mismatch(ranks, cuda):
    if ranks.size < 2:
        pytest.skip("needs two GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    for error in run(ranks, cuda, lambda g, x: g.all_reduce(x if g.rank else x[1:]), lambda rank: np.ones(4)):
        assert type(error) is CollectiveMismatchError


def test_a_cuda_graph_does_not_capture_collectives(ranks, cuda):
    def body(communicator):
        with device_of(cuda, communicator), cuda.cuda.Stream(non_blocking=True) as stream:
            x = cuda.ones(4)
            stream.begin_capture()
            with pytest.raises(CollectiveError, match="while a CUDA graph is captured"):
                communicator.world.all_reduce(x)
            stream.end_capture()
            return cuda.asnumpy(communicator.world.all_reduce(x))

    for found in ranks.all(body):
        assert (found == ranks.size).all()


@pytest.mark.parametrize("end", ["dies", "is late"])
def test_others_do_not_wait_in_nccl_for_one_who(ranks, cuda, end):
    if ranks.size < 2:
        pytest.skip("needs two GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    run(ranks, cuda, CALLS["all_reduce"], lambda rank: np.ones(4))
    gate = threading.Event()

    def body(communicator):
        with device_of(cuda, communicator), cuda.cuda.Stream(non_blocking=True) as stream:
            x = cuda.ones(4)
            if communicator.rank == 1:
                stream.launch_host_func(lambda _: gate.wait(LIMIT), None)
            return communicator.world.all_reduce(x, timeout=5.0)

    killed = threading.Timer(1.0, ranks.network.kill, (1, "killed by the test"))
    if end == "dies":
        killed.start()
    try:
        error = ranks.run(body)[0]
    finally:
        killed.cancel()
        gate.set()
    assert type(error) is (PeerLostError if end == "dies" else CollectiveTimeoutError)


def test_transfers(ranks, cuda):
    if ranks.size < 2:
        pytest.skip("needs two GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1")

    def call(group, x):
        if group.rank == 0:
            group.send(x, 1)
        return group.recv(x, 0) if group.rank == 1 else None

    np.testing.assert_array_equal(run(ranks, cuda, call, lambda rank: np.arange(6) + rank)[1], np.arange(6))

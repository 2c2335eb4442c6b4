"""What is wrong with a call of GPU arrays is said before anything is sent, and the group goes on."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh.collectives.backends.nccl.arrays import is_gpu_array
from dmesh.errors import CollectiveError, CollectiveTypeError, CollectiveValueError, MissingExtraError

STRUCTURED = np.dtype([("a", "f4"), ("b", "i4")])


@pytest.fixture
def group(cupy):
    """The first rank of two; the second one calls nothing."""
    with cluster(2) as ranks:
        yield ranks.communicators[0].world


def zeros(cupy, shape=(2, 3), dtype="f4"):
    return cupy.asarray(np.zeros(shape, dtype))


REFUSED = [
    ("sum", "?", "convert it, e.g. with x.astype('int64')"),
    ("prod", "?", "convert it"),
    ("mean", "?", "convert it"),
    ("sum", "i2", "it does not know this dtype; convert it"),
    ("max", "u2", "it does not know this dtype"),
    ("mean", "i4", "its mean would be truncated; convert it to floats"),
    ("prod", "c8", "complex numbers can only be added"),
    ("max", "c16", "complex numbers can only be added"),
    ("bitwise_or", "u4", "it has no bitwise reductions"),
    ("bxor", "i8", "it has no bitwise reductions"),
    ("band", "?", "convert it"),
    ("sum", STRUCTURED, "it does not know this dtype"),
    ("any", STRUCTURED, "truth has no meaning for it"),
    ("sum", ml_dtypes.float8_e5m2, "it does not know this dtype"),
]


@pytest.mark.parametrize(("op", "dtype", "why"), REFUSED, ids=lambda value: str(value)[:20])
def test_reductions_that_nccl_has_not(cupy, group, op, dtype, why):
    for reduce in (group.all_reduce, group.reduce, group.reduce_scatter):
        with pytest.raises(CollectiveTypeError, match=r"^NCCL cannot .* GPU arrays of ") as caught:
            reduce(zeros(cupy, dtype=dtype), op)
        assert why in str(caught.value)
    assert group.failure is None


@pytest.mark.parametrize(("name", "op", "dtype"), [
    ("NCCL_BFLOAT16", "sum", ml_dtypes.bfloat16), ("NCCL_AVG", "mean", "f4"),
])  # fmt: skip
def test_what_an_older_build_has_not(cupy, group, nccl, monkeypatch, name, op, dtype):
    monkeypatch.delattr(nccl, name)
    with pytest.raises(CollectiveTypeError, match=f"this build of CuPy knows no {name}"):
        group.all_reduce(zeros(cupy, dtype=dtype), op)


def test_a_reduction_that_does_not_exist(cupy, group):
    with pytest.raises(CollectiveValueError, match="unknown reduction 'total'"):
        group.all_reduce(zeros(cupy), "total")


def test_without_nccl(cupy, group, nccl, monkeypatch):
    monkeypatch.setattr(nccl, "available", False)
    calls = [
        group.all_reduce, group.all_gather, group.broadcast, group.all_to_all,
        lambda x: group.send(x, 1), lambda x: group.recv(x, 1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(MissingExtraError, match=r"pip install 'dmesh\[nccl\]'"):
            call(zeros(cupy))


def test_compression_is_for_numpy(cupy, group):
    with pytest.raises(CollectiveTypeError, match="compress= of all_reduce is for NumPy arrays"):
        group.all_reduce(zeros(cupy), compress="float16")


@pytest.mark.parametrize("call", [
    lambda g, x: g.gather(x), lambda g, x: g.scatter(x), lambda g, x: g.permute(x, [(0, 1)]),
])  # fmt: skip
def test_calls_that_know_only_numpy(cupy, group, call):
    with pytest.raises(
        CollectiveTypeError, match=r"^\w+ takes arrays on the CPU only, not .*: pass x\.get\(\)$"
    ):
        call(group, zeros(cupy))


def test_no_collective_is_captured_in_a_cuda_graph(cupy, group):
    x = zeros(cupy)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(CollectiveError, match=r"all_reduce was called while a CUDA graph is captured"):
            group.all_reduce(x.T)
    assert group.failure is None


def test_positions_and_shapes(cupy, group):
    x = zeros(cupy)
    wrong = [
        (lambda: group.broadcast(x, 2), "root=2 of broadcast is not in the group"),
        (lambda: group.reduce(x, root=-1), "root=-1 of reduce"),
        (lambda: group.reduce(x, root=1, out=x), r"for the root \(position 1\) alone"),
        (lambda: group.recv(x, 5), "src=5 of recv is not in the group"),
        (lambda: group.reduce_scatter(x, axis=1), "is not a multiple of"),
        (lambda: group.reduce_scatter(zeros(cupy, (3, 2))), "one row for each of the group's 2 ranks"),
        (lambda: group.all_to_all(zeros(cupy, (3, 2))), "is not a multiple of"),
        (lambda: group.all_gather(x, axis=2), "axis=2 of all_gather is out of range"),
        (lambda: group.all_reduce(x, timeout=0), "timeout must be more than 0"),
    ]
    for call, why in wrong:
        with pytest.raises(CollectiveValueError, match=why):
            call()
    assert group.failure is None


def test_out(cupy, group):
    x = zeros(cupy, (4, 4))
    wrong = [
        (np.zeros((4, 4), "f4"), CollectiveTypeError, r"must be a cupy\.ndarray, not numpy\.ndarray"),
        (zeros(cupy, (4, 4), "f8"), CollectiveTypeError, "has dtype float64, but the result is float32"),
        (zeros(cupy, (4, 3)), CollectiveValueError, r"has shape \(4, 3\)"),
        (zeros(cupy, (4, 4)).T, CollectiveValueError, "must be C-contiguous"),
    ]
    for out, error, why in wrong:
        with pytest.raises(error, match=why):
            group.all_reduce(x, out=out)
    whole = zeros(cupy, (6, 4))
    with pytest.raises(CollectiveValueError, match="overlaps the input without being the same array"):
        group.all_reduce(whole[:4], out=whole[2:])
    with pytest.raises(CollectiveTypeError, match=r"must be a NumPy array, not .*ndarray"):
        group.all_reduce(np.zeros((4, 4), "f4"), out=x)


def test_a_group_works_with_one_device(cupy, group):
    with cupy.cuda.Device(1):
        elsewhere = zeros(cupy)
    with pytest.raises(CollectiveValueError, match="out= of broadcast is on device 1, but the input on 0"):
        group.broadcast(zeros(cupy), out=elsewhere)
    with pytest.raises(
        CollectiveValueError, match="on device 1, but this group's GPU arrays are on device 0"
    ):
        group.broadcast(elsewhere)


def test_only_cupy_arrays_are_gpu_arrays(cupy):
    assert is_gpu_array(zeros(cupy))
    assert not is_gpu_array(np.zeros(3))
    assert not is_gpu_array([1, 2])


def test_cupy_is_not_imported_by_dmesh():
    script = "import sys, numpy, dmesh.collectives as c\n"
    script += "from dmesh.collectives.backends.nccl.arrays import is_gpu_array\n"
    script += "assert not is_gpu_array(numpy.zeros(1)); assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)

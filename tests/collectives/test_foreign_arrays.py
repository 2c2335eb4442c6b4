"""Arrays of other libraries, as inputs and outputs: DLPack, with and without versions, and buffers."""

from __future__ import annotations

import array
import mmap

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.ranks import cluster
from tests.collectives.test_values import values

from dmesh.collectives.foreign_arrays import as_numpy, as_output
from dmesh.errors import CollectiveTypeError, CollectiveValueError

SIZE = 3


class Tensor:
    """Exports its memory by DLPack alone."""

    def __init__(self, values, device=(1, 0)):
        self.values, self.device = np.asarray(values), device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


class OldTensor(Tensor):
    """Exports DLPack without versions, which NumPy takes for read-only, and its memory as an array."""

    def __dlpack__(self, *, stream=None):
        return self.values.__dlpack__()

    def __array__(self, dtype=None, copy=None):
        return self.values


class Copying(OldTensor):
    """Gives copies as arrays, such as JAX does: it cannot be written to."""

    def __array__(self, dtype=None, copy=None):
        return self.values.copy()


class Short(Tensor):
    """Has a dtype that NumPy's DLPack does not know."""

    dtype = "bfloat16"

    def __dlpack__(self, **options):
        raise BufferError("bfloat16 is not supported")

    def __array__(self, dtype=None, copy=None):
        return self.values


KINDS = {
    "dlpack": lambda x: Tensor(x.copy()),
    "old dlpack": lambda x: OldTensor(x.copy()),
    "array": lambda x: array.array(x.dtype.char, x.tobytes()),
    "memoryview": lambda x: memoryview(x.copy()),
}


@pytest.fixture(scope="module", params=["messages", "native"])
def ranks(request):
    with cluster(SIZE, shm=("native",) if request.param == "native" else ()) as made:
        yield made


@values
@given(
    kind=st.sampled_from(list(KINDS)),
    dtype=st.sampled_from(["f4", "f8", "i4", "u1"]),
    count=st.integers(0, 50),
)
def test_inputs_and_outputs(ranks, kind, dtype, count):
    foreign, x = KINDS[kind], np.arange(count).astype(dtype)

    def body(communicator):
        world, rank = communicator.world, communicator.rank
        total, gathered = foreign(x), foreign(np.zeros(count * SIZE, dtype))
        assert world.all_reduce(foreign(x), out=total) is total
        assert world.all_gather(foreign(x), axis=0, out=gathered) is gathered
        later = foreign(x)
        assert world.broadcast(later, 1, out=later, async_op=True).result(60) is later
        in_place = foreign(x)
        assert world.all_reduce(in_place, out=in_place) is in_place
        joined = foreign(np.zeros(count * SIZE, dtype))
        assert world.all_gather(foreign(x), axis=0, out=joined, counts="exchange") is joined
        sent = world.send(foreign(x), (rank + 1) % SIZE, async_op=True)
        received = foreign(x)
        assert world.recv(None, (rank - 1) % SIZE, out=received) is received
        sent.result(60)
        return [total, in_place], [gathered, joined], [later, received, world.scan(foreign(x), "max")]

    for totals, rows, same in ranks.all(body):
        for found, expected in ((totals, x * np.array(SIZE, dtype)), (rows, np.tile(x, SIZE)), (same, x)):
            for result in found:
                made = as_numpy(result, "test")
                assert made.dtype == expected.dtype
                assert (made == expected).all()


def test_the_memory_is_shared():
    x = np.arange(4.0)
    for foreign in (Tensor(x), OldTensor(x), memoryview(x)):
        assert as_numpy(foreign, "f").ctypes.data == x.ctypes.data
        as_output(foreign, "f")[0] += 1
    assert x[0] == 3
    with mmap.mmap(-1, 8) as memory:
        as_output(memory, "f")[:] = 7
        assert memory[:] == bytes([7] * 8)
    assert as_numpy(Short(x.astype(ml_dtypes.bfloat16)), "f").dtype == ml_dtypes.bfloat16
    for plain in (x, [1, 2], 3.0, b"abc", None, "abc"):
        assert as_numpy(plain, "f") is plain


def test_what_cannot_be_taken_is_refused():
    with cluster(2) as ranks:

        def body(communicator):
            world, x = communicator.world, np.ones(4)
            with pytest.raises(
                CollectiveTypeError, match=r"cannot take .*Tensor on device 3 .* cupy.from_dlpack"
            ):
                world.all_reduce(Tensor(x, device=(2, 3)))
            for out in (b"12345678", memoryview(b"12345678")):
                with pytest.raises(CollectiveTypeError, match="out= of broadcast"):
                    world.broadcast(np.zeros(8, np.uint8), out=out)
            with pytest.raises(CollectiveTypeError, match=r"out= of all_reduce is read-only: .*Copying"):
                world.all_reduce(x, out=Copying(x))
            with pytest.raises(CollectiveValueError, match=r"has shape \(3,\), but the result's is \(4,\)"):
                world.all_reduce(x, out=Tensor(np.ones(3)))
            with pytest.raises(CollectiveTypeError, match="has dtype float32"):
                world.all_reduce(x, out=array.array("f", [0] * 4))
            return world.all_reduce(1).item()

        assert ranks.all(body) == [2, 2]


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    with cluster(2) as ranks:

        def body(communicator):
            x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
            out = torch.empty(2, 3)
            assert communicator.world.all_reduce(torch.ones(2, 3), out=out) is out
            return out.tolist(), communicator.world.all_reduce(x).tolist()

        assert ranks.all(body) == [([[2.0] * 3] * 2, [[0, 2, 4], [6, 8, 10]])] * 2


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    with cluster(2) as ranks:

        def body(communicator):
            x = jax.numpy.arange(4, dtype="bfloat16")
            with pytest.raises(CollectiveTypeError, match="is read-only"):
                communicator.world.all_reduce(x, out=x)
            return communicator.world.all_reduce(x).tolist(), communicator.world.scan(
                jax.numpy.ones(3)
            ).tolist()

        assert ranks.all(body) == [([0, 2, 4, 6], [1.0] * 3), ([0, 2, 4, 6], [2.0] * 3)]

"""All-reduces that travel in 16 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import native
from dmesh.errors import CollectiveMismatchError, CollectiveTypeError

WAYS = ["messages", *(["native", "dedicated"] if native.core() is not None else [])]


@pytest.fixture(scope="module", params=WAYS)
def ranks(request):
    with cluster(3, shm=() if request.param == "messages" else (request.param,)) as made:
        yield made


@pytest.mark.parametrize("compress", ["float16", "bfloat16", np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_the_result_is_that_of_the_narrow_arrays(ranks, compress, dtype, op):
    narrow = np.dtype(ml_dtypes.bfloat16 if compress == "bfloat16" else compress)

    def body(communicator):
        group = communicator.world
        for shape in ((), (7,), (300, 100)):
            x = np.asarray(np.random.default_rng(communicator.rank).normal(size=shape).astype(dtype))
            before = x.copy()
            wanted = group.all_reduce(x.astype(narrow), op).astype(dtype)
            out = np.empty_like(x)
            assert group.all_reduce(x, op, compress=compress, out=out) is out
            later = group.all_reduce(x, op, compress=compress, async_op=True)
            for result in (out, group.all_reduce(x, op, compress=compress), later.result(LIMIT)):
                assert result.dtype == x.dtype
                assert result.tobytes() == wanted.tobytes()
            assert x.tobytes() == before.tobytes()
            assert group.all_reduce(x, op, compress=compress, out=x) is x
            assert x.tobytes() == wanted.tobytes()

    ranks.all(body)


@pytest.mark.parametrize(
    ("dtype", "compress", "message"),
    [
        ("f4", "float32", "compress must be float16 or bfloat16, not float32"),
        ("f4", "int8", "not int8"),
        ("f4", "gzip", "must be float16 or bfloat16"),
        ("f2", "float16", "only float32 and float64 can be compressed, not float16"),
        ("i4", "float16", "not int32"),
        ("c8", "bfloat16", "not complex64"),
    ],
)
def test_what_cannot_be_compressed(ranks, dtype, compress, message):
    with pytest.raises(CollectiveTypeError, match=message):
        ranks.communicators[0].world.all_reduce(np.zeros(3, dtype), compress=compress)
    assert ranks.all(lambda c: int(c.world.all_reduce(np.array(1)))) == [3, 3, 3]


def test_all_must_ask_for_it():
    with cluster(2) as ranks:
        for error in ranks.run(
            lambda c: c.world.all_reduce(np.zeros(3), compress="float16" if c.rank else None)
        ):
            assert isinstance(error, CollectiveMismatchError)
            assert "rank 1 called all_reduce(sum, float16" in str(error)

"""Requests of repeated calls: those of the first call with another array, and never a check left out."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields

import numpy as np
import pytest

from dmesh.collectives import request as module
from dmesh.collectives.request import agreed
from dmesh.collectives.validation import RequestBuilder
from dmesh.errors import CollectiveTypeError, CollectiveValueError

CALLS = {
    "all_reduce": {"op": "sum"},
    "all_reduce of booleans": {"op": "any"},
    "reduce to this rank": {"op": "max", "root": 1},
    "reduce to another": {"op": "max", "root": 0},
    "reduce_scatter": {"op": "sum"},
    "reduce_scatter along an axis": {"op": "sum", "axis": 1},
    "broadcast from this rank": {"root": 1},
    "broadcast from another": {"root": 2},
    "all_gather": {},
    "all_gather along an axis": {"axis": 1},
    "gather": {"root": 1},
    "scatter from this rank": {"root": 1},
    "scatter from another": {"root": 0},
    "all_to_all": {},
    "permute": {"pairs": [(0, 1), (1, 2)]},
    "send": {"root": 0},
    "recv": {"root": 2},
}


class Counting(RequestBuilder):
    """Counts the calls that are validated."""

    validated = 0

    def validate(self, *args, **kwargs):
        self.validated += 1
        return super().validate(*args, **kwargs)


@pytest.fixture
def requests():
    return Counting(3, 1)


def described(request):
    return {f.name: getattr(request, f.name) for f in fields(request) if f.name not in ("source", "arrange")}


@pytest.mark.parametrize(
    ("call", "dtype"),
    [(c, d) for c in CALLS for d in ("f4", "?", "i2", "S3") if d != "S3" or "op" not in CALLS[c]],
)
def test_a_repeated_call_has_the_request_of_a_new_one(requests, call, dtype):
    kind, arguments = call.partition(" ")[0], CALLS[call]
    first, second = (np.arange(start, start + 18).reshape(3, 6).astype(dtype) for start in (0, 5))
    for x in (first, second, first.copy()):
        made, fresh = requests.make(kind, x, **arguments), RequestBuilder(3, 1).make(kind, x, **arguments)
        assert described(made) == described(fresh)
        assert (made.arrange is None) == (fresh.arrange is None)
        if fresh.source is None or fresh.source is x:
            assert made.source is fresh.source
        else:
            assert made.source.tobytes() == fresh.source.tobytes()


def test_a_repeated_call_is_not_validated(requests):
    for number in range(3):
        requests.make("all_reduce", np.full(4, number), op="sum")
        requests.make("broadcast", np.full(4, number), root=0)
    assert requests.validated == 2


def test_positions_must_be_integers_every_time(requests):
    x = np.ones((3, 6))
    requests.make("broadcast", x, root=1)
    requests.make("reduce_scatter", x, op="sum", axis=0)
    for wrong in (True, 1.0, np.True_, "1"):
        with pytest.raises(CollectiveValueError, match="root of broadcast must be an integer"):
            requests.make("broadcast", x, root=wrong)
    with pytest.raises(CollectiveValueError, match="axis of reduce_scatter must be an integer"):
        requests.make("reduce_scatter", x, op="sum", axis=False)
    assert requests.make("broadcast", x, root=np.int64(1)).root == 1


def test_arguments_beside_the_key_are_checked_every_time(requests):
    x = np.ones(4)
    requests.make("all_reduce", x, op="sum")
    with pytest.raises(CollectiveTypeError, match="compress must be float16 or bfloat16"):
        requests.make("all_reduce", x, op="sum", compress="")
    with pytest.raises(CollectiveValueError, match="is read-only"):
        requests.make("all_reduce", x, np.broadcast_to(1.0, 4), op="sum")
    with pytest.raises(CollectiveValueError, match="masked array"):
        requests.make("all_reduce", np.ma.masked_array(x, [0, 1, 0, 1]), op="sum")
    for wrong in (["sum"], None, 7):
        with pytest.raises(CollectiveValueError, match="unknown reduction"):
            requests.make("all_reduce", x, op=wrong)


def test_the_memory_of_an_array_is_looked_at_every_time(requests):
    requests.make("all_reduce", np.ones(4), op="sum")
    unaligned = np.frombuffer(bytes(33), np.uint8)[1:].view("f8")
    swapped = np.ones(4, np.dtype("f8").newbyteorder())
    for x in (np.ones(8)[::2], unaligned, swapped):
        source = requests.make("all_reduce", x, op="sum").source
        assert source is not x
        assert source.flags.c_contiguous
        assert source.flags.aligned
        assert source.dtype.isnative
        assert source.tolist() == x.tolist()


def test_a_result_has_the_dtype_of_its_own_call(requests):
    """Two dtypes that are equal may still differ in what they carry."""
    noted = np.dtype("f8", metadata={"unit": "m"})
    for dtype in (np.dtype("f8"), noted, np.dtype("f8"), noted):
        assert requests.make("broadcast", np.ones(4, dtype), root=0).dtype.metadata == dtype.metadata


def test_nothing_keeps_the_arrays_alive(requests):
    for call, arguments in CALLS.items():
        x = np.ones((3, 6), bool)
        kept = weakref.ref(x)
        requests.make(call.partition(" ")[0], x, **arguments)
        del x
        if kept() is not None:
            gc.collect()
        assert kept() is None, call


def test_only_so_many_calls_are_kept(requests, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KNOWN", 4)
    for size in range(20):
        assert requests.make("all_reduce", np.ones(size), op="sum").count == size
        assert len(requests._known) <= 4


def test_a_labeled_call_names_its_operation_and_place_of_which_ranks_agree_on_the_first():
    request = RequestBuilder(2, 0).make("all_reduce", np.ones(3), op="sum")
    here, there = request.labeled("np.sum", "train.py:12"), request.labeled("np.sum", "train.py:40")
    assert here.text == "np.sum: all_reduce(sum, float64, shape (3,)) @ train.py:12"
    assert agreed(here.text) == agreed(there.text)
    assert here.hash == there.hash != request.hash
    assert here.hash != request.labeled("np.max", "train.py:12").hash
    assert here.descriptor == request.descriptor
    assert len(request.labeled("x" * 5000, "y" * 5000).text) < 1000


def test_what_ranks_agree_on_is_all_of_a_call_but_its_place(requests):
    """Also if a field's name has what stands before a place, and if the text is long."""
    for name in ("a @ x", "x" * 790):
        calls = [requests.make("all_gather", np.zeros(3, [(name, kind)])) for kind in ("i4", "f4")]
        assert agreed(calls[0].text) != agreed(calls[1].text)
        assert calls[0].hash != calls[1].hash
        here, there, other = (
            call.labeled("relayout", place)
            for call, place in ((calls[0], "a.py:1"), (calls[0], "b.py:2"), (calls[1], "a.py:1"))
        )
        assert here.text != there.text
        assert here.hash == there.hash
        assert here.hash != other.hash
        assert agreed(here.text) != agreed(other.text)

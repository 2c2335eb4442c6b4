"""Comparison of replicas' states, in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.distribute.agreement import Agreement, ReplicaState, _read
from dmesh.distribute.placement import Placement, Replica, ids_text
from dmesh.errors import ReplicaError, ReplicaMismatchError, ReplicaTimeoutError, StrategyValueError

WAITING, RETURNED = ReplicaState("waiting in", "all_reduce SUM of float64[3]"), ReplicaState("returned")


def agreement(replicas: int) -> Agreement:
    return Agreement(Placement(tuple(Replica(number, 0, ("CPU:0",)) for number in range(replicas)), 0), None)


def test_replicas_in_the_same_state_agree() -> None:
    assert agreement(2).compare([WAITING, WAITING]) is None
    assert agreement(1).compare([RETURNED]) is None


def test_who_is_in_the_minority_differs() -> None:
    error = agreement(5).compare([RETURNED, WAITING, WAITING, RETURNED, WAITING])
    assert isinstance(error, ReplicaMismatchError)
    assert error.replicas == (0, 3)
    assert "replicas 0, 3 (client 0): returned; replicas 1-2, 4 (client 0): waiting in all_reduce" in str(
        error
    )


def test_an_exception_goes_before_everything_else_and_an_absence_before_a_difference() -> None:
    raised, absent = ReplicaState("raised", "KeyError: 'x'"), ReplicaState("missing from", "all_reduce")
    error = agreement(3).compare([RETURNED, raised, absent])
    assert type(error) is ReplicaError
    assert str(error).startswith("replica 1 (client 0) raised KeyError: 'x'. This ended the step of all 3")
    error = agreement(3).compare([raised, WAITING, raised])
    assert error is not None
    assert "; so did replica 2 (client 0)" in str(error)
    error = agreement(3).compare([RETURNED, WAITING, absent])
    assert isinstance(error, ReplicaTimeoutError)
    assert error.replicas == (2,)


def test_long_texts_are_cut_and_still_differ() -> None:
    first, second = (ReplicaState("waiting in", "x" * 5000 + end) for end in "ab")
    error = agreement(3).compare([first, first, second])
    assert isinstance(error, ReplicaMismatchError)
    assert error.replicas == (2,)
    assert len(str(error)) < 2500


@given(
    st.lists(
        st.builds(ReplicaState, st.sampled_from(["waiting in", "raised"]), st.text(max_size=20)), max_size=4
    )
)
def test_what_clients_say_is_read(places) -> None:
    message = json.dumps([[kind, text] for kind, text in places]).encode()
    assert _read(message, len(places)) == tuple(places)
    with pytest.raises(ReplicaError, match="strange"):
        _read(message, len(places) + 1)


@given(st.binary(max_size=50))
@pytest.mark.parametrize(
    "prefix", [b"", b"[" * 20_000, b'[["sleeping", ""]]', b'[["raised", 3]]', b"[3]", b"{}1"]
)
def test_nonsense_is_refused(prefix, rest) -> None:
    with pytest.raises(ReplicaError, match=r"unreadable|strange"):
        _read(prefix + rest, 1)


def test_placements_are_the_same_number_on_each_client() -> None:
    with pytest.raises(StrategyValueError, match="client 0 has 2, client 1 has 1"):
        Placement(tuple(Replica(number, number // 2, ("CPU:0",)) for number in range(3)), 0, 2)
    with pytest.raises(StrategyValueError, match="at least one"):
        Placement((), 0)


def test_numbers_are_written_with_ranges() -> None:
    assert ids_text([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"

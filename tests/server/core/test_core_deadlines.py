"""The heap of deadlines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmesh_server.core.deadlines import Deadlines, LeaseDue, WaitDue


def test_the_latest_time_set_counts() -> None:
    deadlines = Deadlines()
    deadlines.set(WaitDue(1), 5.0)
    deadlines.set(WaitDue(1), 9.0)
    deadlines.set(WaitDue(2), 7.0)
    assert deadlines.next() == 7.0
    assert deadlines.pop(6.9) is None
    assert deadlines.pop(7.0) == WaitDue(2)
    deadlines.set(WaitDue(1), 1.0)
    assert deadlines.pop(7.0) == WaitDue(1)
    assert deadlines.next() is None
    deadlines.cancel(WaitDue(1))


def test_different_deadlines_of_one_number_do_not_mix() -> None:
    deadlines = Deadlines()
    deadlines.set(LeaseDue(1), 5.0)
    deadlines.set(WaitDue(1), 1.0)
    deadlines.cancel(WaitDue(1))
    assert deadlines.pop(9.0) == LeaseDue(1)


def test_moving_a_deadline_for_ever_takes_no_room() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(WaitDue(number % 3), float(number))
    assert len(deadlines) == 3
    assert len(deadlines.heap) < 200


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "cancel", "pop"]), st.integers(0, 5), st.integers(0, 20)),
        max_size=200,
    )
)
def test_deadlines_are_a_sorted_map(steps: list[tuple[str, int, int]]) -> None:
    deadlines, model = Deadlines(), dict[WaitDue, float]()
    for step, number, time in steps:
        due, when = WaitDue(number), float(time)
        if step == "set":
            deadlines.set(due, when)
            model[due] = when
        elif step == "cancel":
            deadlines.cancel(due)
            model.pop(due, None)
        else:
            popped = deadlines.pop(when)
            assert (popped is None) == all(other > when for other in model.values())
            if popped is not None:
                assert isinstance(popped, WaitDue)
                assert model.pop(popped) <= min(model.values(), default=when)
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)

"""Which worker runs which function: everything runs, once unless its worker is lost, whatever happens."""

from hypothesis import given
from hypothesis import strategies as st

from dmesh.distribute.coordinator.dispatch import Closure, Dispatch, WorkerId


class Outcome:
    def set_value(self, value):
        pass

    def set_error(self, error):
        pass


def closure(number):
    return Closure(number, f"f{number}", b"", Outcome())


A, B = WorkerId(1, "a"), WorkerId(2, "b")


def numbers(assignments):
    return [(worker, found.number) for worker, found in assignments]


def test_a_free_worker_gets_the_next_function():
    dispatch = Dispatch()
    assert dispatch.submit(closure(1)) == []
    assert numbers(dispatch.ready(A)) == [(A, 1)]
    assert dispatch.submit(closure(2)) == []
    assert numbers(dispatch.ready(B)) == [(B, 2)]
    assert dispatch.submit(closure(3)) == []
    done, begun = dispatch.finished(B, 2)
    assert done is not None
    assert done.number == 2
    assert numbers(begun) == [(B, 3)]
    assert dispatch.finished(B, 2) == (None, []), "old news"
    assert not dispatch.idle


def test_what_a_lost_worker_ran_comes_before_what_waits():
    dispatch = Dispatch()
    for number in (1, 2, 3):
        dispatch.submit(closure(number))
    dispatch.ready(A)
    assert dispatch.gone(A) == []
    assert numbers(dispatch.ready(B)) == [(B, 1)]
    assert dispatch.finished(A, 1) == (None, []), "the lost worker's"
    assert dispatch.gone(A) == []


def test_while_an_error_is_raised_nothing_is_begun():
    dispatch = Dispatch()
    dispatch.ready(A)
    for number in (1, 2):
        dispatch.submit(closure(number))
    dispatch.draining = True
    first = ValueError()
    dispatch.fail(first)
    dispatch.fail(ValueError())
    assert dispatch.error is first
    assert dispatch.gone(A) == []
    assert [found.number for found in dispatch.cancel()] == [1, 2]
    assert dispatch.idle


@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "ready", "gone", "finished"]), st.integers(0, 3)), max_size=60
    )
)
def test_every_function_ends_once_and_workers_run_one_at_a_time(steps):
    dispatch = Dispatch()
    workers = [WorkerId(client, "x") for client in range(4)]
    submitted, ended = 0, []
    for what, which in [*steps, ("ready", 0)]:
        worker = workers[which]
        if what == "submit":
            submitted += 1
            dispatch.submit(closure(submitted))
        elif what == "finished":
            running = dispatch.workers.get(worker)
            found, _ = dispatch.finished(worker, -1 if running is None else running.number)
            ended += [] if found is None else [found.number]
        else:
            getattr(dispatch, what)(worker)
        running = [found.number for _, found in dispatch.running]
        assert sorted([*running, *[found.number for found in dispatch.queue], *ended]) == [
            *range(1, submitted + 1)
        ]
        assert not dispatch.queue or all(dispatch.workers.values())
    while dispatch.running:
        for worker, found in dispatch.running:
            dispatch.finished(worker, found.number)
    assert dispatch.idle

"""Reading ahead: bounded, in order, with errors, and without threads left behind."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
from itertools import count

import pytest
from tests.waiting import eventually

from dmesh.data import AUTOTUNE, Dataset
from dmesh.data.prefetching import Prefetcher


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dmesh-data")]


@pytest.fixture(autouse=True)
def _no_threads_left():
    gc.collect()
    eventually(lambda: not threads())  # other tests'
    yield
    if threads():
        gc.collect()  # errors and their frames hold iterators
    eventually(lambda: not threads())


@pytest.mark.parametrize("size", [0, 1, 3, AUTOTUNE, None])
def test_elements_come_in_order_as_often_as_wanted(size):
    dataset = Dataset.range(50).prefetch(size)
    assert [int(x) for x in dataset] == [int(x) for x in dataset] == list(range(50))


def test_no_more_is_read_than_fits():
    read, seen = [], threading.Event()

    def generate():
        for number in count():
            read.append(number)
            if number == 4:
                seen.set()
            yield number

    iterator = iter(Dataset.from_generator(generate).prefetch(3))
    assert int(next(iterator)) == 0
    assert seen.wait(10)  # 1, 2, 3 wait in the buffer, and 4 in the hand
    time.sleep(0.05)
    assert read == [0, 1, 2, 3, 4]
    iterator.close()
    eventually(lambda: not threads())


def test_an_error_comes_after_what_was_before_it():
    def generate():
        yield 1
        yield 2
        raise ZeroDivisionError("three")

    iterator = iter(Dataset.from_generator(generate).prefetch(5))
    assert [int(next(iterator)), int(next(iterator))] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="three"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_thread_ends_when_the_iterator_is_forgotten():
    closed = threading.Event()

    def generate():
        try:
            yield from count()
        finally:
            closed.set()

    iterator = iter(Dataset.from_generator(generate).prefetch(1))
    next(iterator)
    assert threads()
    del iterator
    gc.collect()
    assert closed.wait(10)


def test_a_chain_of_prefetches_ends_with_its_reader():
    iterator = iter(Dataset.from_generator(count).prefetch(1).map(lambda x: x, 3).prefetch(2).batch(2))
    next(iterator)
    iterator.close()
    eventually(lambda: not threads())


def test_a_prefetcher_that_is_closed_has_ended():
    prefetcher = Prefetcher(count, 2, "dmesh-data-test")
    assert next(prefetcher) == 0
    prefetcher.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_the_thread_has_the_context_of_who_reads():
    who = contextvars.ContextVar("who", default="nobody")

    def ask():
        who.set("reader")
        dataset = Dataset.from_generator(lambda: iter([0])).map(lambda x: who.get() == "reader", 2)
        return [bool(x) for x in dataset.prefetch(1)]

    assert contextvars.copy_context().run(ask) == [True]


def test_a_position_before_the_first_element_is_not_that_of_the_thread():
    asked, go_on = threading.Event(), threading.Event()

    def wait(x):
        asked.set()
        assert go_on.wait(10)
        return x

    def dataset():
        return Dataset.from_generator(lambda: iter(range(3))).map(wait).prefetch(1)

    iterator = iter(dataset())
    reader = threading.Thread(target=next, args=(iterator,))
    reader.start()
    assert asked.wait(10)
    state = iterator.state()
    go_on.set()
    reader.join()
    iterator.close()
    again = iter(dataset())
    again.restore(state)
    assert [int(x) for x in again] == [0, 1, 2]

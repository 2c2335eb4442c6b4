"""Forked children cannot use groups of the parent, and touch neither its memory nor its connections."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh import native
from dmesh.collectives.shared_results import PlannedAllGather
from dmesh.errors import NotInitializedError

WAYS = ["messages", *(["native", "dedicated", "encrypted"] if native.core() is not None else [])]


def in_child(body: Callable[[], None]) -> None:
    """Run a function in a forked child; raises here if it fails there, or takes more than 20 s."""
    gc.collect()  # a child's collector would wait for the threads of gRPC servers that earlier tests left
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            body()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(NotInitializedError, match="forked"):
        call()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_cannot_use_its_parents_group(way):
    with cluster(2, shm=() if way == "messages" else (way,)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        parents = [c.world for c in ranks.communicators]
        plans = ranks.all(lambda c: PlannedAllGather(c.world, np.ones(1000)))
        x = np.array([1000.0])

        def body() -> None:
            group = parents[0]
            refused(lambda: group.all_reduce(x))
            refused(lambda: group.all_reduce(x, timeout=1.0))
            refused(lambda: group.all_reduce(x, async_op=True))
            refused(lambda: group.send(x, 1))
            refused(lambda: plans[0](np.full(1000, 7.0)))

        in_child(body)
        assert ranks.all(lambda c: float(c.world.all_reduce(np.array([c.rank + 1.0]))[0])) == [3.0] * 2
        for gathered in ranks.all(lambda c: plans[c.rank](np.full(1000, float(c.rank)))):
            assert gathered[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.skipif(native.core() is None, reason="no native core")
def test_a_forked_child_leaves_no_region_in_its_parents_name():
    """Its garbage collector finalizes the parent's groups: that is not the parent's leave."""
    with cluster(2, shm=("native",)) as ranks:
        groups = ranks.all(lambda c: c.new_group([0, 1]))
        ranks.all(lambda c: groups[c.rank].barrier())
        shared = ranks.communicators[1].shared_memory
        assert shared is not None
        [offset] = shared._regions
        word = offset + shared.sizes.left(0)
        assert shared._segment is not None
        before = bytes(shared._segment.memory[word : word + 8])

        def body() -> None:
            groups.clear()
            gc.collect()

        in_child(body)
        assert bytes(shared._segment.memory[word : word + 8]) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.skipif(native.core() is None, reason="no native core")
def test_a_forked_child_takes_nothing_that_was_sent_to_its_parent():
    """Its garbage collector finalizes the parent's groups, whose connections it shares."""
    with cluster(2, shm=("dedicated",)) as ranks:
        groups = ranks.all(lambda c: c.new_group([0, 1]))
        ranks.all(lambda c: groups[c.rank].barrier())
        groups[0].send(np.arange(3), 1)

        def body() -> None:
            groups.clear()
            gc.collect()

        in_child(body)
        assert groups[1].recv(np.empty(3, int), 0, timeout=10).tolist() == [0, 1, 2]

"""Ctrl-C at the worst moments of a call: the others hear of it, and do not wait for their time-out."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh.collectives.backends.tcp.messages import MessageOperation
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.futures import Worker
from dmesh.collectives.group import Group
from dmesh.collectives.work import Generation
from dmesh.errors import CollectiveError

LARGE = np.ones(100_000)


class Presses:
    """Presses Ctrl-C, so many times, when the culprit's thread comes by."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.culprit: threading.Thread | None = None

    def __call__(self) -> None:
        if threading.current_thread() is self.culprit and self.left:
            self.left -= 1
            raise KeyboardInterrupt


def interrupted(ranks, presses, call=lambda group: group.all_reduce(LARGE)):
    """Rank 1 is interrupted; all make a call. Returns what it raised, and the errors of the others."""

    def body(communicator):
        if communicator.rank == 1:
            presses.culprit = threading.current_thread()
            return call(communicator.world)
        return communicator.world.all_reduce(LARGE)

    first, culprit, last = ranks.run(body)
    assert presses.left == 0, "nobody was interrupted"
    assert type(culprit) is KeyboardInterrupt
    for error in (first, last):
        assert type(error) is CollectiveError, error
        assert "rank 1 gave up all_reduce(sum, float64, shape (100000,)), collective #1" in str(error)
        assert "KeyboardInterrupt" in str(error)
    assert ranks.communicators[1].world.failure is not None
    assert not ranks.communicators[1].world._generation.streams[None].calls


def wrap(monkeypatch, owner, name, presses, *, after=False):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        if not after:
            presses()
        result = original(*args, **kwargs)
        if after:
            presses()
        return result

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_between_taking_a_number_and_carrying_the_call_out(monkeypatch, times):
    with cluster(3) as ranks:
        presses = Presses(times)
        original = Group._carry_out

        def carry_out(self, call, plan):
            presses()
            return original(self, call, plan)

        monkeypatch.setattr(Group, "_carry_out", carry_out)
        wrap(
            monkeypatch, Generation, "fail", presses
        )  # the second one and the third while the first is dealt with
        interrupted(ranks, presses)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_while_an_asynchronous_call_is_handed_over(monkeypatch, after):
    with cluster(3) as ranks:
        presses = Presses(1)
        wrap(monkeypatch, Worker, "submit", presses, after=after)

        def body(communicator):
            if communicator.rank == 1:
                presses.culprit = threading.current_thread()
                return communicator.world.all_reduce(LARGE, async_op=True).result(LIMIT)
            return communicator.world.all_reduce(LARGE)

        results = ranks.run(body)
        assert type(results[1]) is KeyboardInterrupt
        # Handed over or not, nobody waits for long: the call was carried out, or has failed for all.
        assert ranks.communicators[1].world.failure is not None


@pytest.mark.parametrize("moment", ["telling", "told", "explaining", "closing"])
def test_a_second_one_while_the_first_is_dealt_with(monkeypatch, moment):
    with cluster(3) as ranks:
        presses = Presses(2)
        progress = MessageOperation.progress

        def interrupted_progress(self, seconds):
            presses()
            return progress(self, seconds)

        monkeypatch.setattr(MessageOperation, "progress", interrupted_progress)
        match moment:
            case "telling":
                wrap(monkeypatch, Communicator, "send_control", presses)
            case "told":
                wrap(monkeypatch, Communicator, "send_control", presses, after=True)
            case "explaining":
                wrap(monkeypatch, Group, "_explain", presses, after=True)
            case "closing":
                wrap(monkeypatch, Group, "_close", presses)
        interrupted(ranks, presses)


def test_interrupted_while_it_renews_goes_on_where_it_is(monkeypatch):
    """The transport does it whole or not at all; whoever was interrupted may do it again."""
    with cluster(2) as ranks:
        ranks.replace(1)
        presses = Presses(1)
        presses.culprit = threading.current_thread()
        wrap(monkeypatch, Generation, "fail", presses)
        with pytest.raises(KeyboardInterrupt):
            ranks.renew(0)
        ranks.renew()
        assert [total.item() for total in ranks.all(lambda c: c.world.all_reduce(1))] == [2, 2]

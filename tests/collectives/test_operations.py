"""Operations that are made of several steps: together they wait no longer than they are told to."""

from __future__ import annotations

import pytest

from dmesh.collectives.backends import base
from dmesh.collectives.backends.base import Operation, Sequence
from dmesh.collectives.backends.tcp import channel
from dmesh.collectives.backends.tcp.messages import MessageOperation


class Clock:
    """Seconds that pass only when a step waits."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Step(Operation):
    """Takes some seconds of the time that it is given."""

    def __init__(self, clock, takes, given):
        self.clock, self.takes, self.given = clock, takes, given

    def progress(self, seconds):
        self.given.append(round(seconds, 6))
        waited = min(self.takes, seconds)
        self.clock.now += waited
        self.takes -= waited
        return self.takes <= 0

    def missing(self):
        return ()

    def fail(self, error):
        raise AssertionError

    def revoke(self):
        pass


@pytest.mark.parametrize("kind", ["operations", "messages"])
def test_steps_share_the_time_of_one_look(monkeypatch, kind):
    clock, given = Clock(), []
    monkeypatch.setattr(base if kind == "operations" else channel, "time", clock)
    steps = [Step(clock, takes, given) for takes in (0.5, 0.25, 1.0)]
    if kind == "operations":
        operation = Sequence(step for step in steps)
    else:
        operation = MessageOperation(None, (step.progress for step in steps))
    assert not operation.progress(1.0)
    assert given == [1.0, 0.5, 0.25]
    assert clock.now == 101.0
    assert operation.progress(1.0)
    assert given[3:] == [1.0]

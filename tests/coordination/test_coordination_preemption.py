"""Preemption: one step for all, whatever their speeds, and whoever is lost meanwhile."""

import random
import threading

import pytest

from dmesh.coordination.preemption import PREFIX
from dmesh.errors import ConfigurationError, CoordinationError, FencedError

PATIENCE = 60.0


class Runner:
    """A member in a loop: steps when it is told to, or by itself until all have to stop."""

    def __init__(self, agent, background, *, first: int = 0, stride: int = 1) -> None:
        self.agent = agent
        self.step = first
        self.stride = stride
        self._background = background

    def call(self) -> bool:
        """Calls `reached` with the next step, in this thread."""
        reached = self.agent.preemption.reached(self.step)
        self.step += self.stride
        return reached

    def run(self, pace=lambda: None):
        """Steps until the sync point; returns a future of it."""

        def loop() -> int:
            while not self.call():
                pace()
            return self.step - self.stride

        return self._background(loop)


@pytest.fixture
def runners(join, server, background):
    def make(count: int, **options):
        return [Runner(join(server.address, index, count, **options), background) for index in range(count)]

    return make


def held(runner: Runner) -> bool:
    """Whether a member has heard of the notice: its next call will wait, or is the sync point."""
    return runner.agent.preemption._notice is not None


def test_all_stop_at_the_same_step_although_their_speeds_differ(runners):
    members = runners(4)
    draw, idle = random.Random(7), threading.Event()
    stops = [
        member.run(lambda index=index: idle.wait((1 + index) * draw.random() * 0.001))
        for index, member in enumerate(members)
    ]
    members[2].agent.preemption.announce("the machine is needed elsewhere")
    assert len({stop.result(PATIENCE) for stop in stops}) == 1


def test_nobody_is_asked_to_stop_where_it_has_been_already(runners, background, eventually):
    """One is at step 100 when the notice comes, the other at step 3."""
    fast, slow = runners(2)
    for _ in range(100):
        assert not fast.call()
    for _ in range(3):
        assert not slow.call()
    slow.agent.preemption.announce("")
    eventually(lambda: held(fast) and held(slow))
    ahead = background(fast.call)  # step 100: the first that it has not passed
    while slow.step < 100:
        assert not slow.call()
    assert slow.call()
    assert ahead.result(PATIENCE)
    assert (fast.step, slow.step) == (101, 101)


def test_nobody_runs_on_while_the_step_is_not_agreed_on(runners, background, eventually):
    first, late = runners(2)
    first.call()
    first.agent.preemption.announce("")
    eventually(lambda: held(first))
    waiting = background(first.call)
    # Listening alone is not taking part: a member that may be loading data is waited for.
    late.agent.preemption.start()
    eventually(lambda: held(late))
    assert not waiting.done()
    assert not late.call()  # step 0
    assert waiting.result(PATIENCE)
    assert late.call()  # step 1
    assert (first.step, late.step) == (2, 2)


def test_who_waits_says_for_whom(join, server, background, quick):
    lines: list[str] = []
    said = threading.Event()

    def announce(line: str) -> None:
        lines.append(line)
        if "still waiting for the step" in line and "/job:worker/task:1 (host" in line:
            said.set()

    first = Runner(join(server.address, 0, 2, announce=announce, patience=quick), background)
    late = Runner(join(server.address, 1, 2), background)
    first.call()
    first.agent.preemption.announce("maintenance")
    stop = first.run()
    assert said.wait(PATIENCE), lines
    assert any(
        "/job:worker/task:0 (host " in line and "about to be preempted: maintenance" in line for line in lines
    )
    late.run().result(PATIENCE)
    stop.result(PATIENCE)


def test_announcing_twice_changes_nothing(runners, eventually):
    members = runners(3)
    for member in members:
        member.call()
    for member in members:
        member.agent.preemption.announce(f"by {member.agent.identity.task}")
    members[0].agent.preemption.announce("again")
    stops = [member.run() for member in members]
    assert len({stop.result(PATIENCE) for stop in stops}) == 1
    for member in members:
        assert not member.call(), "that preemption is over"


def test_there_may_be_another_one_later(runners, eventually):
    members = runners(2)
    for number in range(3):
        stops = [member.run() for member in members]
        members[number % 2].agent.preemption.announce(str(number))
        assert len({stop.result(PATIENCE) for stop in stops}) == 1


def test_a_larger_stride_is_the_same_for_all(runners):
    members = runners(3)
    for member in members:
        member.stride = 10
    stops = [member.run() for member in members]
    members[0].agent.preemption.announce("")
    (point,) = {stop.result(PATIENCE) for stop in stops}
    assert point % 10 == 0


def test_a_member_that_dies_meanwhile_is_done_without(runners, background, eventually):
    """The first member would decide, and it is the one that is taken away."""
    dying, second, third = runners(3)
    for member in (second, third):
        for _ in range(5):
            member.call()
    # It takes part, but never gets anywhere.
    dying.agent.preemption.start()
    dying.agent.preemption.announce("")
    eventually(lambda: held(second) and held(third))
    stops = [second.run(), third.run()]
    assert not any(stop.done() for stop in stops)
    dying.agent.close()  # without a goodbye
    assert {stop.result(PATIENCE) for stop in stops} == {5}


def test_a_member_that_has_left_is_done_without(runners, background):
    first, second = runners(2)
    for _ in range(3):
        first.call()
        second.call()
    first.agent.leave()
    second.agent.preemption.announce("")
    assert second.run().result(PATIENCE) >= 3


def test_a_fenced_member_is_told_so(runners, background, eventually):
    first, second = runners(2)
    first.call()
    second.agent.preemption.start()
    first.agent.preemption.announce("")
    eventually(lambda: held(first))
    waiting = background(first.call)
    first.agent._session.fail(FencedError("it was declared lost"))
    with pytest.raises(FencedError, match="declared lost"):
        waiting.result(PATIENCE)


def test_listeners_are_told_also_when_they_come_late(runners):
    first, second = runners(2)
    told: list = []
    heard = threading.Event()
    second.agent.preemption.add_listener(lambda notice: (told.append(notice), heard.set()))
    first.agent.preemption.announce("maintenance")
    assert heard.wait(PATIENCE)
    late_heard = threading.Event()
    second.agent.preemption.add_listener(lambda notice: (told.append(notice), late_heard.set()))
    assert late_heard.wait(PATIENCE)
    assert told[0] == told[1]
    assert (told[0].task, told[0].reason) == ("/job:worker/task:0", "maintenance")
    assert told[0].pid == first.agent.identity.process.pid


def test_a_successor_that_waits_elsewhere_is_not_waited_for(join, server, background, eventually, spawn):
    """As after a rejoin: the others have to reach the barrier at which they take it in."""
    first = Runner(join(server.address, 0, 2), background)
    second = join(server.address, 1, 2)
    # The task slot's former holder took part.
    second.key_value_set("dmesh/preemption/member/worker/1", "%016x" % (second.identity.incarnation ^ 1))
    first.call()
    first.agent.preemption.announce("")
    assert first.run().result(PATIENCE) >= 1
    # It keeps to what was agreed on, as long as nobody is past it; somebody is.
    eventually(lambda: second.key_value_try_get("dmesh/preemption/passed/1") is not None)
    successor = Runner(second, background, first=1)
    assert not successor.call()
    assert not successor.call()


def test_a_successor_keeps_to_a_step_that_is_still_to_come(join, server, background, eventually):
    first = Runner(join(server.address, 0, 2), background)
    second = join(server.address, 1, 2)
    second.key_value_set("dmesh/preemption/member/worker/1", "%016x" % (second.identity.incarnation ^ 1))
    for _ in range(5):
        first.call()
    first.agent.preemption.announce("")
    eventually(lambda: second.key_value_try_get("dmesh/preemption/sync/1") is not None)
    successor = Runner(second, background, first=3)
    second.preemption.start()
    eventually(lambda: second.preemption._sync is not None or held(successor))
    assert [successor.call(), successor.call(), successor.call()] == [False, False, True]
    assert first.call()
    assert first.step == successor.step


def test_the_steps_of_a_lost_round_do_not_stay_in_the_store(runners, eventually):
    members = runners(2)
    stops = [member.run() for member in members]
    members[0].agent.preemption.announce("")
    for stop in stops:
        stop.result(PATIENCE)
    agent = members[0].agent
    eventually(lambda: agent.key_value_try_get("dmesh/preemption/passed/1"))
    assert agent.key_value_list("dmesh/preemption/step/") == {}


def test_a_restart_of_the_coordinator_without_its_store(join, standalone, background, eventually):
    """What was said to the one that is gone is said again."""
    coordinator = standalone("--memory")
    first, late = (Runner(join(coordinator.address, index, 2), background) for index in range(2))
    first.call()
    first.agent.preemption.announce("")
    eventually(lambda: held(first))
    stop = first.run()
    coordinator.kill()
    coordinator.start()
    assert late.run().result(PATIENCE) == stop.result(PATIENCE)


def test_a_notice_is_lost_with_the_store_before_its_author_posts(runners, eventually):
    """The post then reaches a store that knows of no notice: who posted says it again."""
    first, late = runners(2)
    first.agent.preemption.announce("")
    eventually(lambda: held(first))
    first.agent.key_value_delete(f"{PREFIX}notice/1")
    stop = first.run()
    assert late.run().result(PATIENCE) == stop.result(PATIENCE)


def test_steps_are_numbers(runners):
    (only,) = runners(1)
    for step in ("1", 1.5, None, True):
        with pytest.raises(ConfigurationError, match="step must be an integer"):
            only.agent.preemption.reached(step)


def test_after_the_end_nothing_is_reached(runners):
    (only,) = runners(1)
    only.call()
    only.agent.leave()
    with pytest.raises(CoordinationError):
        only.call()

"""Long work for readers: in small steps, once for all who ask, and nothing kept that nobody will be given."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import httpx
import pytest
from tests.server.raw_client import PATIENCE
from tests.server.web_server import Web, join_all, serving_web

from dmesh.cli.observing import Picture
from dmesh.coordination.explanation import explain, explain_in_steps
from dmesh.coordination.members import ClusterState, Member, MemberState, Process
from dmesh.coordination.members import Liveness as SeenLiveness
from dmesh.coordination.members import Task as SeenTask
from dmesh.testing import ManualClock
from dmesh.v1 import progress_pb2 as pb
from dmesh_server import progress
from dmesh_server.core.effects import Done
from dmesh_server.core.events import Leave
from dmesh_server.core.model import Caller, Liveness, Task
from dmesh_server.progress import MemberProgress, ProgressBook
from dmesh_server.web import pacer
from dmesh_server.web.api import collectives, sharing, why
from dmesh_server.web.api.sharing import Shared
from dmesh_server.web.pacer import Pacer, Steps


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as running:
        yield running


class Work:
    """Counts how often it is asked, and is done when it is told."""

    def __init__(self, good: float = 1.0) -> None:
        self.good = good
        self.asked: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self.go = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self, asked: str) -> tuple[object, float]:
        self.asked.append(asked)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.go.wait()
            if self.failure is not None:
                raise self.failure
            return object(), self.good
        finally:
            self.at_once -= 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_many_readers_are_given_what_was_worked_out_once() -> None:
    clock, work = ManualClock(), Work()
    shared = Shared(clock, work)
    readers = [asyncio.create_task(shared.of("a")) for _ in range(100)]
    await settle()
    work.go.set()
    answers = await asyncio.gather(*readers)
    assert len({id(one) for one in answers}) == 1
    clock.advance(0.999)
    assert await shared.of("a") is answers[0]
    assert work.asked == ["a"]
    clock.advance(0.001)  # good for a second from when the work began, and not longer
    assert await shared.of("a") is not answers[0]
    assert work.asked == ["a", "a"]


async def test_what_took_longer_than_it_is_good_is_given_to_those_who_waited_only() -> None:
    clock, work = ManualClock(), Work(good=1.0)
    shared = Shared(clock, work)
    reader = asyncio.create_task(shared.of("a"))
    await settle()
    clock.advance(5.0)
    work.go.set()
    first = await reader
    assert await shared.of("a") is not first


async def test_one_thing_at_a_time_is_worked_out() -> None:
    work = Work()
    shared = Shared(ManualClock(), work)
    readers = [asyncio.create_task(shared.of(f"{number}")) for number in range(5)]
    await settle()
    work.go.set()
    await asyncio.gather(*readers)
    assert (len(work.asked), work.most_at_once) == (5, 1)


async def test_a_reader_that_leaves_stops_nobody_else() -> None:
    work = Work()
    shared = Shared(ManualClock(), work)
    first, second = (asyncio.create_task(shared.of("a")) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    work.go.set()
    await second
    assert first.cancelled()
    assert work.asked == ["a"]


async def test_failures_are_told_to_all_who_wait_and_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    work.failure = LookupError("gone")
    shared = Shared(ManualClock(), work)
    readers = [asyncio.create_task(shared.of("a")) for _ in range(3)]
    left = asyncio.create_task(shared.of("b"))  # nobody waits for this one any more when it fails
    await settle()
    left.cancel()
    work.go.set()
    assert [str(one) for one in await asyncio.gather(*readers, return_exceptions=True)] == ["gone"] * 3
    work.failure = None
    assert await shared.of("a") is not None
    await settle()
    assert not shared._under_way
    assert not caplog.records


async def test_answers_that_are_good_no_more_are_not_kept_and_there_are_few() -> None:
    work = Work(good=60.0)
    work.go.set()
    shared = Shared(ManualClock(), work)
    for number in range(3 * sharing._MOST_KEPT):
        await shared.of(f"{number}")
    assert len(shared._kept) == sharing._MOST_KEPT
    work.good = 0.0
    await shared.of("short")
    async with asyncio.timeout(PATIENCE):
        while "short" in shared._kept:
            await asyncio.sleep(0.001)
    assert not shared._under_way


async def test_what_is_not_kept_any_more_is_held_by_nothing() -> None:
    class Answer:
        pass

    made = list[weakref.ref[Answer]]()

    async def work(asked: int) -> tuple[Answer, float]:
        answer = Answer()
        made.append(weakref.ref(answer))
        return answer, 60.0

    shared = Shared(ManualClock(), work)
    for number in range(3 * sharing._MOST_KEPT):
        await shared.of(number)
    await settle()
    gc.collect()
    assert sum(one() is not None for one in made) == sharing._MOST_KEPT


async def test_others_have_their_turn_between_steps() -> None:
    passed, stop = 0, False

    async def others() -> None:
        nonlocal passed
        while not stop:
            passed += 1
            await asyncio.sleep(0)

    def work() -> Generator[None, None, str]:
        for _ in range(20):
            seen.append(passed)
            end = time.perf_counter() + pacer._STEP
            while time.perf_counter() < end:
                pass
            yield
        return "done"

    seen: list[int] = []
    beside = asyncio.create_task(others())
    assert await Steps(Pacer()).through(work()) == "done"
    stop = True
    await beside
    assert all(later > earlier for earlier, later in itertools.pairwise(seen))


async def test_short_work_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_STEP", 60.0)
    steps, others = Steps(Pacer()), asyncio.create_task(asyncio.sleep(0))
    for _ in range(100):
        await steps.pause()
    assert not others.done()
    await others


async def test_turns_are_one_after_another() -> None:
    loop, given = asyncio.get_running_loop(), Pacer()
    began = loop.time()
    waits = [given.take() for _ in range(5)]
    took = loop.time() - began
    assert waits[0] == 0.0  # there is nothing to wait for
    for number, seconds in enumerate(waits[1:], 1):
        assert number * pacer.BETWEEN - took <= seconds <= number * pacer.BETWEEN
    await asyncio.sleep(6 * pacer.BETWEEN)
    assert given.take() == 0.0  # turns that nobody took are not kept


async def test_probes_do_not_wait_for_their_turn(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = asyncio.Event()

    async def wait(given: Pacer) -> None:
        await forever.wait()

    monkeypatch.setattr(Pacer, "wait", wait)
    async with web.client() as http, web.client(None) as stranger:
        waiting = asyncio.create_task(http.get("/api/v1/server"))
        for path in ("/livez", "/readyz"):
            assert (await stranger.get(path)).status_code == 200
        assert (await stranger.get("/api/v1/server")).status_code == 401  # nor does who is refused
        assert not waiting.done()
        forever.set()
        assert (await waiting).status_code == 200


async def test_who_asks_and_goes_away_has_nobody_wait_for_minutes(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacer, "BETWEEN", pacer.LONGEST / 4)
    async with web.client() as http:
        for _ in range(20):
            try:
                answer = await http.get("/api/v1/server", timeout=httpx.Timeout(PATIENCE, read=0.1))
            except httpx.ReadTimeout:  # it does not wait for its turn
                continue
            if answer.status_code == 503:
                break
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "too many requests" in answer.json()["status"]
        assert (await http.get("/livez")).status_code == 200


def tell(web: Web, index: int, issued: int, waits_for: list[int] | None = None) -> None:
    last = pb.CallRecord(
        group=7, sequence=issued, call="barrier()", waits_for=waits_for or (),
        state=pb.CALL_STATE_WAITING if waits_for else pb.CALL_STATE_DONE,
    )  # fmt: skip
    group = pb.GroupProgress(
        id=7, name="world", size=4, issued=issued, finished=issued - bool(waits_for), last=last
    )
    report = pb.ProgressReport(groups=[group], recent=[last], meshes=[pb.AnnouncedMesh(name="grid")])
    caller = Caller("big", Task("worker", index), 1000 + index)
    web.runtime.progress.note(caller, report.SerializeToString())


async def test_dashboards_share_what_members_said(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    await join_all(web.runtime, 4)
    for index in range(4):
        tell(web, index, issued=3)
    compared = 0
    compare = collectives.compare_all

    async def counting(*arguments):
        nonlocal compared
        compared += 1
        return await compare(*arguments)

    monkeypatch.setattr(collectives, "compare_all", counting)
    async with web.client() as http:
        path = "/api/v1/clusters/big/collectives?recent=16"
        answers = await asyncio.gather(*(http.get(path) for _ in range(30)))
        assert {one.status_code for one in answers} == {200}
        assert compared < len(answers) / 2  # one a second, in however many that takes


async def test_whoever_waits_for_somebody_is_no_straggler(web: Web) -> None:
    await join_all(web.runtime, 4)
    tell(web, 0, issued=5, waits_for=[1, 2, 3])
    tell(web, 1, issued=5, waits_for=[2])  # held up itself
    tell(web, 2, issued=4)  # has not come
    async with web.client() as http:
        [group] = (await http.get("/api/v1/clusters/big/collectives")).json()["groups"]
    # Nothing is known of the last one but that somebody waits for it.
    assert group["stragglers"] == ["/job:worker/task:3", "/job:worker/task:2"]
    assert [one["task"][-1] for one in group["members"]] == ["2", "1", "0"]
    assert (group["latest"], group["reported"]) == (5, 3)


async def test_task_slots_show_a_change_at_once(web: Web) -> None:
    await join_all(web.runtime, 4)
    runtime, path = web.runtime, "/api/v1/clusters/big/tasks"
    async with web.client() as http:
        assert (await http.get(path)).json()["conditions"] == "CCCC"
        caller = Caller("big", Task("worker", 2), 1002)
        await runtime.request(Leave(runtime.next_number(), caller, "leave", ""), Done)
        assert (await http.get(path)).json()["conditions"] == "CCLC"
        assert (await http.get(f"{path}?after=1&limit=2")).json()["conditions"] == "CL"
        topology = (await http.get("/api/v1/clusters/big/topology")).json()
        assert [host["members"] for host in topology["hosts"]] == [3]


async def test_reports_are_read_in_brief_as_they_come_while_somebody_looks() -> None:
    clock = ManualClock()
    book = ProgressBook(clock)
    caller = Caller("c", Task("worker", 0), 5)
    encoded = pb.ProgressReport(groups=[pb.GroupProgress(id=7, issued=3)]).SerializeToString()

    def noted() -> MemberProgress:
        book.note(caller, encoded)
        [said] = book.members("c")
        return said

    assert noted()._brief is None
    [said] = book.look("c")
    assert said.brief() is said.brief() is not None
    clock.advance(progress.LOOKED_AT - 1)
    assert noted()._brief is not None
    clock.advance(1)
    assert noted()._brief is None
    assert book.look("nobody") == ()


def test_a_brief_says_what_the_report_says() -> None:
    last = pb.CallRecord(
        sequence=6, call="c" * 5000, age_us=4, state=pb.CALL_STATE_RUNNING, waits_for=range(500)
    )
    groups = [
        pb.GroupProgress(
            id=7, generation=2, name="n" * 5000, size=3, ranks=range(1000), issued=6, finished=5,
            failure="f" * 5000, last=last,
        ),
        pb.GroupProgress(id=8),
    ]  # fmt: skip
    said = MemberProgress(
        Task("worker", 0), 5, 0.0, pb.ProgressReport(groups=groups * 30).SerializeToString()
    )
    brief, report = said.brief(), said.read()
    assert brief is not None
    assert report is not None
    assert len(brief) == len(report.groups) == 32
    for one, group in zip(brief, report.groups, strict=True):
        assert one[:5] == (group.id, group.generation, group.name, group.size, group.ranks)
        assert (one.issued, one.finished, one.failure) == (group.issued, group.finished, group.failure)
    told, call = brief[0].last, report.groups[0].last
    assert call is not None
    assert (told.sequence, told.call, told.age_us, told.pending) == (6, call.call, 4, True)
    assert told.waits_for == call.waits_for
    assert brief[1].last == progress.CallBrief()
    assert MemberProgress(Task("worker", 0), 5, 0.0, b"\xff").brief() is None


async def test_why_knows_who_is_well_again_and_who_came(web: Web, served) -> None:
    reasons = why._Reasons(served.runtime, Pacer())
    await join_all(served.runtime, 4)

    async def members() -> dict[int, tuple[str, str, int]]:
        picture = await reasons._picture("big", served.runtime.now(), Steps(Pacer()))
        return {
            one.index: (one.state.name, one.liveness.name, one.incarnation) for one in picture.state.members
        }

    well = {index: ("CONNECTED", "LIVE", 1000 + index) for index in range(4)}
    assert await members() == well
    roster = served.runtime._core._clusters["big"].roster
    slot = roster.slots[Task("worker", 1)]
    slot.liveness = Liveness.STUCK  # no change of membership
    assert await members() == well | {1: ("CONNECTED", "STUCK", 1001)}
    slot.liveness = Liveness.LIVE
    assert await members() == well
    caller = Caller("big", Task("worker", 2), 1002)
    await served.runtime.request(Leave(served.runtime.next_number(), caller, "leave", ""), Done)
    assert await members() == well | {2: ("LEFT", "LIVE", 1002)}


async def test_a_large_cluster_is_explained_in_many_steps() -> None:
    members = tuple(
        Member(
            "worker",
            index,
            index,
            MemberState.CONNECTED,
            Process("h", index),
            0.1,
            9.0,
            "",
            SeenLiveness.LIVE,
        )
        for index in range(1000)
    )
    call = pb.CallRecord(group=7, sequence=6, call="all_reduce()", age_us=8_000_000)
    reports = {}
    for index in range(1000):
        group = pb.GroupProgress(
            id=7, name="world", size=1000, issued=6 if index else 5, finished=5, last=call
        )
        reports[SeenTask("worker", index)] = pb.MemberProgress(report=pb.ProgressReport(groups=[group]))
    picture = Picture("c", "", ClusterState(1, 1, 1, members, (), ()), reports)
    steps, work = 0, explain_in_steps(picture)
    with pytest.raises(StopIteration) as done:
        while True:
            next(work)
            steps += 1
    assert steps >= 20
    assert done.value.value == explain(picture)
    [wait] = done.value.value.waits
    assert [suspect.rank for suspect in wait.suspects] == [0]
    assert wait.present == tuple(range(1, 1000))

"""What is wrong with a cluster, drawn from what its server sees and what its members said."""

from __future__ import annotations

import pytest
from tests.cli.pictures import group, member, picture, said

from dmesh.coordination.activity import Activity
from dmesh.coordination.explanation import (
    Verdict,
    describe,
    explain,
    judge,
    line_of,
    ranks_text,
    seconds_text,
)
from dmesh.coordination.members import BarrierStatus, DepartureCause, Liveness, MemberState, Task

KILLED = {"cause": DepartureCause.PROCESS_GONE, "reason": "its connection closed without a goodbye"}


def members(count: int) -> list:
    return [member(rank) for rank in range(count)]


def verdict_of(found) -> Verdict:
    return judge(explain(found), found)


def facts(verdict: Verdict) -> dict[str, str]:
    return {fact.label: fact.text for fact in reversed(verdict.evidence)}


def lost(rank: int, victim_of: int | None = None) -> object:
    """Returns a member that was killed, or one that raised because another was."""
    if victim_of is None:
        return member(rank, MemberState.LOST, **KILLED)
    reason = (
        f"PeerLostError: lost rank {victim_of}, /job:worker/task:{victim_of} (host h, pid 1): its connection"
    )
    return member(rank, MemberState.FAILED, cause=DepartureCause.EXITED, reason=reason)


def test_nothing_waits() -> None:
    found = picture(members(3), [said(rank, group(5, 5)) for rank in range(3)])
    assert explain(found).waits == ()
    verdict = verdict_of(found)
    assert (verdict.kind, verdict.severity, verdict.culprits) == ("healthy", "ok", ())
    assert describe(verdict) == "Nothing is waiting · 3 members are connected"


def test_the_rank_that_has_not_called_is_the_culprit_with_its_last_call_and_its_line() -> None:
    late = said(2, group(11, 11, call="broadcast(root=0, int64, shape ())"), where="/x/late.py:12 in train")
    found = picture(members(3), [said(0, group(12, 11, (2,))), said(1, group(12, 11, (2,))), late])
    [wait] = explain(found).waits
    assert (wait.kind, wait.group, wait.sequence, wait.present) == ("collective", "world", 12, (0, 1))
    assert wait.since == pytest.approx(5.5)
    verdict = verdict_of(found)
    assert (verdict.kind, verdict.severity) == ("waiting", "bad")
    assert verdict.headline == "Rank 2 is holding up 2 ranks · 5.5 s"
    assert [one.rank for one in verdict.culprits] == [2]
    assert verdict.victims == (Task("worker", 0), Task("worker", 1))
    assert [fact.brief for fact in verdict.evidence if fact.brief] == [
        "late.py:12 train", "all_reduce #12 · float64 (4,)", "pid 12 · h2",
    ]  # fmt: skip
    assert facts(verdict)["last call"] == "#11, broadcast(root=0, int64, shape ())"
    where = "collective #12 of group world, all_reduce(sum, float64, shape (4,)): ranks 0, 1 are there"
    assert describe(verdict).splitlines() == [
        "Rank 2 is holding up 2 ranks · 5.5 s",
        "  culprit        rank 2: /job:worker/task:2, host h2, pid 12",
        "  line           /x/late.py:12 in train",
        f"  waits in       {where}",
        "  last call      #11, broadcast(root=0, int64, shape ())",
        "  last progress  5.5 s ago (reported 0.5 s ago)",
    ]


def test_a_rank_that_never_made_the_group_is_missing() -> None:
    found = picture(members(3), [said(0, group(1, 0, (1,))), said(1), said(2)])
    assert verdict_of(found).headline == "Ranks 1, 2 are holding up 1 rank · 5.5 s"


def test_a_rank_that_told_nothing_is_missing_and_said_to_be_silent() -> None:
    found = picture(members(2), [said(0, group(1, 0, (1,), size=2))])
    verdict = verdict_of(found)
    assert verdict.culprits[0].said is None
    assert facts(verdict)["last progress"] == "it has reported none"


def test_short_waits_are_nothing_to_be_explained_and_longer_ones_grow_grave() -> None:
    waits = said(0, group(2, 1, (1,), age=0.2, size=2), age=2.9)
    found = picture(members(2), [waits, said(1, group(1, 1, size=2))])
    assert explain(found, patience=0.5).waits == (), "it was short when it was told of"
    explanation = explain(found, patience=0.1)
    [wait] = explanation.waits
    assert (wait.seen, wait.since) == (pytest.approx(0.2), pytest.approx(3.1))
    assert judge(explanation, found).severity == "warn"


def test_the_cause_comes_before_its_consequences() -> None:
    pair = {"number": 7, "name": "pair", "ranks": (1, 2), "size": 2}
    found = picture(
        members(3),
        [
            said(0, group(4, 3, (1,), age=9.0)),
            said(1, group(2, 1, (2,), age=4.0, **pair), group(3, 3)),
            said(2, group(1, 1, **pair), group(4, 3, (1,), age=9.0)),
        ],
    )
    # 2 has not come to the pair's call, because it is in the world's, where it waits for 1: a circle.
    assert set(explain(found).circle) == {1, 2}
    verdict = verdict_of(found)
    assert (verdict.kind, {one.rank for one in verdict.culprits}) == ("deadlock", {1, 2})
    assert verdict.headline == "Ranks 1, 2 wait for each other · 9.5 s"
    assert "This deadlock will not resolve itself" in verdict.consequence
    found.reports[Task("worker", 2)].CopyFrom(said(2, group(1, 1, **pair), group(3, 3)))
    explanation = explain(found)
    assert explanation.circle == ()
    assert [wait.group for wait in explanation.waits] == ["pair", "world"]
    verdict = judge(explanation, found)
    assert verdict.headline == "Rank 2 is holding up 2 ranks · 4.5 s", "rank 0 waits for 1, which waits for 2"
    assert facts(verdict)["also"].startswith("rank 0 waits in collective #4 of group world")


def test_all_have_called_but_data_does_not_come() -> None:
    found = picture(members(2), [said(r, group(3, 2, (1 - r,), size=2)) for r in range(2)])
    [wait] = explain(found).waits
    assert [suspect.rank for suspect in wait.suspects] == [0, 1]
    assert verdict_of(found).headline == "Ranks 0, 1 wait for data · 5.5 s"


def test_transfers_are_called_so() -> None:
    pair = {"number": 9, "name": "world: 0 to 1", "ranks": (0, 1), "size": 2}
    found = picture(
        members(3), [said(1, group(1, 0, (0,), call="recv(float64, shape (3,))", **pair)), said(0), said(2)]
    )
    [wait] = explain(found).waits
    assert wait.what == "transfer #1 of group world: 0 to 1, recv(float64, shape (3,))"
    verdict = verdict_of(found)
    assert [one.rank for one in verdict.culprits] == [0]
    assert "recv #1 · float64 (3,)" in [fact.brief for fact in verdict.evidence]


def test_generations_are_not_mixed() -> None:
    old, new = group(50, 50, generation=0), group(2, 1, (1,), generation=4)
    found = picture(members(2), [said(0, new), said(1, old)])
    [wait] = explain(found).waits
    assert (wait.sequence, [suspect.rank for suspect in wait.suspects]) == (2, [1])


def test_barriers_vacant_and_stuck_members() -> None:
    barrier = BarrierStatus("load", 2, (Task("worker", 0),), (Task("worker", 1),), 7.0, None)
    found = picture([member(0), member(1)], [said(1, where="a.py:3 in load")], (barrier,))
    verdict = verdict_of(found)
    assert verdict.headline == "Rank 1 is holding up 1 rank · 7.0 s"
    assert facts(verdict)["waits in"] == "barrier 'load' (instance 2): rank 0 is there"
    assert facts(verdict)["line"] == "a.py:3 in load"

    found = picture([member(0, registered_age=3.0)], vacant=(1, 2))
    verdict = verdict_of(found)
    assert (verdict.kind, verdict.severity, verdict.culprits) == ("forming", "idle", ())
    assert verdict.headline == "2 of 3 clients have not registered yet · 3.0 s"
    assert facts(verdict)["missing"] == "ranks 1, 2"

    activity = Activity("", 61.0, ())
    stuck = member(1, liveness=Liveness.STUCK, reason="others wait", activity=activity)
    assert verdict_of(picture([member(0), stuck])).headline == "Rank 1 is stuck · 61 s"
    verdict = verdict_of(picture([member(0), stuck], barriers=(barrier,)))
    assert verdict.headline == "Rank 1 is holding up 1 rank · 7.0 s", (
        "the call in which others wait says more"
    )
    assert facts(verdict)["state"] == "stuck: others wait"


def test_a_killed_rank_is_the_culprit_and_those_that_lost_it_are_its_victims() -> None:
    everyone = [lost(rank, 3) if rank != 3 else lost(3) for rank in range(6)]
    reports = [said(rank, group(9, 9, size=6), where=f"/x/late.py:{rank + 5} in step") for rank in range(6)]
    verdict = verdict_of(picture(everyone, reports))
    assert (verdict.kind, verdict.severity) == ("failed", "bad")
    assert verdict.headline == "Rank 3 was killed · late.py:8"
    assert verdict.consequence == "5 others stopped because of it"
    assert [one.rank for one in verdict.culprits] == [3]
    assert [task.index for task in verdict.victims] == [0, 1, 2, 4, 5]
    assert facts(verdict)["others"].startswith("ranks 0-2, 4, 5: PeerLostError: lost rank 3")
    assert facts(verdict)["reason"] == KILLED["reason"]


def test_a_rank_that_raised_is_told_from_those_that_heard_of_it() -> None:
    raised = member(1, MemberState.FAILED, cause=DepartureCause.EXITED, reason="ValueError: bad batch")
    verdict = verdict_of(picture([lost(0, 1), raised, lost(2, 1)], [said(1, where="/x/a.py:7 in load")]))
    assert verdict.headline == "Rank 1 failed with ValueError · a.py:7"
    assert facts(verdict)["reason"] == "ValueError: bad batch"


def test_processes_that_were_ended_afterwards_are_victims_if_the_others_name_the_first() -> None:
    # A launcher killed rank 2 before it could say that it had lost rank 1.
    verdict = verdict_of(picture([lost(0, 1), lost(1), lost(2)]))
    assert verdict.headline == "Rank 1 was killed"
    assert [task.index for task in verdict.victims] == [0, 2]


def test_several_were_killed_and_some_wait_for_them() -> None:
    barrier = BarrierStatus(
        "load", 0, (Task("worker", 0),), (Task("worker", 1), Task("worker", 2)), 4.0, None
    )
    verdict = verdict_of(picture([member(0), lost(1), lost(2)], barriers=(barrier,)))
    assert verdict.headline == "Ranks 1, 2 were killed"
    assert verdict.consequence == "1 rank waits for them"
    assert verdict.victims == (Task("worker", 0),)


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        ({"cause": DepartureCause.EVICTED, "reason": "too slow"}, "was evicted by an operator"),
        ({"cause": DepartureCause.SILENT, "reason": "no sign of life"}, "was silent"),
        ({"cause": DepartureCause.EXITED, "reason": "exited with code 3"}, "exited with code 3"),
        ({"cause": DepartureCause.REPORTED_ERROR, "reason": "out of memory"}, "failed"),
    ],
)
def test_how_a_member_ended(facts: dict[str, object], end: str) -> None:
    verdict = verdict_of(picture([member(0), member(1, MemberState.FAILED, **facts)]))
    assert verdict.headline == f"Rank 1 {end}"


def test_a_cluster_whose_members_left_is_finished() -> None:
    verdict = verdict_of(picture([member(rank, MemberState.LEFT) for rank in range(2)]))
    assert (verdict.kind, verdict.headline) == ("ended", "Finished: 2 members left cleanly")


def test_the_rank_that_others_wait_for_again_and_again_is_slow() -> None:
    reports = [said(r, group(40, 40, counted=40, size=3)) for r in range(3)]
    for report, waited in zip(reports, (600, 50, 620), strict=True):
        report.report.groups[0].elapsed_us, report.report.groups[0].waited_us = 1000, waited
    verdict = verdict_of(picture(members(3), reports))
    assert (verdict.kind, verdict.severity) == ("slow", "warn")
    assert verdict.headline == "Rank 1 is slower than the others · they wait 60% of their calls"
    del reports[0]
    assert verdict_of(picture(members(3), reports)).kind == "healthy", "not all have told"


def test_many_missing_ranks_are_few_words() -> None:
    reports = [said(0, group(1, 0, (1,), size=100)), *(said(rank) for rank in range(1, 100))]
    text = describe(verdict_of(picture(members(100), reports)))
    assert text.startswith("Ranks 1-99 are holding up 1 rank")
    assert "and 91 more" in text
    assert len(text) < 2500


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "nobody"),
        ([3], "rank 3"),
        ([4, 3], "ranks 3, 4"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more runs"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_seconds_and_lines_in_words() -> None:
    found = [seconds_text(s) for s in (0.04, 9.9, 75, 700, 7200)]
    assert found == ["0.0 s", "9.9 s", "75 s", "12 min", "2.0 h"]
    assert [line_of(w) for w in ("/a/b.py:3 in <module>", "b.py:3 in f", "")] == ["b.py:3", "b.py:3", ""]

"""Why a cluster waits, drawn from what its server sees and what its members said."""

from __future__ import annotations

import pytest
from tests.cli.pictures import group, member, picture, said

from dmesh.coordination.activity import Activity
from dmesh.coordination.explanation import describe, explain, ranks_text, seconds_text
from dmesh.coordination.members import BarrierStatus, Liveness, MemberState, Task


def members(count: int) -> list:
    return [member(rank) for rank in range(count)]


def test_nothing_waits() -> None:
    found = picture(members(3), [said(rank, group(5, 5)) for rank in range(3)])
    explanation = explain(found)
    assert explanation.waits == ()
    assert describe(explanation, found) == (
        "Cluster 'c' waits for nothing: 3 members are there, and none is held up."
    )


def test_the_rank_that_has_not_called_is_named_with_its_last_call_and_its_line() -> None:
    late = said(2, group(11, 11, call="broadcast(root=0, int64, shape ())"), where="/x/late.py:12 in train")
    found = picture(members(3), [said(0, group(12, 11, (2,))), said(1, group(12, 11, (2,))), late])
    explanation = explain(found)
    [wait] = explanation.waits
    assert (wait.kind, wait.group, wait.sequence, wait.present) == ("collective", "world", 12, (0, 1))
    assert wait.since == pytest.approx(5.5)
    [suspect] = wait.suspects
    assert (suspect.rank, suspect.last_sequence, suspect.where) == (2, 11, "/x/late.py:12 in train")
    text = describe(explanation, found)
    assert "for 5.5 s in collective #12 of group world, all_reduce(sum, float64, shape (4,))" in text
    assert "ranks 0, 1 are there, rank 2 is missing" in text
    assert "Rank 2 (/job:worker/task:2, host h2, pid 12): last call #11, broadcast(root=0" in text
    assert "main thread at /x/late.py:12 in train (reported 0.5 s ago)." in text


def test_a_rank_that_never_made_the_group_is_missing() -> None:
    found = picture(members(3), [said(0, group(1, 0, (1,))), said(1), said(2)])
    assert [suspect.rank for suspect in explain(found).waits[0].suspects] == [1, 2]


def test_a_rank_that_told_nothing_is_missing_and_said_to_be_silent() -> None:
    found = picture(members(2), [said(0, group(1, 0, (1,), size=2))])
    explanation = explain(found)
    assert explanation.waits[0].suspects[0].said is None
    assert "no progress reported." in describe(explanation, found)


def test_short_waits_are_nothing_to_be_explained() -> None:
    waits = said(0, group(2, 1, (1,), age=0.2, size=2), age=2.9)
    found = picture(members(2), [waits, said(1, group(1, 1, size=2))])
    assert explain(found, patience=0.5).waits == (), "it was short when it was told of"
    [wait] = explain(found, patience=0.1).waits
    assert (wait.seen, wait.since) == (pytest.approx(0.2), pytest.approx(3.1))


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
    explanation = explain(found)
    assert set(explanation.circle) == {1, 2}
    assert "wait for each other" in describe(explanation, found)
    found.reports[Task("worker", 2)].CopyFrom(said(2, group(1, 1, **pair), group(3, 3)))
    explanation = explain(found)
    assert explanation.circle == ()
    assert [wait.group for wait in explanation.waits] == ["pair", "world"]
    assert "Also waited in, for 9.5 s: collective #4 of group world" in describe(explanation, found)


def test_all_have_called_but_data_does_not_come() -> None:
    found = picture(members(2), [said(r, group(3, 2, (1 - r,), size=2)) for r in range(2)])
    [wait] = explain(found).waits
    assert [suspect.rank for suspect in wait.suspects] == [0, 1]


def test_transfers_are_called_so() -> None:
    pair = {"number": 9, "name": "world: 0 to 1", "ranks": (0, 1), "size": 2}
    found = picture(
        members(3), [said(1, group(1, 0, (0,), call="recv(float64, shape (3,))", **pair)), said(0), said(2)]
    )
    [wait] = explain(found).waits
    assert wait.what == "transfer #1 of group world: 0 to 1, recv(float64, shape (3,))"
    assert [suspect.rank for suspect in wait.suspects] == [0]


def test_generations_are_not_mixed() -> None:
    old, new = group(50, 50, generation=0), group(2, 1, (1,), generation=4)
    found = picture(members(2), [said(0, new), said(1, old)])
    [wait] = explain(found).waits
    assert (wait.sequence, [suspect.rank for suspect in wait.suspects]) == (2, [1])


def test_barriers_lost_vacant_and_stuck_members() -> None:
    barrier = BarrierStatus("load", 2, (Task("worker", 0),), (Task("worker", 1),), 7.0, None)
    found = picture([member(0), member(1)], [said(1, where="a.py:3 in load")], (barrier,))
    explanation = explain(found)
    assert explanation.waits[0].what == "barrier 'load' (instance 2)"
    assert "main thread at a.py:3 in load" in describe(explanation, found)

    lost = member(1, MemberState.LOST, reason="its connection ended", last_seen_age=4.0)
    found = picture([member(0), lost])
    text = describe(explain(found), found)
    assert text.startswith("Cluster 'c' has lost rank 1;")
    assert ": lost: its connection ended; no progress reported." in text

    found = picture([member(0, registered_age=3.0)], vacant=(1, 2))
    text = describe(explain(found), found)
    assert "has waited for 3.0 s in clients that have not registered yet" in text
    assert "Rank 1 (/job:worker/task:1) has not registered." in text

    activity = Activity("", 61.0, ())
    stuck = member(1, liveness=Liveness.STUCK, reason="others wait", activity=activity)
    found = picture([member(0), stuck])
    assert "has a member that is stuck: rank 1." in describe(explain(found), found)


def test_many_missing_ranks_are_few_words() -> None:
    reports = [said(0, group(1, 0, (1,), size=100)), *(said(rank) for rank in range(1, 100))]
    found = picture(members(100), reports)
    text = describe(explain(found), found)
    assert "ranks 1-99 are missing" in text
    assert "91 more are missing." in text
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


def test_seconds_in_words() -> None:
    assert [seconds_text(s) for s in (0.04, 9.9, 75, 700, 7200)] == [
        "0.0 s",
        "9.9 s",
        "75 s",
        "12 min",
        "2.0 h",
    ]

"""Report of a failed cell: which failure comes first, and what is said of the others."""

from __future__ import annotations

import signal

from dmesh.notebook.failures import INTERRUPTED, RESET, CellOutcome, describe, outcome_of

GAVE_UP = "dmesh.errors.CollectiveError: rank 2 gave up call #5 of group world: ValueError: bad"


def failed(rank: int, order: int, exception: str, *, interrupted: bool = False) -> CellOutcome:
    lines = [f"trace of {rank}", exception]
    error = {"lines": lines, "exception": exception, "interrupted": interrupted, "line": 3}
    return outcome_of(rank, 100 + rank, order, 1.0, {"error": error})


def finished(rank: int, order: int) -> CellOutcome:
    return outcome_of(rank, 100 + rank, order, 1.0, {"text": "7"})


def test_the_rank_that_gave_up_comes_before_those_that_heard_of_it_sooner() -> None:
    text, ranks = describe(
        [failed(0, 0, GAVE_UP), failed(1, 1, GAVE_UP), failed(2, 2, "ValueError: bad")], "<c>"
    )
    assert text.splitlines() == [
        "rank 2 (pid 102) failed in <c> after 1.0 s",
        "trace of 2",
        "ValueError: bad",
        "",
        "The others followed:",
        "  ranks 0-1 failed: CollectiveError: rank 2 gave up call #5 of group world: ValueError: bad",
        "",
        RESET,
    ]
    assert ranks == (2, 0, 1)


def test_a_failure_of_one_rank_alone() -> None:
    text, ranks = describe([finished(0, 0), failed(1, 1, "KeyError: 'x'"), finished(2, 2)], "<c>")
    assert text.splitlines() == [
        "rank 1 (pid 101) failed in <c> after 1.0 s",
        "trace of 1",
        "KeyError: 'x'",
        "",
        "Finished: ranks 0, 2.",
    ]
    assert ranks == (1,)


def test_the_same_mismatch_on_all_needs_a_reset() -> None:
    mismatch = "dmesh.errors.CollectiveMismatchError: rank 0 called this, rank 1 that"
    text, _ = describe([failed(0, 1, mismatch), failed(1, 0, mismatch)], "<c>")
    assert text.startswith("ranks 0-1 failed in <c>")
    assert text.count("CollectiveMismatchError") == 1
    assert text.endswith(RESET)


def test_an_interrupt_of_all_has_no_rank_to_blame() -> None:
    outcomes = [failed(rank, 3 - rank, "KeyboardInterrupt", interrupted=True) for rank in range(4)]
    text, ranks = describe(outcomes, "<c>")
    assert text.splitlines() == ["ranks 0-3 were interrupted in line 3 of <c> after 1.0 s", "", INTERRUPTED]
    assert sorted(ranks) == [0, 1, 2, 3]


def test_a_death_is_the_cause_and_leaves_nothing_to_reset() -> None:
    dead = CellOutcome(3, 103, -signal.SIGKILL, 2, 1.0, last_lines=("its last words",), alive=False)
    lost = "dmesh.errors.PeerLostError: lost rank 3"
    interrupted = failed(1, 1, "KeyboardInterrupt", interrupted=True)
    text, ranks = describe([failed(0, 0, lost), interrupted, dead], "<c>")
    head, words, _, _, *rest = text.splitlines()
    assert head.startswith("rank 3 (pid 103) was killed by SIGKILL in <c> after 1.0 s, by kill -9")
    assert words == "  its last words"
    assert rest == [
        "  rank 0 (pid 100) failed: PeerLostError: lost rank 3",
        "  rank 1 (pid 101) was interrupted in line 3",
    ]
    assert ranks == (3, 0, 1)

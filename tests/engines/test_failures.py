"""Results of a launch from its ranks' ends: pure."""

from __future__ import annotations

import signal

import pytest

from dmesh.engines.failures import Ended, results
from dmesh.engines.rank import Failure, Place, Report
from dmesh.errors import PeerLostError, RankFailedError


def ended(rank: int, report: Report | None, how: str = "", **more) -> Ended:
    return Ended(rank, Place("h", 100 + rank), report, how, **more)


def failed(error: Exception, code: int = 1) -> Report:
    return Report(failure=Failure(f"{type(error).__name__}: {error}", ("Traceback", "  x"), error, code))


LOST = failed(PeerLostError("lost rank 1", 1), 75)


def test_results_are_in_the_order_of_ranks():
    assert results([ended(1, Report("b")), ended(0, Report("a"))]) == ["a", "b"]
    assert results([ended(0, Report(None))]) == [None]


def test_the_cause_comes_first_however_late_it_ends():
    with pytest.raises(RankFailedError) as caught:
        results([ended(2, LOST), ended(0, LOST), ended(1, failed(ValueError("bad")))], running=[3])
    assert str(caught.value).splitlines() == [
        "rank 1 on host h (pid 101) raised ValueError: bad",
        "  Traceback",
        "    x",
        "the others followed:",
        "  rank 2 on host h (pid 102) raised PeerLostError: lost rank 1",
        "  rank 0 on host h (pid 100) raised PeerLostError: lost rank 1",
        "still running: rank 3",
    ]
    assert [failure.rank for failure in caught.value.failures] == [1, 2, 0]
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_process_that_is_gone_is_a_cause_and_one_that_the_launcher_ended_is_not():
    gone = ended(2, None, "was lost: its worker is gone", restarts=2)
    stopped = ended(0, None, "was ended by dmesh.launch (SIGTERM)", ended_by=signal.SIGTERM)
    with pytest.raises(RankFailedError) as caught:
        results([stopped, ended(1, LOST), gone])
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 2 on host h (pid 102) was lost: its worker is gone after 2 restarts"
    assert (caught.value.rank, caught.value.host, caught.value.pid) == (2, "h", 102)
    assert caught.value.__cause__ is None


def test_many_consequences_are_counted():
    with pytest.raises(RankFailedError) as caught:
        results([ended(0, failed(OSError("disk"))), *(ended(rank, LOST) for rank in range(1, 20))])
    assert str(caught.value).splitlines()[-1] == "  and 11 more"
    assert len(caught.value.failures) == 20

"""Log of refused connections: one line per host and interval, with the number left out."""

from __future__ import annotations

import pytest

from dmesh.collectives.backends.tcp.admission import RefusalLog


@pytest.fixture
def log(caplog):
    class Timed:
        now = 100.0

        def __init__(self):
            self._log = RefusalLog(3, interval=10.0, clock=lambda: self.now)

        def note(self, host):
            caplog.clear()
            self._log.note(host, f"refused a connection (from {host})")
            return [record.getMessage() for record in caplog.records]

    return Timed()


def test_one_line_for_a_host_and_interval_then_the_number_of_those_left_out(log):
    assert log.note("a") == ["rank 3: refused a connection (from a)"]
    assert log.note("a") == []
    log.now += 5.0
    assert log.note("a") == []
    assert log.note("b") == ["rank 3: refused a connection (from b)"]
    log.now += 5.0
    assert log.note("a") == [
        "rank 3: refused 2 more connections from a",
        "rank 3: refused a connection (from a)",
    ]
    assert log.note("b") == []


def test_very_many_hosts_share_a_line_and_are_forgotten(log):
    lines = [line for number in range(1000) for line in log.note(f"host {number}")]
    assert len(lines) == 257
    assert len(log._log._logged) == 257
    log.now += 10.0
    assert log.note("host 5") == [
        "rank 3: refused 743 more connections from many hosts",
        "rank 3: refused a connection (from host 5)",
    ]
    assert list(log._log._logged) == ["host 5"]
    assert log._log._left_out == {}

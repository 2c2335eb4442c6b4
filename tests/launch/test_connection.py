"""The launcher's side of a connection to an agent, with a clock of the test's."""

from __future__ import annotations

import contextlib
import selectors

from dmesh.launcher.connection import SILENCE, HostConnection
from dmesh.launcher.hosts import Host, Way
from dmesh.launcher.orphans import Guard


def test_a_launcher_that_was_held_up_reads_before_it_calls_an_agent_silent() -> None:
    """Its terminal was stopped by Ctrl-S, or itself by Ctrl-Z, for longer than an agent may be silent."""
    now = 0.0
    way = Way("ssh", ("sh", "-c", "echo ping; exec sleep 1000"), "python")
    with selectors.PollSelector() as selector, contextlib.closing(Guard()) as guard:
        connection = HostConnection(Host("host1", 1), way, selector, guard, lambda: now)
        with contextlib.closing(connection):
            assert selector.select(90)
            now = SILENCE + 1
            connection.on_time(now)
            assert connection.lost == ""
            connection.read()
            now += SILENCE - 1
            connection.on_time(now)
            assert connection.lost == ""
            now += 1
            connection.on_time(now)
            assert connection.lost == f"nothing was heard of it for {SILENCE:g} s"

"""The pages for people, as they are without scripts; every name in them is a stranger's text.

A page has bounds, and is made in steps: however large the clusters are, the event loop goes on meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from dmesh_server.core.errors import CoreError
from dmesh_server.core.model import Member
from dmesh_server.core.views import CONDITIONS, BarrierView, ClusterViews, Summary, condition_of
from dmesh_server.web.machines import Machine, label_machines
from dmesh_server.web.pacer import Steps

MOST_CLUSTERS = 10
"""Clusters of one page."""

MOST_MEMBERS = 200
"""Members of a cluster that are listed one by one, problems first."""

MOST_BARRIERS = 20
"""Barriers of a cluster that are listed one by one, the oldest first."""

MOST_MISSING = 20
"""Missing tasks of a barrier that are listed one by one."""

_LONGEST = 120
_PIECES = 50
"""Pieces of a template that are rendered at a time."""

_SIGNS = {
    "FAILED": "✖", "LOST": "✕", "STUCK": "◆", "BLOCKED": "▲", "VACANT": "◌", "REGISTERED": "○",
    "CONNECTED": "●", "LEFT": "-",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """A cluster on the status page."""

    summary: Summary
    barriers: list[BarrierView]
    members: list[Member]
    machines: dict[Machine, str]
    """Labels of the cluster's machines."""

    @property
    def member_count(self) -> int:
        """Number of its members, listed or not."""
        return sum(self.summary.members.values())

    def machine_of(self, member: Member) -> str:
        """Return the label of a member's machine."""
        process = member.process
        return self.machines.get((process.host, process.boot_id), process.host)


def visible(text: str) -> str:
    """Return text with all its characters made visible, at a bounded length.

    Control characters, line breaks and changes of the writing direction come out as escapes.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}… ({len(text)} characters)"


def span(seconds: float) -> str:
    """Return a time span as people say it."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 60 else f"{hours:.1f} h"


async def status_page(
    views: ClusterViews,
    steps: Steps,
    *,
    incarnation: int,
    now: float,
    can_log_out: bool,
    after: str = "",
    covers: Callable[[str], bool] = lambda _: True,
) -> str:
    """Render the state of the clusters.

    Args:
        views: The clusters.
        steps: Paces the work.
        incarnation: Of the server.
        now: The server's monotonic seconds.
        can_log_out: Whether the reader came in by a login.
        after: Last cluster of the page before; empty for the first page.
        covers: Whether the reader may see a cluster.
    """
    names = [name for name in views.names() if name > after and covers(name)]
    sections = []
    for name in names[:MOST_CLUSTERS]:
        with contextlib.suppress(CoreError):  # it made room for another one meanwhile
            sections.append(await _section(views, name, steps))
    stream = _PAGES.get_template("status.html").stream(
        sections=sections,
        total=len(names),
        more=names[MOST_CLUSTERS - 1] if len(names) > MOST_CLUSTERS else None,
        incarnation=f"{incarnation:016x}",
        now=now,
        can_log_out=can_log_out,
    )
    stream.enable_buffering(_PIECES)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        await steps.pause()
    return "".join(pieces)


def login_page(problem: str = "") -> str:
    """Render the form that asks for a token.

    Args:
        problem: Why the last one was not accepted.
    """
    return _PAGES.get_template("login.html").render(problem=problem)


def entered_page(start: str = "/") -> str:
    """Render the page that leads a browser on that a link has logged in.

    Args:
        start: Where it leads.
    """
    return _PAGES.get_template("entered.html").render(start=start)


async def _section(views: ClusterViews, name: str, steps: Steps) -> ClusterSection:
    barriers: list[BarrierView] = []
    # One at a time: to find the missing members takes a look at each participant.
    while len(barriers) < MOST_BARRIERS:
        found, _ = views.barriers(name, len(barriers), 1, MOST_MISSING)
        if not found:
            break
        barriers += found
        await steps.pause()
    machines = label_machines((slot.host, slot.boot_id) for slot in views.slots(name))
    section = ClusterSection(views.summary(name), barriers, _members(views, name), machines)
    await steps.pause()
    return section


def _members(views: ClusterViews, name: str) -> list[Member]:
    """Return the listed members, problems first."""

    def found() -> Iterator[Member]:
        counted = views.summary(name).members
        for condition in CONDITIONS[: CONDITIONS.index("CONNECTED")]:
            if condition in counted:
                yield from views.members(name, None, MOST_MEMBERS, [condition]).members
        rest = views.holders(name, 0, MOST_MEMBERS)
        for condition in CONDITIONS[CONDITIONS.index("CONNECTED") :]:
            yield from (member for member in rest if condition_of(member) == condition)

    return [member for member, _ in zip(found(), range(MOST_MEMBERS), strict=False)]


_PAGES = Environment(
    loader=PackageLoader("dmesh_server.web"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters.update(visible=visible, span=span, condition=condition_of, sign=_SIGNS.__getitem__)

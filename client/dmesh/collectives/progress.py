"""Progress reports of a client's collectives: how far each group is, and the last calls.

They are read from the event ring and the native endpoints: calls do nothing for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dmesh.collectives.events import CallRecord
from dmesh.v1 import progress_pb2 as pb

if TYPE_CHECKING:
    from dmesh.collectives.communicator import Communicator
    from dmesh.collectives.group import Group
    from dmesh.collectives.work import Stream

_MOST_GROUPS = 32
_MOST_RECENT = 16
_MOST_LINKS = 64
_MOST_RANKS = 256
_MOST_WAITED_FOR = 64
_LONGEST_NAME = 100
_LONGEST_CALL = 200
_LONGEST_FAILURE = 300


class CollectiveReports:
    """Source of the collectives' part of this client's progress reports. Any thread."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def fill(self, report: pb.ProgressReport) -> None:
        """Add groups and recent calls to a report."""
        communicator = self._communicator
        now = communicator.clock()
        noted: dict[int, list[CallRecord]] = defaultdict(list)
        for record in communicator.events.noted():
            noted[record.stream].append(record)
        found: list[tuple[bool, float, pb.GroupProgress]] = []
        for group in communicator.all_groups():
            for stream in group.streams:
                if stream.issued:
                    known = noted[stream.number]
                    last = self._last(stream, known)
                    message = self._describe(group, stream, known)
                    if last is not None:
                        _write(last, now, message.last)
                    called = 0.0 if last is None else last.called
                    found.append((stream.issued > stream.completed, called, message))
        found.sort(key=lambda item: item[:2], reverse=True)
        report.groups.extend(message for _, _, message in found[:_MOST_GROUPS])
        for record in communicator.events.records(_MOST_RECENT):
            _write(record, now, report.recent.add())
        connector = communicator.transport.connector
        if connector is not None:
            links = sorted(connector.links().items(), key=lambda link: -link[1][1])
            for rank, (round_trip, rate) in links[:_MOST_LINKS]:
                report.links.add(rank=rank, round_trip_us=round_trip, bytes_per_second=rate)

    def _describe(self, group: Group, stream: Stream, noted: Iterable[CallRecord]) -> pb.GroupProgress:
        name, ranks = group.members.name, group.members.of(stream.pair)
        if stream.pair is not None:
            name = f"{name}: {ranks[0]} to {ranks[1]}"
        failure = group.failure
        calls, elapsed, waited = (0, 0, 0) if stream.endpoint is None else stream.endpoint.totals()
        for record in noted:
            if record.began is not None and record.ended is not None:
                calls += 1
                elapsed += round((record.ended - record.began) * 1e9)
                waited += round(record.waited * 1e9)
        listed = len(ranks) <= _MOST_RANKS and len(ranks) < self._communicator.world.size
        return pb.GroupProgress(
            id=stream.number,
            name=name[:_LONGEST_NAME],
            ranks=ranks if listed else (),
            size=len(ranks),
            generation=group.generation,
            issued=stream.issued,
            finished=stream.completed,
            counted=calls,
            elapsed_us=elapsed // 1000,
            waited_us=min(waited, elapsed) // 1000,
            failure="" if failure is None else failure.message[:_LONGEST_FAILURE],
        )

    def _last(self, stream: Stream, noted: list[CallRecord]) -> CallRecord | None:
        """Return the first call of a stream that is under way, or else the last one that has ended."""
        pending = [record for record in noted if record.ended is None]
        if pending:
            return min(pending, key=lambda record: record.sequence)
        records = self._communicator.events.taken(stream, 1) + noted[-1:]
        return max(records, key=lambda record: record.sequence, default=None)


def _write(record: CallRecord, now: float, into: pb.CallRecord) -> None:
    into.group = record.stream
    into.sequence = record.sequence
    into.call = record.call[:_LONGEST_CALL]
    into.nbytes = record.nbytes
    into.age_us = _microseconds(now - record.called)
    waits_for, ended, began = record.waits_for(), record.ended, record.began
    if ended is not None:
        into.state = pb.CALL_STATE_FAILED if record.error else pb.CALL_STATE_DONE
    elif began is None:
        into.state = pb.CALL_STATE_QUEUED
    else:
        into.state = pb.CALL_STATE_WAITING if waits_for else pb.CALL_STATE_RUNNING
    if began is not None:
        into.elapsed_us = _microseconds((now if ended is None else ended) - began)
    # The time that a call has waited is known when its wait is over.
    into.waited_us = _microseconds(record.waited) if record.timed and ended is not None else -1
    into.waits_for.extend(waits_for[:_MOST_WAITED_FOR])
    into.error = (record.error or "")[:_LONGEST_CALL]


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

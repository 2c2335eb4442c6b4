"""The spans of collectives, whichever way the calls went."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.collectives.ranks import LIMIT, Cluster, cluster

from dmesh import native
from dmesh.collectives.events import _Tap
from dmesh.collectives.trace import Trace
from dmesh.telemetry import collective_spans
from dmesh.telemetry.collective_spans import CollectiveSpans, _epoch, _named, _Pace

WAYS = [(), *([("native",), ("dedicated",)] if native.core() is not None else [])]


class Spans:
    """What the ranks of a cluster make spans of."""

    def __init__(self, ranks: Cluster) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("program")
        self.readers = []
        for communicator in ranks.communicators:
            reader = CollectiveSpans(self.provider.get_tracer("dmesh"), {"dmesh.rank": communicator.rank})
            communicator.events.add_reader(reader)
            self.readers.append(reader)

    def of(self, rank: int) -> list[ReadableSpan]:
        """Returns a rank's spans of calls, by their begin."""
        self.readers[rank].close()
        found = [
            one for one in self.exporter.get_finished_spans() if one.attributes.get("dmesh.rank") == rank
        ]
        return sorted(
            found, key=lambda span: (span.attributes["dmesh.lane"], span.attributes["dmesh.sequence"])
        )


@pytest.fixture(params=WAYS, ids=lambda ways: "-".join(ways) or "messages")
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(2, shm=request.param) as made:
        yield made


def test_each_call_is_a_child_of_the_span_in_which_it_was_made(ranks: Cluster) -> None:
    spans = Spans(ranks)
    parents: dict[int, list[int]] = {0: [], 1: []}

    def body(communicator):
        for step in range(60):
            with spans.tracer.start_as_current_span("step") as span:
                for _ in range(step % 4):
                    communicator.world.all_reduce(np.zeros(2))
                    parents[communicator.rank].append(span.get_span_context().span_id)
                if step % 20 == 7:
                    communicator.world.broadcast(np.zeros(2), async_op=True).result(LIMIT)
                    parents[communicator.rank].append(span.get_span_context().span_id)
        communicator.world.all_reduce(np.zeros(2))
        parents[communicator.rank].append(0)

    ranks.all(body)
    for rank in range(2):
        found = spans.of(rank)
        assert [one.attributes["dmesh.sequence"] for one in found] == list(range(1, len(parents[rank]) + 1))
        assert [one.parent.span_id if one.parent else 0 for one in found] == parents[rank]
        assert all(one.end_time >= one.start_time for one in found)


def test_transfers_are_children_too(ranks: Cluster) -> None:
    spans = Spans(ranks)
    ids = {}

    def body(communicator):
        communicator.world.barrier()
        with spans.tracer.start_as_current_span("step") as span:
            ids[communicator.rank] = span.get_span_context().span_id
            for _ in range(300):
                if communicator.rank == 0:
                    communicator.world.send(np.zeros(3), 1)
                else:
                    communicator.world.recv(np.zeros(3), 0)

    ranks.all(body)
    for rank, name in enumerate(("send", "recv")):
        found = [one for one in spans.of(rank) if one.name == name]
        assert [one.attributes["dmesh.sequence"] for one in found] == list(range(1, 301))
        assert {one.parent.span_id for one in found} == {ids[rank]}


def test_a_group_that_was_there_before_is_followed(ranks: Cluster) -> None:
    ranks.all(lambda c: c.world.all_reduce(np.zeros(2)))
    ranks.all(lambda c: c.world.all_reduce(np.zeros(2)))
    spans = Spans(ranks)
    ranks.all(lambda c: [c.world.all_reduce(np.zeros(2)) for _ in range(5)])
    for rank in range(2):
        assert {3, 4, 5, 6, 7} <= {one.attributes["dmesh.sequence"] for one in spans.of(rank)}


def test_what_comes_too_fast_is_counted_and_failures_are_always_there(ranks: Cluster, monkeypatch) -> None:
    monkeypatch.setattr(collective_spans, "RATE", 0.001)
    monkeypatch.setattr(collective_spans, "_BURST", 10)
    spans = Spans(ranks)
    ranks.all(lambda c: [c.world.all_reduce(np.zeros(2)) for _ in range(2000)])
    ranks.run(lambda c: c.world.all_reduce(np.zeros(1 + c.rank)))
    for rank in range(2):
        found = spans.of(rank)
        assert len(found) == 11
        assert found[-1].name == "all_reduce"
        assert found[-1].status.status_code is trace.StatusCode.ERROR
        left_out = sum(one.attributes.get("dmesh.collective.left_out", 0) for one in found)
        assert 0 < left_out <= 1990


def test_a_trace_in_a_file_and_spans_are_made_side_by_side(ranks: Cluster, tmp_path) -> None:
    spans = Spans(ranks)
    traces = []
    for communicator in ranks.communicators:
        writer = Trace(str(tmp_path), communicator.rank)
        writer.start("h", "boot", "run")
        communicator.events.add_reader(writer)
        traces.append(writer)
    ranks.all(lambda c: [c.world.all_reduce(np.zeros(2)) for _ in range(700)])
    for rank, writer in enumerate(traces):
        writer.close()
        assert writer.path.read_text().count('"sequence"') == 700
        assert len(spans.of(rank)) == 700


def test_a_processor_that_fails_disturbs_nothing(ranks: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span, parent_context=None):
            raise ValueError("broken")

    spans = Spans(ranks)
    spans.provider.add_span_processor(Broken())
    ranks.all(lambda c: [c.world.all_reduce(np.zeros(2)) for _ in range(300)])
    for rank in range(2):
        assert spans.of(rank) == []
    assert caplog.text.count("a span of all_reduce") == 2  # once for each rank


def test_the_context_of_a_thread_stays_the_same_object() -> None:
    """Otherwise each call would be noted as a change."""
    assert context.get_current() is context.get_current()
    seen = []
    thread = threading.Thread(target=lambda: seen.extend((context.get_current(), context.get_current())))
    thread.start()
    thread.join()
    assert seen[0] is seen[1]


class Stream:
    """A stream of calls, as the ring sees it."""

    number = completed = issued = 1
    endpoint = None

    def on_complete(self, told: object) -> None:
        """Does nothing."""


def test_a_change_that_comes_while_changes_are_read_displaces_none_of_them() -> None:
    """A full deque drops its first for a new one, which may have been about to be read."""
    scope = ["before"]
    stream = Stream()
    tap = _Tap(lambda tap: None, stream)
    tap.open(lambda: scope[0])
    tap.completed_in_scope()

    def change() -> None:
        scope[0], stream.finished = "later", 9
        tap.completed_in_scope()

    class Full(deque):
        """Is changed by another thread between the look at its first change and the taking of it."""

        changing: threading.Thread | None = None

        def popleft(self):
            if self.changing is None:
                self.changing = threading.Thread(target=change)
                self.changing.start()
                self.changing.join(0.2)  # it waits for this thread, as it should
            return super().popleft()

    full = tap._changes = Full(tap._changes, maxlen=1)
    assert tap.scope_of(5) == "before"
    full.changing.join(LIMIT)
    assert not full.changing.is_alive()
    assert tap.scope_of(9) == "later"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("all_reduce(sum, float64, shape (3, 4))", ("all_reduce", "float64")),
        ("all_gather(uint16 (big-endian), shape ())", ("all_gather", "uint16 (big-endian)")),
        ("broadcast(root=0, [('a', '<i4'), ('b', 'S3')], shape (2,))", ("broadcast", "")),
        ("barrier()", ("barrier", "")),
    ],
)
def test_operation_and_dtype_are_read_from_a_call(call: str, named: tuple[str, str]) -> None:
    assert _named(call) == named


def test_the_pace_lets_pass_what_it_should() -> None:
    pace = _Pace(10.0, 5)
    assert [pace.take(0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert pace.spent(0.4)
    assert not pace.spent(0.6)
    assert [pace.take(0.2) for _ in range(3)] == [True, True, False]
    assert sum(pace.take(100.0) for _ in range(20)) == 5


@pytest.mark.parametrize("interrupted", [{1}, {2}, {1, 4}, set()], ids=str)
def test_a_thread_that_loses_its_core_between_two_clocks_shifts_no_span(
    monkeypatch: pytest.MonkeyPatch, interrupted: set[int]
) -> None:
    now, looks = 1_000_000_000, 0

    def monotonic_ns() -> int:
        nonlocal now, looks
        now += 30_000_000 if looks in interrupted else 100
        looks += 1
        return now

    def time_ns() -> int:
        return monotonic_ns() + 1_700_000_000_000_000_000

    clocks = SimpleNamespace(monotonic_ns=monotonic_ns, time_ns=time_ns)
    monkeypatch.setattr(collective_spans, "time", clocks)
    assert abs(_epoch() - 1_700_000_000_000_000_000) < 1000

"""Interface for spans of the coordination room's calls.

Nothing here knows OpenTelemetry: `dmesh.telemetry` does, which is imported where `DMESH_OTEL` is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, TypeVar

import grpc

Job = TypeVar("Job", bound=Callable[[], object])
Carried = tuple[tuple[str, str], ...]
"""Trace context of a call: names and values that may be metadata of gRPC."""


class Span(Protocol):
    """Span of one call; an exception that leaves its `with` block is recorded as the call's error."""

    @property
    def carried(self) -> Carried:
        """The trace context to send with the call."""

    def over(self, code: grpc.StatusCode, message: str = "") -> None:
        """Say how the call ended, which is good (OK) unless something is said."""

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracing(Protocol):
    """Makes spans, of the calls of any thread. Must not block and must not raise."""

    def call(self, method: str, attributes: Mapping[str, str | int] | None = None) -> Span:
        """Begin the span of a call to the coordinator.

        Args:
            method: Its full name, such as `/dmesh.v1.CoordinationService/Leave`.
            attributes: What else is known of it. Never a value, never a secret.
        """

    def barrier(self, name: str, participants: int) -> Span:
        """Begin the span of a barrier, from this process's arrival on.

        Args:
            name: Its name.
            participants: How many take part; 0 for all.
        """

    def bound(self, job: Job) -> Job | Callable[[], object]:
        """Return a job that another thread may run as if what surrounds this one surrounded it."""


class _NoSpan:
    """Is not made."""

    carried: Carried = ()

    def over(self, code: grpc.StatusCode, message: str = "") -> None: ...

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class _NoTracing:
    """Makes no spans."""

    def call(self, method: str, attributes: Mapping[str, str | int] | None = None) -> Span:
        return _NO_SPAN

    def barrier(self, name: str, participants: int) -> Span:
        return _NO_SPAN

    def bound(self, job: Job) -> Job:
        return job


_NO_SPAN = _NoSpan()
NO_TRACING: Tracing = _NoTracing()
"""Tracing for programs that want no spans."""

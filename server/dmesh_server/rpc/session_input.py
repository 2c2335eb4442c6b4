"""A session's opening and input: a client's messages, whatever carries them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core import events
from dmesh_server.core.model import Caller
from dmesh_server.rpc import convert
from dmesh_server.rpc.admission import Admission
from dmesh_server.rpc.barrier_spans import BarrierSpans
from dmesh_server.rpc.session_calls import SessionCalls
from dmesh_server.runtime import Runtime
from dmesh_server.security.limits import PeerLimits
from dmesh_server.security.pace import Pace
from dmesh_server.sessions import Session

if TYPE_CHECKING:
    from dmesh_server.telemetry.tracing import Traces

_LONGEST_ECHO = 4096
"""Characters of a barrier name beyond which the session ends; up to it, only the barrier is refused."""

_MANY_BYTES = 1 << 20
"""Bytes of unread answers from which on no more is read from a client: it could pile up large ones."""


class SessionOpener:
    """Opens the sessions of both carriers, connections of their own and streams of gRPC.

    Attributes:
        now: Returns the time, monotonic seconds.
        measures: Counts and durations of the server.
        admission: Clients that have registered and not attached yet.
    """

    def __init__(self, runtime: Runtime, limits: PeerLimits, traces: Traces | None = None) -> None:
        """Make an opener.

        Args:
            runtime: Holds the sessions.
            limits: Bounds on the use by peers.
            traces: Makes spans of calls in sessions; None for none.
        """
        self.now = runtime.now
        self.measures = runtime.measures
        self.admission = Admission()
        self._runtime = runtime
        self._rate = limits.messages_per_second
        self._traces = traces

    async def open(self, attach: pb.Attach, caller: Caller, remote: str) -> SessionInput:
        """Attach a session. Close the result.

        Args:
            attach: The client's first message.
            caller: Who it comes from.
            remote: Address from which it comes.

        Raises:
            CoreError: The task slot is not the caller's.
        """
        runtime = self._runtime
        session, attached = await runtime.open_session(caller, convert.seen_state(attach), remote)
        self.admission.leave(caller)
        answer = pb.Attached(server_incarnation=runtime.server_incarnation, epoch=attached.epoch)
        encoded = pb.SessionResponse(attached=answer).SerializeToString()
        return SessionInput(runtime, session, encoded, self._rate, self._traces)


class SessionInput:
    """Takes the messages of one session.

    Attributes:
        session: The session.
        attached: The first message to the client, encoded.
    """

    def __init__(
        self, runtime: Runtime, session: Session, attached: bytes, rate: float, traces: Traces | None = None
    ) -> None:
        """Begin without messages.

        Args:
            runtime: Takes the events.
            session: The session of the messages.
            attached: The first message to the client, encoded.
            rate: Messages per second that the client may send.
            traces: Makes spans of its calls; None for none.
        """
        self.session = session
        self.attached = attached
        self._pace = Pace(rate, runtime.now())
        self._runtime = runtime
        self._calls = SessionCalls(runtime, session, traces)
        self._barriers = None if traces is None else BarrierSpans(traces, session)
        self._interval = runtime.views.heartbeat_interval(session.caller.cluster)
        self._beat_at = runtime.now()

    def take(self, request: pb.SessionRequest) -> float:
        """Act on one message; return for how many seconds not to listen to the next one.

        Raises:
            CoreError: It says nothing that may be said: the session ends.
        """
        runtime, number = self._runtime, self.session.number
        match request.WhichOneof("kind"):
            case "key_value_call":
                self._calls.begin(request.key_value_call)
            case "enter_barrier":
                self._enter_barrier(request.enter_barrier)
            case "heartbeat":
                self._note_beat(runtime.now())
                beat = request.heartbeat
                runtime.send(events.Heartbeat(number, beat.sequence, beat.progress))
                if beat.HasField("report"):
                    runtime.progress.note(self.session.caller, beat.report.SerializeToString())
            case "abandon_call":
                self._calls.abandon(request.abandon_call.id)
            case "status":
                activity = convert.activity(request.status.activity)
                runtime.send(events.ReportStatus(number, request.status.id, activity))
            case "process_report":
                report = request.process_report
                runtime.send(
                    events.ReportProcess(number, convert.task(report.task), report.lease, report.gone)
                )
            case "ending":
                runtime.send(events.EndSession(number))
            case "waiting":
                runtime.send(convert.waiting(number, request.waiting))
            case "attach":
                raise convert.invalid("this session is attached already; `attach` comes first and only once")
            case _:
                raise convert.invalid(
                    "a session message is empty or of a kind that this server does not know; the client "
                    "may be a newer version"
                )
        return self._pace.spend(runtime.now())

    @property
    def crowded(self) -> bool:
        """True if the client should read some of its answers before more is read from it."""
        return self.session.send_queue.size > _MANY_BYTES

    async def room(self) -> None:
        """Wait until the client has read most of its answers."""
        await self.session.send_queue.drained(_MANY_BYTES)

    def close(self) -> None:
        """Close the session, and answer nothing any more."""
        try:
            self._calls.close()
            if self._barriers is not None:
                self._barriers.close()
        finally:
            self._runtime.close_session(self.session)

    def _note_beat(self, now: float) -> None:
        self._runtime.measures.lateness.observe(max(0.0, now - self._beat_at - self._interval))
        self._beat_at = now

    def _enter_barrier(self, request: pb.EnterBarrier) -> None:
        if len(request.name) > _LONGEST_ECHO:
            # Results carry the name; a client that does not read must not fill the queue with its own words.
            raise convert.invalid(f"the barrier name has {len(request.name)} characters; it may have 256")
        timeout = convert.barrier_timeout(request.timeout_ms) if request.timeout_ms else None
        participants = tuple(map(convert.task, request.participants))
        if self._barriers is not None:
            self._barriers.arrived(request.name, request.trace_context)
        self._runtime.send(
            events.EnterBarrier(
                self.session.number, request.name, request.instance, participants, timeout, request.alive
            )
        )

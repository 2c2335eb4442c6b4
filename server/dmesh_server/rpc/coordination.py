"""The `CoordinationService`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import grpc

from dmesh import protocol
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import progress_pb2
from dmesh_server.core import events
from dmesh_server.core.effects import BarrierProgress, Done, Registered
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller, ClusterState, Member
from dmesh_server.rpc import convert
from dmesh_server.rpc.callers import caller_of
from dmesh_server.rpc.delivery import until_first_done
from dmesh_server.rpc.handlers import Context, Reader, server_stream, two_way_stream, unary
from dmesh_server.rpc.job_lists import JobLists
from dmesh_server.rpc.member_table import MemberTable
from dmesh_server.rpc.session_input import SessionInput, SessionOpener
from dmesh_server.rpc.session_server import SessionServer
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import CALL_RATE, CALLER
from dmesh_server.security.limits import PeerLimits
from dmesh_server.security.refusals import host_of
from dmesh_server.sessions import Session, describe_caller
from dmesh_server.telemetry import logs

SERVICE = "dmesh.v1.CoordinationService"

_ATTACH_WITHIN = 10.0
"""Seconds that a new session stream has for its first message."""


class CoordinationServicer:
    """Answers the calls of `CoordinationService`."""

    def __init__(
        self,
        runtime: Runtime,
        limits: PeerLimits,
        opener: SessionOpener,
        sessions: SessionServer | None = None,
    ) -> None:
        """Make a servicer.

        Args:
            runtime: Answers the requests.
            limits: Bounds on the use by peers.
            opener: Opens sessions.
            sessions: Has the sessions with connections of their own; None if there are none.
        """
        self._runtime = runtime
        self._opener = opener
        self._sessions = sessions
        self._limits = limits
        self.port = 0
        """Port of gRPC."""
        self._table = MemberTable()
        self._jobs = JobLists()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handler of each method."""
        desk = self._runtime
        return {
            "Register": unary(pb.RegisterRequest, self.register, desk),
            "KeepSession": server_stream(pb.KeepSessionRequest, self.keep_session, desk),
            "Session": two_way_stream(pb.SessionRequest, self.session, desk),
            "CancelBarrier": unary(pb.CancelBarrierRequest, self.cancel_barrier, desk),
            "PresentBarriers": unary(pb.PresentBarriersRequest, self.present_barriers, desk),
            "Leave": unary(pb.LeaveRequest, self.leave, desk),
            "ReportError": unary(pb.ReportErrorRequest, self.report_error, desk),
            "GetClusterState": unary(pb.GetClusterStateRequest, self.get_cluster_state, desk),
            "GetMember": unary(pb.GetMemberRequest, self.get_member, desk),
            "GetBarrier": unary(pb.GetBarrierRequest, self.get_barrier, desk),
            "GetProgress": unary(progress_pb2.GetProgressRequest, self.get_progress, desk),
            "ListClusters": unary(progress_pb2.ListClustersRequest, self.list_clusters, desk),
        }

    async def register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Take a task slot."""
        runtime, token = self._runtime, CALLER.get()
        caller = caller_of(request)
        _check_version(request.protocol_version or 1, caller)
        jobs = await self._jobs.read(request.jobs, request.jobs_digest)
        event = events.Register(
            runtime.next_number(),
            caller,
            request.request_id,
            jobs,
            convert.process(request.process),
            convert.devices(request.devices),
            tuple(request.peer_addresses),
            runtime.random_incarnation(),
            runtime.random_secret(),
            convert.cluster_settings(request.settings),
            convert.seen_state(request),
            owner="" if token is None else token.id,
        )
        await self._opener.admission.enter(caller)
        try:
            answer = await runtime.request(event, Registered)
        except BaseException:
            self._opener.admission.leave(caller)
            raise
        if answer.task != caller.task:  # it will come again, as its new self
            self._opener.admission.leave(caller)
            caller = replace(caller, task=answer.task)
        logs.info(
            "registered",
            **describe_caller(caller),
            host=request.process.host,
            pid=request.process.pid,
            devices=len(request.devices),
            epoch=answer.epoch,
            rejoined=answer.rejoined,
        )
        settings, limits = answer.settings, runtime.limits
        return pb.RegisterResponse(
            server_incarnation=runtime.server_incarnation,
            cluster_incarnation=answer.cluster_incarnation,
            epoch=answer.epoch,
            peer_secret=answer.peer_secret,
            heartbeat_interval_ms=round(settings.heartbeat_interval * 1000),
            lease_ms=round(settings.lease * 1000),
            suspicion_ms=round(limits.suspicion * 1000),
            settings=convert.cluster_settings_to_proto(settings),
            rejoined=answer.rejoined,
            max_request_bytes=self._limits.request_bytes,
            task=convert.task_to_proto(answer.task),
            store_id=answer.store,
        )

    async def cancel_barrier(
        self, request: pb.CancelBarrierRequest, context: Context
    ) -> pb.CancelBarrierResponse:
        """End an unfinished barrier for all its participants."""
        caller, number = caller_of(request), self._runtime.next_number()
        event = events.CancelBarrier(number, caller, request.request_id, request.name, request.instance)
        await self._runtime.request(event, Done)
        return pb.CancelBarrierResponse()

    async def present_barriers(
        self, request: pb.PresentBarriersRequest, context: Context
    ) -> pb.PresentBarriersResponse:
        """Take up which barriers have succeeded."""
        await self._present(caller_of(request), request.passed)
        return pb.PresentBarriersResponse(server_incarnation=self._runtime.server_incarnation)

    async def _present(self, caller: Caller, passed: Collection[pb.PassedBarrier]) -> None:
        if passed:
            event = events.PresentBarriers(
                self._runtime.next_number(), caller, convert.passed_barriers(passed)
            )
            await self._runtime.request(event, Done)

    async def leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """Give the task slot up."""
        caller, server_incarnation = caller_of(request), self._runtime.server_incarnation
        if request.server_incarnation not in (0, server_incarnation):
            return pb.LeaveResponse(present_to=server_incarnation)
        await self._present(caller, request.passed)
        event = events.Leave(
            self._runtime.next_number(), caller, request.request_id, request.reason, request.clean
        )
        await self._runtime.request(event, Done)
        logs.info("left", **describe_caller(caller), reason=request.reason)
        return pb.LeaveResponse()

    async def report_error(self, request: pb.ReportErrorRequest, context: Context) -> pb.ReportErrorResponse:
        """Declare the caller failed."""
        caller = caller_of(request)
        event = events.ReportError(
            self._runtime.next_number(), caller, request.request_id, request.message, request.code
        )
        await self._runtime.request(event, Done)
        logs.warning("error_reported", **describe_caller(caller), message=request.message)
        return pb.ReportErrorResponse()

    async def get_cluster_state(self, request: pb.GetClusterStateRequest, context: Context) -> bytes:
        """Return the table of members, unless the caller has it."""
        runtime = self._runtime
        event = events.GetClusterState(
            runtime.next_number(),
            caller_of(request),
            request.known_epoch,
            convert.wait_timeout(request.wait_ms),
        )
        state = await runtime.request(event, ClusterState)
        now = runtime.now()
        header = convert.cluster_header_to_proto(state, runtime.server_incarnation, now).SerializeToString()
        if request.known_epoch == state.epoch:
            return header
        return header + self._table.encode(state, now)

    async def get_member(self, request: pb.GetMemberRequest, context: Context) -> pb.GetMemberResponse:
        """Return one member."""
        runtime = self._runtime
        event = events.GetMember(runtime.next_number(), caller_of(request), convert.task(request.task))
        member = await runtime.request(event, Member)
        return pb.GetMemberResponse(member=convert.member_to_proto(member, runtime.now()))

    async def get_barrier(self, request: pb.GetBarrierRequest, context: Context) -> pb.GetBarrierResponse:
        """Return how far a barrier is."""
        runtime = self._runtime
        event = events.GetBarrier(runtime.next_number(), caller_of(request), request.name)
        progress = await runtime.request(event, BarrierProgress)
        response = pb.GetBarrierResponse(finished=progress.finished)
        if progress.current is not None:
            response.current.CopyFrom(convert.barrier_to_proto(progress.current, runtime.now()))
        return response

    async def get_progress(
        self, request: progress_pb2.GetProgressRequest, context: Context
    ) -> progress_pb2.GetProgressResponse:
        """Return the members' latest progress reports."""
        members = self._runtime.progress.members(caller_of(request).cluster)
        return convert.progress_to_proto(members, self._runtime.now())

    async def list_clusters(
        self, request: progress_pb2.ListClustersRequest, context: Context
    ) -> progress_pb2.ListClustersResponse:
        """Return which clusters there are."""
        views, token = self._runtime.views, CALLER.get()
        return progress_pb2.ListClustersResponse(
            clusters=(
                convert.cluster_summary_to_proto(views.summary(name))
                for name in views.names()
                if token is None or token.covers(name)
            )
        )

    async def keep_session(self, request: pb.KeepSessionRequest, context: Context) -> None:
        """Offer a session with a connection of its own, and wait for its end.

        The end of this call is the session's: a client that is killed or frozen, or whose connection breaks,
        cancels it.
        """
        caller, sessions = caller_of(request), self._sessions
        if sessions is None or sessions.crowded:
            await context.write(pb.KeepSessionResponse(grpc_port=self.port))
            return
        with sessions.offer(caller, host_of(context.peer())) as offer:
            await context.write(
                pb.KeepSessionResponse(session_port=sessions.port, ticket=offer.ticket, grpc_port=self.port)
            )
            await offer.over.wait()

    async def session(self, read: Reader[pb.SessionRequest], context: Context) -> None:
        """Serve a session over gRPC until either side ends it.

        A client that is killed, or whose connection breaks, cancels this call at once; the session is closed
        on every way out.
        """
        attach = await self._read_attach(read)
        caller = caller_of(attach)
        await self._present(caller, attach.passed)
        said = await self._opener.open(attach, caller, host_of(context.peer()))
        session = said.session
        session.token, session.call_rate = CALLER.get(), CALL_RATE.get()
        try:
            await context.write(said.attached)
            await until_first_done(
                session.send_queue, self._speak(session, context), self._listen(read, said)
            )
            if session.fault is not None:
                raise session.fault
        finally:
            said.close()

    async def _listen(self, read: Reader[pb.SessionRequest], said: SessionInput) -> None:
        while (request := await read()) is not None:
            pause = said.take(request)
            if pause:
                await asyncio.sleep(pause)
            if said.crowded:
                await said.room()

    async def _speak(self, session: Session, context: Context) -> None:
        get, write, now = session.send_queue.get, context.write, self._runtime.now
        while (item := await get()) is not None:
            await write(convert.encode_outgoing(item, now()))

    async def _read_attach(self, read: Reader[pb.SessionRequest]) -> pb.Attach:
        try:
            async with asyncio.timeout(_ATTACH_WITHIN):
                first = await read()
        except TimeoutError:
            raise convert.invalid(
                f"the stream's first message did not come within {_ATTACH_WITHIN:g} s"
            ) from None
        if first is None or first.WhichOneof("kind") != "attach":
            raise convert.invalid("the first message of a session must be `attach`")
        return first.attach


def _check_version(version: int, caller: Caller) -> None:
    if not protocol.OLDEST_CLIENT <= version <= protocol.VERSION:
        raise CoreError(
            ErrorKind.VERSION_MISMATCH,
            f"the client speaks version {version} of the protocol, this server versions "
            f"{protocol.OLDEST_CLIENT} to {protocol.VERSION}. Use the same version of dmesh on both sides; "
            "upgrade the server first.",
        )
    if version >= protocol.CREDENTIALS_SINCE and not caller.proof:
        raise convert.invalid(
            f"the registration has no credential, which clients of version {version} of the protocol must "
            "choose: 16-64 random bytes, the same in all calls of one process"
        )

"""Callbacks of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dmesh.coordination.carrier import Carrier
from dmesh.coordination.faults import Fault
from dmesh.coordination.members import Member
from dmesh.errors import CoordinationError
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.progress_pb2 import ProgressReport


class SessionListener(Protocol):
    """Listeners to a session, called on the session's thread; they must not block for long."""

    def on_registered(self, cluster_incarnation: int) -> None:
        """The task slot is taken, in this generation of the cluster."""

    def on_store_lost(self) -> None:
        """The server's store lacks data that this process has seen; called before `on_registered`."""

    def reconcile(self, server_incarnation: int) -> Fault | None:
        """The session is attached to this server, which gets results that it may have lost; or why not."""

    def progress(self) -> int:
        """Asked at every heartbeat, on any thread: a number that changes whenever the program gets on."""

    def report(self) -> ProgressReport | None:
        """Asked at every heartbeat, on its thread: what this process does, for people; None for nothing."""

    def on_attached(self, carrier: Carrier, *, again: bool) -> None:
        """The session is attached; the state that the server needs again can be sent."""

    def on_detached(self) -> None:
        """The session broke."""

    def on_departed(self, epoch: int, members: Sequence[Member]) -> None:
        """Members are gone."""

    def on_rejoined(self, epoch: int, members: Sequence[Member]) -> None:
        """Task slots of departed members have new holders."""

    def on_liveness(self, members: Sequence[Member]) -> None:
        """Members have become blocked or stuck, or live again."""

    def on_status_request(self) -> common_pb2.Activity:
        """The server asks what this process is doing; the answer is sent."""

    def on_barrier(self, result: pb.BarrierResult) -> None:
        """A barrier is over."""

    def on_reply(self, reply: pb.KeyValueReply) -> None:
        """A call of the key-value store is answered."""

    def on_failure(self, error: CoordinationError, *, final: bool) -> None:
        """The process was fenced (final), or the coordinator has been gone for too long (not final)."""

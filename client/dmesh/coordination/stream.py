"""Sessions over a stream of gRPC, where a connection of their own cannot be had."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc

from dmesh.coordination import faults
from dmesh.coordination.carrier import Carrier, Heartbeats, Receive
from dmesh.coordination.faults import CHANNEL_CLOSED, Fault
from dmesh.coordination.link import Link
from dmesh.coordination.waiting import take


class GrpcStream(Carrier, Iterator[bytes]):
    """A session over gRPC, which draws the requests from it on a thread of its own."""

    def __init__(self, link: Link, heartbeats: Heartbeats) -> None:
        super().__init__(heartbeats)
        self._link = link
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: Any = None
        self._closed = False

    def serve(self, attach: bytes, receive: Receive) -> Fault:
        """Open the session, and pass on what comes until it is over; see `Carrier`."""
        self._queue.put(attach)
        try:
            self._call = self._link.open_stream(self)
        except ValueError:
            return CHANNEL_CLOSED
        if self._closed:
            self._call.cancel()
        try:
            for response in self._call:
                if (end := receive(response)) is not None:
                    return end
        except grpc.RpcError as error:
            return faults.from_rpc(error)
        return Fault(0, "the coordinator ended the session", code=grpc.StatusCode.UNAVAILABLE)

    def send(self, request: bytes) -> None:
        """Send an encoded request after those before it; never waits."""
        self._queue.put(request)

    def close(self) -> None:
        """End the session without a word. Idempotent."""
        self._closed = True
        self._queue.put(None)
        if self._call is not None:
            self._link.cancel(self._call)

    def __next__(self) -> bytes:
        while True:
            if not self._closed and (beat := self.heartbeats.take()) is not None:
                return beat
            try:
                request = take(self._queue, max(0.0, self.heartbeats.left))
            except queue.Empty:
                continue
            if request is None or self._closed:
                raise StopIteration
            return request

"""The connection to one coordinator: the channel, its stubs, and single attempts of calls."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from dmesh.coordination import faults
from dmesh.coordination.channel import Contact, channel_options, prepare_grpc
from dmesh.coordination.credentials import ClientTls, Credentials, name_of
from dmesh.coordination.faults import CHANNEL_CLOSED, Fault
from dmesh.coordination.retry import DEFAULT_PATIENCE, Patience
from dmesh.coordination.tls_diagnosis import diagnose
from dmesh.coordination.tracing import NO_TRACING, Carried, Tracing
from dmesh.coordination.waiting import SerialExecutor, may_start_threads, take
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.coordination_pb2_grpc import CoordinationServiceStub
from dmesh.v1.key_value_pb2_grpc import KeyValueServiceStub

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)

_SESSION = "/dmesh.v1.CoordinationService/Session"
_LOOK = 0.5
"""Seconds between two looks at the state of the session while a call is under way."""
_DIAGNOSE_AGAIN = 5.0
"""Seconds between two attempts to find out what is wrong with TLS."""
_CLOSE = 10.0
"""Seconds that closing the channel may take."""


class Link:
    """The connection to one coordinator. Thread-safe.

    Its callers may be interrupted at any instant, so none of gRPC's code runs on their threads: see
    `waiting`.

    Attributes:
        address: HOST:PORT of the coordinator.
        contact: When it was last heard of.
        tracing: Makes spans of the calls.
        coordination: Stub for membership and barriers.
        key_value: Stub for the key-value store.
        use_proxy: True if the proxies of the environment are used.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        use_proxy: bool = False,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.address = address
        self.tracing = tracing
        self.contact = Contact()
        prepare_grpc()
        self._credentials = Credentials.of_environment() if credentials is None else credentials
        self.use_proxy = use_proxy
        self._diagnose_at = 0.0
        self._channel = self._credentials.channel(address, channel_options(patience, use_proxy=use_proxy))
        self.coordination = CoordinationServiceStub(self._channel)
        self.key_value = KeyValueServiceStub(self._channel)
        self._executor = SerialExecutor("dmesh-calls")

    @property
    def host(self) -> str:
        """The coordinator's host, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The coordinator's port, as this process has connected to it."""
        port = self.address.rpartition(":")[2]
        return int(port) if port.isdigit() else 0

    @property
    def tls(self) -> ClientTls | None:
        """Encryption of connections; None for none."""
        return self._credentials.tls

    def open_stream(self, requests: Iterator[bytes]) -> grpc._CallIterator[pb.SessionResponse]:
        """Open a session over gRPC, for requests that are encoded already.

        Raises:
            ValueError: The channel is closed.
        """
        method = self._channel.stream_stream(_SESSION, None, pb.SessionResponse.FromString)
        stream: grpc._CallIterator[pb.SessionResponse] = method(requests)
        return stream

    def attempt(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        deadline: float | None,
        look: Callable[[], None] | None = None,
    ) -> _Response | Fault:
        """Make one attempt of a call and wait for its answer.

        Args:
            method: The method of a stub.
            request: What to send.
            deadline: Seconds that it may take; None for no limit.
            look: Called every now and then meanwhile; what it raises ends the attempt.

        Returns:
            The answer, or why there is none.
        """
        with self.tracing.call(name_of(method)) as span:
            outcome = self._attempt(method, request, deadline, look, span.carried)
            if isinstance(outcome, Fault):
                span.over(outcome.status, outcome.message)
            return outcome

    def _attempt(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        deadline: float | None,
        look: Callable[[], None] | None,
        carried: Carried,
    ) -> _Response | Fault:
        box: queue.SimpleQueue[_Response | Fault | Exception] = queue.SimpleQueue()
        begun: list[grpc.Future[_Response]] = []

        def begin() -> None:
            try:
                if not may_start_threads():  # the program is over, and so are the calls of its other threads
                    box.put(self._outcome(partial(method, request, timeout=deadline, metadata=carried)))
                    return
                future = method.future(request, timeout=deadline, metadata=carried)
            except ValueError:
                box.put(CHANNEL_CLOSED)
                return
            except Exception as error:  # noqa: BLE001 -- raised below
                box.put(error)
                return
            begun.append(future)
            future.add_done_callback(lambda done: box.put(self._outcome(done.result)))

        if not self._executor.submit(begin):
            return CHANNEL_CLOSED
        try:
            while True:
                try:
                    outcome = take(box, _LOOK)
                except queue.Empty:
                    if look is not None:
                        look()
                    continue
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome
        except BaseException:
            # Jobs run in order: whatever was to be begun has been begun by then.
            self._executor.submit(lambda: [future.cancel() for future in begun])
            raise

    def tls_problem(self) -> str | None:
        """Find out, by connecting, whether TLS is why the coordinator cannot be reached; None if not.

        Asked after a failed attempt, and not more than once in a few seconds.
        """
        if self.contact.ever or time.monotonic() < self._diagnose_at:
            return None
        self._diagnose_at = time.monotonic() + _DIAGNOSE_AGAIN
        return diagnose(self.address, self._credentials.tls)

    def cancel(self, call: grpc.Call) -> None:
        """End a call; its reader gets the status CANCELLED."""
        self._executor.submit(call.cancel)

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._executor.close(self._channel.close, _CLOSE)

    def note(self, fault: Fault) -> None:
        """Note whether a failed call was answered at all.

        An answer that lets nobody in counts as none: it is not the coordinator's state that it tells of, and
        who waits for another token to arrive should not wait longer than for the coordinator.
        """
        if fault.from_server and not fault.keeps_out:
            self.contact.heard()
        elif fault is not CHANNEL_CLOSED:
            self.contact.failed()

    def _outcome(self, result: Callable[[], _Response]) -> _Response | Fault:
        try:
            response = result()
        except grpc.FutureCancelledError:
            return Fault(0, "the call was cancelled", code=grpc.StatusCode.CANCELLED)
        except grpc.RpcError as error:
            fault = faults.from_rpc(error)
            self.note(fault)
            return fault
        self.contact.heard()
        return response

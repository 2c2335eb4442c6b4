"""An HTTP service in a thread: it records its requests, and fails on demand."""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

_LONGEST_BODY = 1 << 20
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """Request to a service."""

    method: str
    """Such as GET."""
    path: str
    """Decoded, without the query."""
    query: Mapping[str, str]
    """Its parameters, decoded; of those given twice the last."""
    headers: Mapping[str, str] = field(repr=False)  # one of them has the credentials
    """By name in lower case."""
    body: bytes = b""
    """Body of the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a service."""

    status: int = 200
    """Such as 200."""
    body: object = b""
    """Bytes or text as they are; anything else as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Beside `Content-Type` and `Content-Length`."""


class FakeService:
    """Answers HTTP requests on a port of 127.0.0.1; derive from it and implement `answer`.

    It begins at once and ends with `close`, or at the end of a `with` block.

    Args:
        tls: Answer HTTPS with this.

    Attributes:
        requests: What was asked so far, in order.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self._lock = threading.Condition()
        self._failures: list[tuple[str, Answer]] = []
        self._released = threading.Event()
        self._released.set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _PATIENCE

            def handle_any(self) -> None:
                service._handle(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._scheme = "http" if tls is None else "https"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name=type(self).__name__, daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT`."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """URL of the service, without a slash at the end."""
        return f"{self._scheme}://{self.address}"

    def answer(self, request: Request) -> Answer:
        """Returns what to say to a request; called by several threads at once."""
        raise NotImplementedError

    def fail(
        self,
        status: int,
        times: int = 1,
        *,
        path: str = "",
        body: object = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answers the next requests with an error, or whatever else is given, instead of what is right.

        Args:
            status: The HTTP status.
            times: How many requests.
            path: Only those whose path has this in it.
            body: As `Answer.body`.
            headers: As `Answer.headers`; `{"Retry-After": "3"}`, for example.
        """
        with self._lock:
            self._failures += [(path, Answer(status, body, headers or {}))] * times

    def hold(self) -> None:
        """Lets requests wait for an answer until `release` is called."""
        self._released.clear()

    def release(self) -> None:
        """Answers what `hold` held back."""
        self._released.set()

    def wait_for_requests(self, count: int, timeout: float = _PATIENCE) -> None:
        """Waits until it has been asked so many times.

        Args:
            count: How many requests.
            timeout: How long at most, seconds.

        Raises:
            TimeoutError: It has not.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: len(self.requests) >= count, timeout):
                raise TimeoutError(
                    f"{len(self.requests)} of {count} requests came to {self.url} in {timeout:g} s"
                )

    def close(self) -> None:
        """Ends the service."""
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        """Returns the service, which runs already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the service."""
        self.close()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = min(int(handler.headers.get("Content-Length") or 0), _LONGEST_BODY)
        url = urlsplit(handler.path)
        request = Request(
            handler.command,
            unquote(url.path),
            dict(parse_qsl(url.query, keep_blank_values=True)),
            {name.lower(): value for name, value in handler.headers.items()},
            handler.rfile.read(length),
        )
        with self._lock:
            self.requests.append(request)
            self._lock.notify_all()
            failure = next((entry for entry in self._failures if entry[0] in request.path), None)
            if failure is not None:
                self._failures.remove(failure)
        self._released.wait(_PATIENCE)
        answer = failure[1] if failure is not None else self.answer(request)
        content, kind = _encode(answer.body)
        handler.close_connection = True  # nothing stays open that a test would have to wait for
        try:
            handler.send_response(answer.status)
            for name, value in {
                "Content-Type": kind, **answer.headers,
                "Content-Length": str(len(content)), "Connection": "close",
            }.items():  # fmt: skip
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(content)
        except OSError:
            pass  # who asked has gone: it had a time limit


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that breaks off, or does not trust the certificate: that is tested."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _encode(body: object) -> tuple[bytes, str]:
    if isinstance(body, bytes):
        return body, "application/octet-stream"
    if isinstance(body, str):
        return body.encode(), "text/plain; charset=utf-8"
    return json.dumps(body).encode(), "application/json; charset=utf-8"

"""Gate in front of the HTTP application: checks host name, origin, token and role of every request."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dmesh.security.tokens import Role, Token
from dmesh_server.security.access import Access, audit, denial, may, out_of_bounds
from dmesh_server.security.roles import API_PREFIX, PAGE_PATHS, PROBE_PATHS, role_for_http
from dmesh_server.security.shedding import LoadShedder
from dmesh_server.web.logins import Logins
from dmesh_server.web.pacer import LONGEST, Pacer
from dmesh_server.web.series import Recorder

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_FILTERED_PATHS = PAGE_PATHS | {
    "/api/v1/clusters", "/api/v1/declarations", "/api/v1/series", "/api/v1/server", "/openapi.json",
}  # fmt: skip
"""Paths whose answers leave out what a token that is bound to clusters may not see."""
_EVENT_PATHS = frozenset({"/api/v1/events", "/api/v1/errors"})
"""Paths that such a token may read for one of its clusters."""
_CLUSTER_PATH = re.compile(r"/api/v1/clusters/([A-Za-z0-9_.-]+)(?:/.*)?")

_MOST_DRAINED = 1 << 16
"""Bytes of a refused request's body that are read."""
_DRAIN_SECONDS = 1.0
"""Seconds within which these must arrive: their sender may not have shown a token."""

_SHOWN = "dmesh.token"
"""Key of the scope under which the application finds the caller's token."""

_POLICY = (
    # Whatever a page of ours shows, it runs no script but our own files, in nobody's frame.
    b"default-src 'self'",
    b"object-src 'none'",
    b"frame-ancestors 'none'",
    b"base-uri 'none'",
    b"form-action 'self'",
    # Nor can these files make markup of a text, where the browser knows of it.
    b"require-trusted-types-for 'script'",
    b"trusted-types 'none'",
)

_SAFE_HEADERS = (
    (b"content-security-policy", b"; ".join(_POLICY)),
    (b"x-content-type-options", b"nosniff"),
    # Not `no-referrer`: browsers then say that their own forms come from the origin "null".
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class HttpGate:
    """An ASGI application in front of another one.

    A web page whose name was pointed at this machine (DNS rebinding) must not read or change what is here,
    nor one of another origin. Nothing is done for the sake of a cookie but to show a page, and what a viewer
    may read to a script of ours: whoever asks for anything else shows a token in a header, each time.
    """

    def __init__(
        self,
        app: App,
        names: Collection[str],
        access: Access | None,
        logins: Logins,
        pacer: Pacer,
        shedder: LoadShedder,
        recorder: Recorder,
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        """Make a gate.

        Args:
            app: The application behind it.
            names: Names of the server; requests for others are refused.
            access: Roles of the accepted tokens; None to accept callers without a token.
            logins: Knows whose cookie stands for which token.
            pacer: When requests with a token are answered.
            shedder: Bounds those without one.
            recorder: Records time series while the application is served.
            open_paths: What may be read without a token, beside what always may.
        """
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._access = access
        self._logins = logins
        self._open_paths = open_paths
        self._pacer = pacer
        self._shedder = shedder
        self.recorder = recorder
        """Records time series while the application is served."""

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = [header for header in _SAFE_HEADERS if header[0] not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None and scope["path"] not in PROBE_PATHS:  # probes do not wait
            refusal = await self._wait(scope)
        if refusal is None:
            await self._app(scope, receive, send_safely)
            return
        if token_of(scope) is None:
            self._shedder.serves(remote_of(scope))  # counted, however it was refused
        await _drain(scope, receive)
        status, text = refusal
        body = json.dumps({"status": text}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if status == 303:
            headers.append((b"location", text.encode()))
        if status in (429, 503):
            headers.append((b"retry-after", b"%d" % LONGEST))
        if status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="dmesh"'))
        await send_safely({"type": "http.response.start", "status": status, "headers": headers})
        await send_safely({"type": "http.response.body", "body": body})

    async def _wait(self, scope: _Scope) -> tuple[int, str] | None:
        """Wait until it is the request's turn; return status and text if there are too many.

        Requests without a token are not queued, so requests with a token never wait for them.
        """
        if self._access is not None and token_of(scope) is None:
            if self._shedder.serves(remote_of(scope)):
                return None
            return 429, "too many requests without a token; log in, or ask again in some seconds"
        if self._pacer.crowded:
            return 503, "too many requests wait already; ask again in some seconds, and less often"
        await self._pacer.wait()
        return None

    def _refusal(self, scope: _Scope) -> tuple[int, str] | None:
        """Return status and text if the request may not pass."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        name = _only(headers, b"host") or ""
        if not _is_own_name(name, self._names):
            return 421, (
                "the Host header does not name this server; use its IP address or localhost, or start it "
                "with --allowed-host and the name of its DNS entry or proxy"
            )
        if _has(headers, b"origin") and not _is_origin_of(name, _only(headers, b"origin") or ""):
            return 403, "requests that a page of another origin makes are refused"
        if self._access is None:
            return None
        method, path = scope["method"], scope["path"]
        needed = role_for_http(method, path)
        reading = method in ("GET", "HEAD")
        is_open = needed is None or (reading and path in self._open_paths)
        shown = _only(headers, b"authorization")
        # What is open needs no token; it tells requests of operators from others.
        by_login = shown is None and (
            is_open or (reading and needed is Role.VIEWER and _is_for_own_page(path, headers))
        )
        if by_login:
            token = self._logins.token(_only(headers, b"cookie"), port_of(scope))
            shown = None if token is None else f"Bearer {token}"
        verdict = self._access.identify(shown)
        peer = remote_of(scope)
        if verdict.token is not None:
            scope[_SHOWN] = verdict.token
            self._shedder.authenticated(peer)
        if is_open or needed is None:
            return None
        if by_login and verdict.token is None and path in PAGE_PATHS:
            return 303, "/login"
        if verdict.token is None:
            self._access.refusals.note(
                "unauthenticated",
                peer,
                method=f"{method} {path}",
                fingerprint=verdict.shown or None,
                reason="no token" if not verdict.shown else "token not accepted",
            )
            return 401, verdict.problem
        if not may(verdict.token, needed):
            what = f"{method} {path}"
            audit(self._access.refusals, peer, verdict.token, needed, what)
            return 403, denial(verdict.token, needed, what)
        if not path.isprintable():
            # A router may take a path and a line break for the path alone, which needs another role.
            return 404, "there is no such path"
        if verdict.token.clusters and not _is_within(verdict.token, path, scope["query_string"]):
            return 403, out_of_bounds(verdict.token, f"{method} {path}")
        return None


def token_of(scope: _Scope) -> Token | None:
    """Return the token with which a request passed the gate; None if the server checks none."""
    token = scope.get(_SHOWN)
    return token if isinstance(token, Token) else None


def has_role(scope: _Scope, needed: Role) -> bool:
    """Return whether a request has a role; every request has if the server checks no tokens."""
    token = token_of(scope)
    return token is None or may(token, needed)


def covers(scope: _Scope, cluster: str) -> bool:
    """Return whether the request's token is valid for a cluster; unbound tokens are valid for all."""
    token = token_of(scope)
    return token is None or token.covers(cluster)


def remote_of(scope: _Scope) -> str:
    """Return the host that a request came from."""
    return str(scope["client"][0]) if scope["client"] else "unknown"


def port_of(scope: _Scope) -> int:
    """Return the port that a request came in at."""
    return scope["server"][1] or 0


async def _drain(scope: _Scope, receive: _Receive) -> None:
    """Read the small body of a refused request: closing with unread bytes resets the connection."""
    length = _only(scope["headers"], b"content-length") or ""
    if not (length.isdecimal() and len(length) < 10 and 0 < int(length) <= _MOST_DRAINED):
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while (await receive()).get("more_body"):
                pass


def _is_within(token: Token, path: str, query: bytes) -> bool:
    """Return whether a request concerns only clusters that its token is bound to; unlisted ones do not."""
    if path in _FILTERED_PATHS or role_for_http("GET", path) is None:
        return True
    if path in _EVENT_PATHS:
        named = parse_qs(query.decode("ascii", errors="replace")).get("cluster", [])
        return len(named) == 1 and token.covers(named[0])
    found = _CLUSTER_PATH.fullmatch(path)
    return found is not None and token.covers(found[1])


def _is_origin_of(name: str, origin: str) -> bool:
    """Return whether a page came from the server that a request is for."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == name.lower()


def _is_for_own_page(path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a cookie counts: browsers send it with any page's requests, and most name the page."""
    if path in PAGE_PATHS:
        return True
    site = b"sec-fetch-site"
    return path.startswith(API_PREFIX) and (not _has(headers, site) or _only(headers, site) == "same-origin")


def _has(headers: list[tuple[bytes, bytes]], name: bytes) -> bool:
    return any(key == name for key, _ in headers)


def _only(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Return a header's value; None if it is there not once."""
    found = [value for key, value in headers if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _is_own_name(header: str, names: Collection[str]) -> bool:
    """Return whether a Host header names the server by an IP address or a name from its settings."""
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    if name.lower() == "localhost" or name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

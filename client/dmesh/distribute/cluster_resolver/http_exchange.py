"""One HTTP request and its reply, with limits of time and size, without redirects or caches."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmesh.errors import ClusterLookupError

_CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a server."""

    status: int
    """Status code, such as 200."""
    headers: Mapping[str, str]
    """Headers by name in lower case."""
    body: bytes
    """The whole body."""

    def text(self, most: int = 200) -> str:
        """Return the beginning of the body, on one line, for an error message."""
        return " ".join(self.body[: 4 * most].decode("utf-8", "replace").split())[:most]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because the credentials are for the original host only."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def exchange(
    url: str,
    *,
    timeout: float,
    most_bytes: int,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    proxies: bool = True,
) -> Reply:
    """Make a request and read the whole reply.

    Args:
        url: URL with the scheme http or https.
        timeout: Time limit of the whole exchange, seconds.
        most_bytes: Maximum size of the reply's body.
        method: Method, such as GET.
        headers: Headers to send.
        body: Body to send.
        proxies: Whether to use a proxy from the environment.

    Returns:
        The reply, with any status.

    Raises:
        OSError: The connection cannot be made, or breaks; TimeoutError after the time limit.
        ClusterLookupError: The reply is too long, or the URL is not of HTTP.
    """
    if not url.startswith(("http://", "https://")):
        raise ClusterLookupError(f"{without_query(url)!r:.200} is not an http:// or https:// URL; correct it")
    deadline = time.monotonic() + timeout
    # http.client cannot decompress replies, so do not accept compressed ones.
    sent = {**(headers or {}), "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, data=body, headers=sent, method=method)  # noqa: S310
    opener = urllib.request.build_opener(
        _NoRedirects, *(() if proxies else (urllib.request.ProxyHandler({}),))
    )
    try:
        try:
            response = opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            inner = response.fp if isinstance(response, urllib.error.HTTPError) else response
            read = _read(inner, deadline, most_bytes, url)
            return Reply(
                response.status, {name.lower(): value for name, value in response.headers.items()}, read
            )
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise ConnectionError(str(error.reason)) from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"the reply is not HTTP, or is truncated ({type(error).__name__})") from error


def without_query(url: str) -> str:
    """Return a URL without its query, which may have a key."""
    return url.partition("?")[0]


def _read(response: Any, deadline: float, most_bytes: int, url: str) -> bytes:
    chunks = bytearray()
    while chunk := response.read1(_CHUNK):
        chunks += chunk
        if len(chunks) > most_bytes:
            raise ClusterLookupError(
                f"the reply of {without_query(url)} is larger than the limit of {most_bytes} bytes. "
                "Check the URL"
            )
        if time.monotonic() > deadline:
            raise TimeoutError("the reply takes too long")
    if response.length:  # read1 does not report truncated replies
        raise ConnectionError(f"the reply is truncated, {response.length} bytes before its end")
    return bytes(chunks)

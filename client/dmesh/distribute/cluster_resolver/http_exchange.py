"""One HTTP request and its reply, with an end in time and size: no redirects, no caches, no surprises."""

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
    """Answer of a server."""

    status: int
    """Such as 200."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes
    """All of it."""

    def text(self, most: int = 200) -> str:
        """Returns the beginning of the body, on one line, for an error message."""
        return " ".join(self.body[: 4 * most].decode("utf-8", "replace").split())[:most]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Credentials are for the host that was asked, not for wherever it points."""

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
    """Makes a request and reads the whole reply.

    Args:
        url: Of the scheme http or https.
        timeout: Seconds that all of it may take.
        most_bytes: Longest body that is read.
        method: Such as GET.
        headers: To send.
        body: To send.
        proxies: Whether to go through a proxy that the environment names.

    Returns:
        The reply, whatever its status.

    Raises:
        OSError: There is no connection, or none that lasts; TimeoutError if it takes too long.
        ClusterLookupError: The reply is too long, or the URL is none of HTTP's.
    """
    if not url.startswith(("http://", "https://")):
        raise ClusterLookupError(
            f"{without_query(url)!r:.200} is not a URL of http:// or https://; correct it"
        )
    deadline = time.monotonic() + timeout
    # http.client has no way to take a reply apart: no compression unless we ask for it.
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
        raise ConnectionError(f"the reply is not HTTP, or breaks off ({type(error).__name__})") from error


def without_query(url: str) -> str:
    """Returns a URL without what may be a key in it."""
    return url.partition("?")[0]


def _read(response: Any, deadline: float, most_bytes: int, url: str) -> bytes:
    chunks = bytearray()
    while chunk := response.read1(_CHUNK):
        chunks += chunk
        if len(chunks) > most_bytes:
            raise ClusterLookupError(
                f"the reply of {without_query(url)} has more than {most_bytes} bytes, which no reply of "
                "this service should have; check that the URL is right"
            )
        if time.monotonic() > deadline:
            raise TimeoutError("the reply takes too long")
    if response.length:  # read1 says nothing of it
        raise ConnectionError(f"the reply breaks off, {response.length} bytes before its end")
    return bytes(chunks)

"""Logins of browsers.

A browser cannot be made to show a token with every request, and it sends a cookie whatever page made it ask:
here a cookie is good for looking at pages, and for nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

_MAX_HEADER = 4096


class Logins:
    """Tokens behind browsers' cookies, in memory: a restart of the server logs everyone out.

    The token itself stays here and is judged anew with every request, so that a revoked one ends its logins.
    """

    def __init__(self, clock: Callable[[], float], *, lifetime: float = 12 * 3600.0, most: int = 256) -> None:
        """Make an empty table.

        Args:
            clock: Monotonic time, seconds.
            lifetime: Seconds after which a browser must log in again.
            most: Logins that are kept; one more ends the oldest.
        """
        self.lifetime = lifetime
        """Seconds after which a browser must log in again."""
        self._clock = clock
        self._most = most
        self._open: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def enter(self, token: str, lifetime: float | None = None) -> str:
        """Return the value of a new cookie that stands for an accepted token.

        Args:
            token: The token.
            lifetime: Seconds after which the browser must log in again; the usual ones if None.
        """
        while len(self._open) >= self._most:
            self._open.popitem(last=False)
        value = secrets.token_urlsafe(32)
        self._open[value] = (token, self._clock() + (self.lifetime if lifetime is None else lifetime))
        return value

    def token(self, header: str | None, port: int) -> str | None:
        """Return the token that a `Cookie` header stands for, if any."""
        value = _value(header, cookie_name(port))
        found = self._open.get(value) if value is not None else None
        if value is None or found is None:
            return None
        token, ends = found
        if self._clock() >= ends:
            del self._open[value]
            return None
        return token

    def leave(self, header: str | None, port: int) -> None:
        """Forget the login that a `Cookie` header stands for."""
        value = _value(header, cookie_name(port))
        if value is not None:
            self._open.pop(value, None)


class LoginCodes:
    """One-time codes in links that log a browser in, as `dmesh serve` prints one at its start.

    A code is 256 random bits, good for one login within its lifetime; only its hash is kept.
    """

    def __init__(self, clock: Callable[[], float], *, lifetime: float = 600.0) -> None:
        """Have no code yet.

        Args:
            clock: Monotonic time, seconds.
            lifetime: Seconds after which a code is worth nothing.
        """
        self.lifetime = lifetime
        """Seconds after which a code is worth nothing."""
        self._clock = clock
        self._open: tuple[bytes, str, float] | None = None

    def issue(self, token: str) -> str:
        """Return a new code for logins that stand for a token; an earlier code is worth nothing any more."""
        code = secrets.token_urlsafe(32)
        self._open = _hash(code), token, self._clock() + self.lifetime
        return code

    def redeem(self, code: str) -> str | None:
        """Return the token that a code stands for, once; None for any other code."""
        if self._open is None:
            return None
        known, token, ends = self._open
        if not hmac.compare_digest(known, _hash(code)) or self._clock() >= ends:
            return None
        self._open = None
        return token


def _hash(code: str) -> bytes:
    return hashlib.sha256(code.encode(errors="replace")).digest()


def cookie_name(port: int) -> str:
    """Return the cookie's name: cookies do not know ports, and a host may have two servers."""
    return f"dmesh-login-{port}"


def _value(header: str | None, name: str) -> str | None:
    if header is None or len(header) > _MAX_HEADER:
        return None
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return None
    return None if morsel is None else morsel.value

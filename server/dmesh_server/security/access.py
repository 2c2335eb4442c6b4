"""Authentication and authorization of callers by their tokens.

Used on the server's event loop only.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from dmesh.errors import ConfigurationError
from dmesh.security.tokens import SHORTEST, Role, Token, TokenSource, fingerprint
from dmesh.security.watched_files import WatchedFiles
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.security.issued_tokens import IssuedTokens, digest
from dmesh_server.security.pace import Pace
from dmesh_server.security.refusals import RefusalLog
from dmesh_server.telemetry import logs

_SCHEME = "bearer "
_LONGEST_HEADER = 8192

NOTHING_SHOWN = (
    "this server asks for a token (metadata or header `authorization: Bearer TOKEN`), and none came. Set "
    "DMESH_TOKEN or DMESH_TOKEN_FILE, or put the server's token file at ~/.config/dmesh/token"
)
"""Refusal of a caller without a token."""


CALLER: ContextVar[Token | None] = ContextVar("dmesh_caller", default=None)
"""Token of the gRPC call under way; None if the server requires none."""

CALL_RATE: ContextVar[Pace | None] = ContextVar("dmesh_call_rate", default=None)
"""Quota of calls of that token; None for none."""


class Hold:
    """Open stream that ends when its token is revoked or expires."""

    def __init__(self, task: asyncio.Task[object] | None) -> None:
        """Make one for the task that serves the stream."""
        self._task = task
        self.revoked = False
        """True if the stream was ended because of its token."""

    def revoke(self) -> None:
        """End the stream."""
        if not self.revoked and self._task is not None:
            self.revoked = True
            self._task.cancel()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision about a caller."""

    token: Token | None
    """The token, if the server accepts it and it has not expired."""
    problem: str = ""
    """Refusal for the caller; empty if it is accepted."""
    shown: str = ""
    """Fingerprint of a token that is not accepted; empty if none was shown."""


class Access:
    """The tokens that a server accepts."""

    def __init__(
        self,
        source: TokenSource,
        *,
        issued: IssuedTokens | None = None,
        refusals: RefusalLog | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the tokens.

        Args:
            source: Where they come from; a file is read again when it changes.
            issued: Tokens that are accepted beside these; none if None.
            refusals: Where refusals are noted.
            wall_clock: Unix time, for tokens that expire.

        Raises:
            ConfigurationError: The source cannot be read, or has a token that is too short to be safe.
        """
        self.origin = source.origin
        """Origin of the tokens, for people."""
        self.refusals = refusals if refusals is not None else RefusalLog()
        """Log of refused callers."""
        self._source = source
        self._wall_clock = wall_clock
        self._files = WatchedFiles([source.path] if source.path is not None else [], interval=0.0)
        self._accepted: tuple[tuple[bytes, Token], ...] = ()
        self._held: dict[Hold, Token] = {}
        self.issued = issued if issued is not None else IssuedTokens(None)
        """Tokens that are issued while the server runs."""
        self._rates: dict[str, Pace] = {}
        self._accept(_checked(source))

    def identify(self, header: str | None) -> Verdict:
        """Authenticate a caller.

        Takes the same time whatever is shown: the hash of every accepted token is compared in constant time.

        Args:
            header: The value of `authorization`; None if there is none, or more than one.
        """
        shown = ""
        if header is not None and len(header) <= _LONGEST_HEADER and header[:7].lower() == _SCHEME:
            shown = header[7:].strip()
        shown_digest = digest(shown)
        found: Token | None = None
        for known, token in self._accepted:
            if hmac.compare_digest(known, shown_digest):
                found = token
        if not shown:
            return Verdict(None, NOTHING_SHOWN)
        issued = self.issued.identify(shown)
        found = found or issued
        if found is None:
            mark = fingerprint(shown)
            return Verdict(
                None,
                f"this server does not know the token (fingerprint {mark}), or it was revoked. Use the "
                "server's token: DMESH_TOKEN, DMESH_TOKEN_FILE or ~/.config/dmesh/token",
                mark,
            )
        if found.expired(self._wall_clock()):
            mark = found.fingerprint
            return Verdict(
                None, f"the token (fingerprint {mark}) has expired; ask the server's owner for another", mark
            )
        return Verdict(found)

    @contextmanager
    def holding(self, token: Token) -> Iterator[Hold]:
        """Cancel the current task if the token is revoked or expires before the block ends."""
        hold = Hold(asyncio.current_task())
        self._held[hold] = token
        try:
            yield hold
        finally:
            del self._held[hold]

    def refresh(self) -> None:
        """Read the tokens again if their file has changed; end the streams of removed tokens.

        A file that cannot be read, as while it is being replaced, changes nothing.
        """
        if self._files.changed():
            try:
                tokens = _checked(self._source)
            except ConfigurationError as error:
                logs.error("tokens_not_reloaded", reason=error)
            else:
                self._accept(tokens)
                logs.info("tokens_reloaded", origin=self.origin, tokens=len(tokens))
        self.end_streams()

    def end_streams(self) -> None:
        """End the streams whose tokens are not accepted any more."""
        now = self._wall_clock()
        worth = {token for _, token in self._accepted if not token.expired(now)}
        revoked = [
            hold
            for hold, token in self._held.items()
            if not (self.issued.is_valid(token.id) if token.id else token in worth)
        ]
        for hold in revoked:
            hold.revoke()
        if revoked:
            logs.warning(
                "streams_revoked", streams=len(revoked), reason="their token is not accepted any more"
            )

    def call_rate(self, token: Token) -> Pace | None:
        """Return the bucket of a token's calls; None if it has no quota of them."""
        quota = self.issued.quota(token.id) if token.id else None
        if quota is None or quota.calls_per_second is None:
            return None
        rate = self._rates.get(token.id)
        if rate is None:
            self._rates = {key: kept for key, kept in self._rates.items() if self.issued.is_valid(key)}
            rate = self._rates[token.id] = Pace(quota.calls_per_second, time.monotonic(), most_debt=1.0)
        return rate

    def token_to_look(self) -> Token | None:
        """Return the token of its file that may do the least and sees all clusters, or else some of them.

        None if all have expired.
        """
        now = self._wall_clock()
        worth = [token for _, token in self._accepted if not token.expired(now)]
        return min(worth, key=lambda token: (bool(token.clusters), token.role), default=None)

    def describe(self) -> list[str]:
        """Return fingerprint, role and name of each token, for logs."""
        return [
            f"{token.fingerprint}:{token.role.name.lower()}" + (f":{token.name}" if token.name else "")
            for _, token in self._accepted
        ]

    def _accept(self, tokens: Sequence[Token]) -> None:
        self._accepted = tuple((digest(token.value), token) for token in tokens)


def check_cluster(token: Token | None, cluster: str) -> None:
    """Refuse a token that is bound to other clusters; None is bound to none.

    Raises:
        CoreError: PERMISSION_DENIED.
    """
    if token is not None and not token.covers(cluster):
        raise CoreError(ErrorKind.PERMISSION_DENIED, out_of_bounds(token, f"cluster {cluster}"))


def caller_name(token: Token | None) -> str:
    """Return a caller's name for messages and logs: its token's fingerprint and name, never the token."""
    return "somebody without a token" if token is None else token.label


def out_of_bounds(token: Token, what: str) -> str:
    """Return the message for a token that is bound to other clusters."""
    bound = ", ".join(sorted(token.clusters))
    return f"{token.label} is bound to cluster {bound}, so it is no good for {what}; use another token"


def calls_exceeded(token: Token | None) -> CoreError:
    """Return the refusal of a call beyond a token's quota."""
    name = "" if token is None else f" of {token.label}"
    return CoreError(
        ErrorKind.LIMIT_EXCEEDED,
        f"quota `calls_per_second`{name}: too many calls; call less often, or ask the operator for a token "
        "with a larger quota",
    )


def may(token: Token, needed: Role) -> bool:
    """Return whether a token's role includes the role `needed`."""
    return token.role >= needed


def denial(token: Token, needed: Role, what: str) -> str:
    """Return the refusal of a caller whose role does not permit `what`."""
    return (
        f"the token (fingerprint {token.fingerprint}) has the role {token.role.name.lower()}; {what} needs "
        f"{needed.name.lower()}"
    )


def audit(refusals: RefusalLog, host: str, token: Token, needed: Role, what: str) -> None:
    """Log an attempt at `what` by a token whose role does not permit it."""
    refusals.note(
        "permission_denied",
        host,
        token.fingerprint,
        what,
        token=token.fingerprint,
        name=token.name or None,
        role=token.role.name.lower(),
        needed=needed.name.lower(),
        what=what,
    )


def _checked(source: TokenSource) -> tuple[Token, ...]:
    tokens = source.read()
    for token in tokens:
        if len(token.value) < SHORTEST:
            raise ConfigurationError(
                f"{source.origin} has a token of {len(token.value)} characters (not shown); a server accepts "
                f"only tokens of at least {SHORTEST}, because shorter ones can be guessed"
            )
    return tokens

"""Tokens that the server issues and revokes at run time, kept as hashes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmesh.errors import ConfigurationError
from dmesh.security.tokens import Role, Token, fingerprint
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.quotas import Quota

FILE = "tokens.json"
"""Name of the file in the data directory."""

_FORMAT = 1
_PREFIX = "dmesh"
_MOST = 10_000
"""Tokens that are kept. Those that have expired make room."""
_NOBODY = bytes(32)


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """Record of an issued token, without the token."""

    id: str
    """Public name, a part of the token itself."""
    hash: str
    """SHA-256 of the token: 256 random bits, so there is nothing to guess."""
    fingerprint: str
    """Fingerprint by which logs name the token."""
    role: Role
    name: str
    clusters: frozenset[str]
    """Clusters that it is bound to; empty: all."""
    quota: Quota
    created: float
    """Unix time."""
    expires: float | None
    """Unix time; None for never."""
    by: str
    """Operator who issued it."""

    def to_json(self) -> dict[str, Any]:
        """Return the token's record."""
        return asdict(self) | {"role": self.role.name, "clusters": sorted(self.clusters)}

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> IssuedToken:
        """Read a record; raise KeyError, TypeError or ValueError if it is none."""
        fields = dict(record)
        return cls(
            role=Role[fields.pop("role")],
            clusters=frozenset(fields.pop("clusters")),
            quota=Quota(**fields.pop("quota")),
            **fields,
        )


class IssuedTokens:
    """The tokens that this server has issued."""

    def __init__(self, directory: Path | None, wall_clock: Callable[[], float] = time.time) -> None:
        """Read the tokens.

        Args:
            directory: Data directory; None to keep them in memory only.
            wall_clock: Unix time.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        self._path = None if directory is None else directory / FILE
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()
        self._tokens: dict[str, IssuedToken] = {} if self._path is None else _read(self._path)

    @property
    def durable(self) -> bool:
        """True if they outlive the server's process."""
        return self._path is not None

    def identify(self, shown: str) -> Token | None:
        """Return the token that was shown, if it is one of these; it may have expired."""
        prefix, _, rest = shown.partition("_")
        issued = self._tokens.get(rest.partition("_")[0]) if prefix == _PREFIX else None
        known = _NOBODY if issued is None else bytes.fromhex(issued.hash)
        if not hmac.compare_digest(known, digest(shown)) or issued is None:
            return None
        return Token(shown, issued.role, issued.name, issued.expires, issued.clusters, issued.id)

    def is_valid(self, token_id: str) -> bool:
        """Return whether a token is neither revoked nor expired."""
        issued = self._tokens.get(token_id)
        return issued is not None and not self.is_expired(issued)

    def is_expired(self, token: IssuedToken) -> bool:
        """Return whether a token has expired."""
        return token.expires is not None and self._wall_clock() >= token.expires

    def quota(self, token_id: str) -> Quota | None:
        """Return a token's quota; None if there is no such token."""
        issued = self._tokens.get(token_id)
        return None if issued is None else issued.quota

    def all(self) -> list[IssuedToken]:
        """Return all that are not revoked, the oldest first."""
        return list(self._tokens.values())

    async def issue(
        self,
        role: Role,
        *,
        name: str = "",
        clusters: Iterable[str] = (),
        quota: Quota | None = None,
        ttl: float | None = None,
        by: str = "",
    ) -> tuple[str, IssuedToken]:
        """Make a token; durable on return.

        Args:
            role: Permissions of its holder.
            name: Name for logs.
            clusters: Clusters that it is bound to; none: all.
            quota: Bounds on what its holder may use of the server.
            ttl: Seconds until it expires; None for never.
            by: Operator who issues it.

        Returns:
            The token itself, which is kept nowhere, and its record.

        Raises:
            CoreError: There are too many, or it cannot be made durable.
        """
        now = self._wall_clock()
        token_id = secrets.token_hex(6)
        value = f"{_PREFIX}_{token_id}_{secrets.token_urlsafe(32)}"
        expires = None if ttl is None else now + ttl
        issued = IssuedToken(
            token_id, digest(value).hex(), fingerprint(value), role, name, frozenset(clusters),
            quota or Quota(), now, expires, by,
        )  # fmt: skip
        async with self._lock:
            kept = self._tokens
            if len(kept) >= _MOST:
                kept = {one.id: one for one in kept.values() if not self.is_expired(one)}
            if len(kept) >= _MOST:
                raise CoreError(
                    ErrorKind.LIMIT_EXCEEDED, f"{_MOST} tokens are issued, which is the limit: revoke some"
                )
            await self._keep(kept | {token_id: issued})
        return value, issued

    async def revoke(self, token_id: str) -> IssuedToken | None:
        """Revoke a token, durably on return; return its record, None if there is no such token.

        Raises:
            CoreError: It cannot be made durable: the token is as good as before.
        """
        async with self._lock:
            found = self._tokens.get(token_id)
            if found is not None:
                await self._keep({key: one for key, one in self._tokens.items() if key != token_id})
        return found

    async def _keep(self, tokens: dict[str, IssuedToken]) -> None:
        if self._path is not None:
            try:
                await asyncio.to_thread(_write, self._path, tokens.values())
            except OSError as error:
                raise CoreError(
                    ErrorKind.STORE_UNAVAILABLE, f"{self._path} cannot be written: {error.strerror}"
                ) from error
        self._tokens = tokens


def _read(path: Path) -> dict[str, IssuedToken]:
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r} belongs to another version")
        return {one.id: one for one in map(IssuedToken.of_json, content["tokens"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the issued tokens in {path} cannot be read: {error}. Restore the file from a backup, or remove "
            "it to revoke them all"
        ) from error


def _write(path: Path, tokens: Iterable[IssuedToken]) -> None:
    content = json.dumps({"format": _FORMAT, "tokens": [one.to_json() for one in tokens]})
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def digest(value: str) -> bytes:
    """Return the hash by which a token is kept and compared."""
    return hashlib.sha256(value.encode(errors="surrogateescape")).digest()

"""Set-up of the server's tokens and certificates, and their reloading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

from dmesh.errors import ConfigurationError
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource
from dmesh_server.listening import Address
from dmesh_server.security.access import Access
from dmesh_server.security.issued_tokens import IssuedTokens
from dmesh_server.telemetry import logs

_REFRESH = 1.0
"""Seconds between two looks at the files of tokens and certificates."""


class Refreshable(Protocol):
    """Settings read from files."""

    def refresh(self) -> None:
        """Read the files again if they have changed."""


def names_token(token_file: Path | None, environ: Mapping[str, str]) -> bool:
    """Return whether the command line or the environment names a token."""
    named = (environ.get(name, "").strip() for name in ("DMESH_TOKEN", "DMESH_TOKEN_FILE"))
    return token_file is not None or any(named)


def server_access(
    token_file: Path | None, environ: Mapping[str, str], issued: IssuedTokens | None = None
) -> Access:
    """Return the tokens that a standalone server accepts, and make one at the first start.

    Args:
        token_file: File that the command line names; if None, the environment or the default path decides.
        environ: The environment.
        issued: Tokens that are accepted beside these; none if None.

    Raises:
        ConfigurationError: A token file that is named cannot be read, or none could be made.
    """
    if token_file is not None:
        source: TokenSource | None = TokenSource(f"--token-file {token_file}", token_file)
    else:
        source = tokens.find(
            environ.get("DMESH_TOKEN", "").strip(), environ.get("DMESH_TOKEN_FILE", "").strip(), environ
        )
    if source is None:
        path = tokens.default_path(environ)
        if path is None:
            raise ConfigurationError(
                "no token: there is no home directory to store one in. Set DMESH_TOKEN or DMESH_TOKEN_FILE, "
                "or XDG_CONFIG_HOME to a directory that is writable"
            )
        tokens.create_file(path)
        logs.info("token_file_made", path=path, note="clients of this user find it there by themselves")
        source = TokenSource(str(path), path)
    access = Access(source, issued=issued)
    logs.info("tokens_loaded", origin=access.origin, tokens=" ".join(access.describe()))
    return access


def refuse_exposure(address: Address, what: str, remedy: str, *, tokens: bool) -> None:
    """Refuse an unprotected address that other machines can reach.

    Args:
        address: The address.
        what: Its use, for the error.
        remedy: What to do.
        tokens: Whether callers must show a token; it would travel in clear text.

    Raises:
        ConfigurationError: Other machines can reach it.
    """
    if address.is_loopback():
        return
    if tokens:
        raise ConfigurationError(
            f"{address}, {what}, can be reached from other machines; without TLS, others on the network "
            f"could read the token and all other traffic. {remedy}"
        )
    raise ConfigurationError(
        f"{address}, {what}, can be reached from other machines; without a token, anyone on the network "
        f"could join, read and end your clusters. {remedy}"
    )


@contextlib.asynccontextmanager
async def kept_current(*parts: Refreshable | None) -> AsyncIterator[None]:
    """Reload tokens and certificates from files, about once a second, until the `with` block ends."""
    present = [part for part in parts if part is not None]

    async def refresh() -> None:
        while True:
            await asyncio.sleep(_REFRESH)
            for part in present:
                try:
                    part.refresh()
                except Exception:  # noqa: BLE001 -- a bug, but revocation must go on working for the others
                    logs.error("refresh_failed", exc_info=True)

    task = asyncio.create_task(refresh(), name="dmesh-refresh")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

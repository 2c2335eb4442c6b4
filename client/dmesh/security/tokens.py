"""Tokens: what they look like, the file that holds them, and where a process finds its own.

A token is a shared secret that every caller of a coordination server must present. A token file is text, one
token a line, with what there is to say about it behind it:

```
# Comments and empty lines are skipped. The defaults: role=worker, no name, no end.
q0Zb...43 characters...                                  # a line may end in a comment
7Yw1...        role=viewer  name=dashboard  expires=2027-01-31
```

A server accepts every token of its file that has not expired; a client shows the first one. Roles are
`viewer` (may read the state of clusters), `worker` (may do all that a member of a cluster does, and read) and
`admin` (may do everything). `expires` is a day or an instant in UTC, `2027-01-31T18:00:00Z`; `cluster=NAME`,
which may be repeated, binds a token to clusters.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dmesh._log import logger
from dmesh.errors import ConfigurationError

ADVICE = "generate one with `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
"""Advice on making a good token."""

SHORTEST = 16
"""Characters that a token must have where a server accepts it: a shorter one could be guessed."""
_LONGEST = 4096
_LARGEST_FILE = 1 << 20
_LONGEST_NAME = 128
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")


class Role(enum.IntEnum):
    """Permissions of a token's holder. A greater role may do all that a smaller one may."""

    VIEWER = 1
    """Read the state of clusters."""
    WORKER = 2
    """All that a member does: take a task slot, meet at barriers, use the key-value store."""
    ADMIN = 3
    """Everything, such as putting a member out of its cluster."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token and its attributes. Its `repr` does not show the secret."""

    value: str = field(repr=False)
    """The secret itself: printable ASCII without spaces."""
    role: Role = Role.WORKER
    """Permissions of its holder."""
    name: str = ""
    """Name for logs."""
    expires: float | None = None
    """Unix time from which on it is worth nothing; None for never."""
    clusters: frozenset[str] = frozenset()
    """Clusters that it is bound to; empty: all of the server."""
    id: str = ""
    """Id of a token that the server has issued; empty for one of its file."""

    def covers(self, cluster: str) -> bool:
        """Returns whether it is good for a cluster."""
        return not self.clusters or cluster in self.clusters

    @property
    def label(self) -> str:
        """Name for people and logs: the fingerprint, and the name if it has one."""
        return f"token {self.fingerprint}" + (f" ({self.name})" if self.name else "")

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits by which logs tell tokens apart; they do not help to find the token."""
        return fingerprint(self.value)

    def expired(self, now: float) -> bool:
        """Returns whether it is worth nothing any more at the unix time `now`."""
        return self.expires is not None and now >= self.expires


def fingerprint(value: str) -> str:
    """Returns eight hexadecimal digits by which logs tell tokens apart."""
    return hashlib.sha256(b"dmesh token\0" + value.encode(errors="surrogateescape")).hexdigest()[:8]


def generate() -> str:
    """Returns a new token of 256 random bits."""
    return secrets.token_urlsafe(32)


def is_name(text: str) -> bool:
    """Returns whether a text can be the name of a token or of a cluster that one is bound to."""
    return 0 < len(text) <= _LONGEST_NAME and set(text) <= _NAME_CHARACTERS


def is_printable(value: str) -> bool:
    """Returns whether a text can travel as a token: printable ASCII, no spaces, not too long."""
    return value.isascii() and value.isprintable() and " " not in value and len(value) <= _LONGEST


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Origin of a process's tokens. Can be read again, because files are replaced."""

    origin: str
    """Name of the origin, for people: `DMESH_TOKEN`, `DMESH_TOKEN_FILE (/path)`."""
    path: Path | None = None
    """The file, if it is one."""
    value: str | None = field(default=None, repr=False)
    """The token itself, if it is not a file."""

    def read(self) -> tuple[Token, ...]:
        """Returns the tokens, at least one.

        Raises:
            ConfigurationError: The file cannot be read, or is not a token file.
        """
        if self.path is not None:
            return read_file(self.path, self.origin)
        value = self.value or ""
        if not value or not is_printable(value):
            raise ConfigurationError(
                f"{self.origin} (not shown) has a space or a character that is not printable ASCII, or more "
                f"than {_LONGEST} characters. Expected letters, digits and punctuation; {ADVICE}"
            )
        return (Token(value),)


def find(
    token: str | None, token_file: str | None, environ: Mapping[str, str] | None = None
) -> TokenSource | None:
    """Finds out where a process has its token from: `DMESH_TOKEN`, `DMESH_TOKEN_FILE`, the default path.

    Args:
        token: The value of `DMESH_TOKEN`, if it is set.
        token_file: The value of `DMESH_TOKEN_FILE`, if it is set.
        environ: Where the default path comes from; the process's environment if None.

    Returns:
        The first one that is set; None if none is, and there is no file at the default path. A file that is
        named but cannot be read is an error when it is read; nothing else is taken in its place.
    """
    if token:
        return TokenSource("DMESH_TOKEN", value=token)
    if token_file:
        path = Path(token_file)
        return TokenSource(f"DMESH_TOKEN_FILE ({path})", path)
    default = default_path(environ)
    # A dangling link counts as existing: it was meant to be a token file.
    return TokenSource(str(default), default) if default is not None and os.path.lexists(default) else None


def default_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns `${XDG_CONFIG_HOME:-~/.config}/dmesh/token`; None if there is no home directory."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CONFIG_HOME", "")
    if base and Path(base).is_absolute():  # the XDG specification: what is relative is to be ignored
        return Path(base) / "dmesh" / "token"
    try:
        return Path.home() / ".config" / "dmesh" / "token"
    except RuntimeError:
        return None


def read_file(path: Path, origin: str) -> tuple[Token, ...]:
    """Reads a token file.

    Args:
        path: The file.
        origin: How errors name it.

    Raises:
        ConfigurationError: It cannot be read or understood. Neither errors nor log lines have its content.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"{origin} is not a file; expected a token file")
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(
            f"the token file {origin} cannot be read: {error.strerror}. Correct its name or its permissions; "
            "no other token is tried in its place"
        ) from error
    if len(content) > _LARGEST_FILE:
        raise ConfigurationError(f"{origin} has more than {_LARGEST_FILE} bytes: it is not a token file")
    if status.st_mode & 0o077:
        logger.warning(
            "other users may read the token file %s (mode %o); chmod 600 it",
            origin,
            stat.S_IMODE(status.st_mode),
        )
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"{origin} has characters that are not ASCII: it is not a token file"
        ) from None
    found = tuple(_parse(text, origin))
    if not found:
        raise ConfigurationError(f"{origin} has no token; put one in the first line: {ADVICE}")
    return found


def create_file(path: Path, role: Role = Role.WORKER) -> None:
    """Makes a token file with one new token, unless there is one already. Only its owner may read it.

    Raises:
        ConfigurationError: It cannot be written.
    """
    content = (
        "# dmesh token: whoever can read it can join and end this server's clusters. One token a line;\n"
        "# behind it may stand role=viewer|worker|admin name=NAME expires=2027-01-31. Changes count.\n"
        f"{generate()} role={role.name.lower()}\n"
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        import tempfile  # imports shutil and compression libraries, which are needed only to create a token

        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".token-")  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Readers see a complete file, and one of two concurrent creators wins.
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise ConfigurationError(
            f"the token file {path} cannot be created: {error.strerror}. Set DMESH_TOKEN or "
            "DMESH_TOKEN_FILE, "
            "or XDG_CONFIG_HOME to a directory that is writable"
        ) from error


def _parse(text: str, origin: str) -> Iterator[Token]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"line {number} of {origin}"
        if not is_printable(words[0]):
            raise ConfigurationError(f"{where} (not shown) does not begin with a token; {ADVICE}")
        role, name, expires, clusters = Role.WORKER, "", None, set[str]()
        for word in words[1:]:
            if word.startswith("#"):
                break
            key, _, value = word.partition("=")
            if key == "role" and value.upper() in Role.__members__:
                role = Role[value.upper()]
            elif key == "name" and is_name(value):
                name = value
            elif key == "cluster" and is_name(value):
                clusters.add(value)
            elif key == "expires":
                expires = _instant(value, where)
            else:
                # Not shown: it may be a second token in the same line.
                raise ConfigurationError(
                    f"{where} has text after its token (not shown) that is not one of role=viewer, "
                    "role=worker, role=admin, name=NAME, cluster=NAME (letters, digits, _ . -) and "
                    "expires=DATE"
                )
        yield Token(words[0], role, name, expires, frozenset(clusters))


def _instant(text: str, where: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"{where}: the date after expires= is invalid; expected 2027-01-31 or 2027-01-31T18:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()

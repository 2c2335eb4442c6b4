"""Tuning of collectives between hosts: the sizes at which one algorithm becomes faster than another.

The shipped defaults are good for most machines. `dmesh tune` measures, and writes a file of a few lines:

```
{
  "format": 2,
  "flat": 65536,
  "piece": 0,
  "rows": 524288,
  "message_flat": 32768,
  "message_tree": 65536,
  "streams": 1,
  "latency": 60000,
  "message": 25000,
  "byte": 700,
  "local": 300,
  "connection": 20000,
  "folding": "host"
}
```

Only `rows` and `folding` change results: they decide in which order floating-point numbers are folded (see
`dmesh.collectives.backends.hierarchical` and `dmesh.collectives.schedules`). All members of a group use the
values of its first member.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmesh.config.settings import FOLDINGS as FOLDINGS  # part of this module's interface
from dmesh.errors import ConfigurationError
from dmesh.security import tokens

_FORMAT = 2
_LARGEST_FILE = 4096
_ADVICE = "make one with `dmesh tune`, or set DMESH_TUNING to 0 for the shipped defaults"

MOST_BYTES = 2**48
"""Limit of values that have no other limit: larger than any array."""
LARGEST_PIECE = 4 * 1024 * 1024
"""Largest `piece`: a group keeps two for each member."""
MOST_STREAMS = 8
"""Largest `streams`; `DMESH_STREAMS` of client/native/core/tcp.h."""
SEND_BUFFER = 16 * 1024
"""Largest `send`, in bytes, that may return before the receiver's `recv`; a larger one waits for it.

On shared memory, dedicated connections and messages alike, so that a program whose ranks send to each other
before they receive behaves the same everywhere."""
MOST_COST = 10**9
"""Limit of the fields of the cost model."""
LEAST_ROWS = 64
"""Smallest `rows`: each rank of a host has some elements to fold."""
_LIMITS = {
    "flat": (0, MOST_BYTES),
    "piece": (0, LARGEST_PIECE),
    "rows": (LEAST_ROWS, MOST_BYTES),
    "message_flat": (0, MOST_BYTES),
    "message_tree": (0, MOST_BYTES),
    "streams": (1, MOST_STREAMS),
    "latency": (0, MOST_COST),
    "message": (0, MOST_COST),
    "byte": (0, MOST_COST),
    "local": (0, MOST_COST),
    "connection": (0, MOST_COST),
}
_SINCE_2 = ("latency", "message", "byte", "local", "connection", "folding")
"""Fields that files of format 1 do not have."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds for dedicated connections and messages, in bytes, and connections for each pair of ranks.

    Raises:
        ConfigurationError: A value is out of its range; names the field.
    """

    flat: int = 64 * 1024
    """Bytes that one rank sends in all, up to which an all-reduce, a reduce or a broadcast takes one step,
    in which whole arrays travel; 0 for never. Arrays larger than a piece take two in any case."""
    piece: int = 0
    """Bytes of the pieces in which arrays travel, a multiple of 64; 0 to choose
    them by the number of members."""
    rows: int = 512 * 1024
    """Bytes for each rank of a host from which on collectives are hierarchical, where the group has that:
    intra-host in shared memory, inter-host over dedicated connections."""
    message_flat: int = 32 * 1024
    """Bytes of an array up to which an all-reduce or a reduce by messages takes one step; 0 for never.
    Beyond it, bandwidth costs more than steps."""
    message_tree: int = 64 * 1024
    """Bytes of an array up to which a broadcast by messages goes whole through a binomial tree; 0 for never.
    Larger ones are dealt out, and exchanged."""
    streams: int = 1
    """Dedicated connections between each pair of ranks: more are faster where a network limits the bandwidth
    of one connection. Arrays of one piece use only one."""
    latency: int = 60_000
    """Messages: nanoseconds from the begin of a send until the receiver goes on. With the next four, the cost
    model by which groups of more than 16 ranks choose schedules (`schedules.cost`)."""
    message: int = 25_000
    """Nanoseconds of processor time for each message."""
    byte: int = 700
    """Picoseconds for each byte that is sent."""
    local: int = 300
    """Picoseconds for each byte that is folded or copied."""
    connection: int = 20_000
    """Nanoseconds that a call may be slower if it needs one peer less."""
    folding: str = "host"
    """Order in which contributions are folded: `rank` for that of ranks in every call of every size; `host`
    for the same, but large all-reduces of several hosts are folded host by host; `any` for what is fastest,
    so that in groups of more than 16 ranks the order depends on the size of the array."""

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigurationError(
                    f"{name} is {_shown(value)}; expected a whole number from {least} to {most}"
                )
        if self.folding not in FOLDINGS:
            raise ConfigurationError(
                f"folding is {_shown(self.folding)}; expected one of {', '.join(FOLDINGS)}"
            )
        if self.piece % 64:
            raise ConfigurationError(f"piece is {self.piece}; expected a multiple of 64")

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


SHIPPED = Tuning()
"""Shipped defaults."""


def find(named: str | None, environ: Mapping[str, str] | None = None) -> Tuning:
    """Return this process's tuning.

    Args:
        named: The value of `DMESH_TUNING`: a file, or 0 for the shipped defaults; None if it is not set.
        environ: Environment with the default path; the process's environment if None.

    Raises:
        ConfigurationError: The file cannot be read or understood, or it was named and is not there.
    """
    if named == "0":
        return SHIPPED
    if named is not None:
        return read(Path(named), f"DMESH_TUNING ({named})")
    default = default_path(environ)
    # A broken link counts as a file, so that reading it is an error: it was meant to be a tuning file.
    return SHIPPED if default is None or not os.path.lexists(default) else read(default)


def default_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return `${XDG_CONFIG_HOME:-~/.config}/dmesh/tuning.json`; None if there is no home directory."""
    token = tokens.default_path(environ)
    return None if token is None else token.with_name("tuning.json")


def read(path: Path, origin: str | None = None) -> Tuning:
    """Read a file, which errors call `origin`, or by its path.

    Raises:
        ConfigurationError: It cannot be read or understood; names the file, and the field if it is one.
    """

    def refusal(what: str) -> ConfigurationError:
        return ConfigurationError(f"the tuning file {origin or path}{what}; {_ADVICE}")

    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refusal(" is not a file")
            content = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise refusal(f" cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(content) > _LARGEST_FILE:
        raise refusal(f" has more than {_LARGEST_FILE} bytes")
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers or nesting beyond all bounds
        raise refusal(f" is not JSON as expected: {error}") from error
    if not isinstance(found, dict):
        raise refusal(" is not a JSON object")
    version = found.get("format")
    if version == 1 and type(version) is int:  # it has none of the fields that are newer
        found = {**{name: getattr(SHIPPED, name) for name in _SINCE_2}, **found}
    expected = {"format", "folding", *_LIMITS}
    for what, names in (
        (" has no field", expected - found.keys()),
        (" has a field", found.keys() - expected),
    ):
        if names:
            raise refusal(f"{what} {_shown(min(names))}; expected {', '.join(sorted(expected))}")
    version = found.pop("format")
    if type(version) is not int or version not in (1, _FORMAT):
        raise refusal(f": its format is {_shown(version)}; this version of dmesh knows 1 and {_FORMAT}")
    try:
        return Tuning(**found)
    except ConfigurationError as error:
        raise refusal(f": {error}") from None


def write(path: Path, tuning: Tuning) -> None:
    """Write a file atomically: readers find the new content, or the old one.

    Raises:
        ConfigurationError: It cannot be written.
    """
    content = json.dumps({"format": _FORMAT, **asdict(tuning)}, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the tuning file {path} cannot be written: {error.strerror}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the field {_shown(name)} is there twice")
    return dict(pairs)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

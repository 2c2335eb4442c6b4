"""The instructions that a schedule is made of: what one rank sends, receives, copies and folds.

A program is pure data. It names peers by their position in the group, memory by buffer and element range, and
messages by step; it knows nothing of arrays, dtypes, sockets or time. Executed on every rank of a group, the
programs of one collective bring every element where it belongs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Buffer(enum.Enum):
    """A piece of memory of the rank that runs the program."""

    INPUT = "input"
    """The caller's array; read only."""
    STAGE = "stage"
    """Room for what peers contribute; elements of the input's dtype."""
    ACCUMULATOR = "accumulator"
    """Accumulator of the fold; elements of the reduction's accumulator dtype."""
    OUTPUT = "output"
    """The result."""
    TOKEN = "token"  # noqa: S105 - the small thing that is passed on, not a password
    """Bytes without a meaning; only their arrival counts."""

    __hash__ = object.__hash__  # an enum's own is slow, and hashes its members' names


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` of a buffer."""

    buffer: Buffer
    """Buffer that the elements are in."""
    start: int
    """First element."""
    stop: int
    """One past the last element."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Send:
    """Begin of a send. The slice must not change before a `Flush` or until the peer has answered."""

    peer: int
    """Position of the receiver."""
    step: int
    """Number of the message; both sides use the same, once for each pair and direction."""
    source: Slice
    """Slice to send."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Begin of a receive into a slice."""

    peer: int
    """Position of the sender."""
    step: int
    """Number of the message."""
    into: Slice
    """Slice to receive into."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for receives to complete."""

    receives: tuple[int, ...]
    """Numbers of the program's `Receive` instructions, in their order, from 0."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until the memory of all sends may be overwritten."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of elements between buffers of the same dtype."""

    source: Slice
    """From here."""
    into: Slice
    """To here."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold of a rank's contribution into the accumulator. Contributions are folded in the order of ranks."""

    source: Slice
    """The contribution."""
    into: Slice
    """The part of the accumulator; as long as `source`."""
    first: bool
    """True for the first contribution, which replaces what the accumulator held."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Conversion of the accumulator into the result: division of a mean, rounding of a short float."""

    source: Slice
    """The part of the accumulator."""
    into: Slice
    """Slice for the result; as long as `source`."""


Instruction = Send | Receive | Await | Flush | Copy | Fold | Finish


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions of one rank for one collective."""

    instructions: tuple[Instruction, ...]
    """In their order. When the last has been executed, a final flush ends the collective."""
    sizes: Mapping[Buffer, int]
    """Number of elements of each buffer that the program uses; unused buffers are missing."""
    accumulates_into: Slice | None = None
    """The part of the output that the whole accumulator becomes, if it is one."""

    def size(self, buffer: Buffer) -> int:
        """Return the number of elements of a buffer that the program uses."""
        return self.sizes.get(buffer, 0)


class Builder:
    """Builder of a program, phase by phase.

    Each phase takes the next free step numbers, so that phases of all ranks must be written in the same order
    and use as many steps, whatever a rank itself has to do in them.
    """

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._receives = 0
        self._step = 0
        self._tokens = 0

    def steps(self, count: int = 1) -> int:
        """Reserve step numbers; returns the first."""
        first = self._step
        self._step += count
        return first

    def token(self) -> Slice:
        """Reserve a byte to receive a token into."""
        self._tokens += 1
        return Slice(Buffer.TOKEN, self._tokens, self._tokens + 1)

    def send(self, peer: int, step: int, source: Slice) -> None:
        """Add a `Send`; none if there is nothing to send."""
        if source:
            self._instructions.append(Send(peer, step, source))

    def receive(self, peer: int, step: int, into: Slice) -> tuple[int, ...]:
        """Add a `Receive` and returns what to await; nothing if there is nothing to receive."""
        if not into:
            return ()
        self._instructions.append(Receive(peer, step, into))
        self._receives += 1
        return (self._receives - 1,)

    def wait(self, receives: Iterable[int]) -> None:
        """Add an `Await`, if there is something to await."""
        receives = tuple(receives)
        if receives:
            self._instructions.append(Await(receives))

    def add(self, instruction: Flush | Copy | Fold | Finish) -> None:
        """Add an instruction that concerns this rank alone."""
        self._instructions.append(instruction)

    def build(self, **sizes: int) -> Program:
        """Return the program.

        Args:
            **sizes: Elements of each buffer, by its name in lower case.
        """
        known = {Buffer(name): size for name, size in sizes.items() if size}
        if self._tokens or any(_uses_token(item) for item in self._instructions):
            known[Buffer.TOKEN] = self._tokens + 1
        finishes = [item for item in self._instructions if isinstance(item, Finish)]
        whole = len(finishes) == 1 and len(finishes[0].source) == known[Buffer.ACCUMULATOR]
        return Program(tuple(self._instructions), known, finishes[0].into if whole else None)


def _uses_token(instruction: Instruction) -> bool:
    return isinstance(instruction, Send) and instruction.source.buffer is Buffer.TOKEN


TOKEN = Slice(Buffer.TOKEN, 0, 1)
"""The byte that is sent as a token."""


def input_slice(start: int, stop: int) -> Slice:
    """Elements of the input."""
    return Slice(Buffer.INPUT, start, stop)


def output_slice(start: int, stop: int) -> Slice:
    """Elements of the output."""
    return Slice(Buffer.OUTPUT, start, stop)


def stage_slice(start: int, stop: int) -> Slice:
    """Elements of the stage."""
    return Slice(Buffer.STAGE, start, stop)


def bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of part `index` of `count` elements that are cut into nearly equal parts."""
    return index * count // parts, (index + 1) * count // parts

"""Executes the programs of all ranks without threads, sockets or arrays, in an order that a test chooses.

A message is read from its sender's memory as late as possible, when the receiver is served, so that memory
which is written to while a message of it is under way shows as a wrong result. Elements are values; a fold
makes a pair of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dmesh.collectives.schedules.program import (
    Await,
    Buffer,
    Copy,
    Finish,
    Flush,
    Fold,
    Program,
    Receive,
    Send,
    Slice,
)


class Deadlock(AssertionError):
    """No rank can go on, and not all are at their end."""


def contributed(value: Any) -> int:
    """How many contributions are folded in a value."""
    return sum(map(contributed, value)) if isinstance(value, tuple) else 1


class Rank:
    def __init__(self, program: Program, source: Sequence[Any], in_place: bool) -> None:
        self.instructions = list(program.instructions)
        self.at = 0
        self.receives: list[tuple[tuple[int, int], Slice]] = []
        self.arrived: set[tuple[int, int]] = set()
        self.unflushed: set[tuple[int, int]] = set()
        self.memory: dict[Buffer, list[Any]] = {buffer: [None] * program.size(buffer) for buffer in Buffer}
        self.memory[Buffer.INPUT] = list(source)
        if in_place:
            self.memory[Buffer.OUTPUT] = self.memory[Buffer.INPUT]
        self.accumulator = None if in_place else program.accumulates_into
        if self.memory[Buffer.TOKEN]:
            self.memory[Buffer.TOKEN][0] = "token"

    def place(self, part: Slice) -> Slice:
        """Where a slice is: the accumulator may be a part of the output."""
        if part.buffer is not Buffer.ACCUMULATOR or self.accumulator is None:
            return part
        start = self.accumulator.start
        return Slice(self.accumulator.buffer, start + part.start, start + part.stop)

    def read(self, part: Slice) -> list[Any]:
        part = self.place(part)
        assert 0 <= part.start <= part.stop <= len(self.memory[part.buffer]), part
        return self.memory[part.buffer][part.start : part.stop]

    def write(self, part: Slice, values: Sequence[Any]) -> None:
        part = self.place(part)
        assert 0 <= part.start <= part.stop <= len(self.memory[part.buffer]), part
        assert len(values) == len(part)
        self.memory[part.buffer][part.start : part.stop] = values

    @property
    def over(self) -> bool:
        return self.at == len(self.instructions) and not self.unflushed


def simulate(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    choose: Callable[[int], int],
    in_place: bool = False,
) -> list[list[Any]]:
    """Runs the programs of all ranks; returns their outputs.

    Args:
        programs: By position.
        inputs: By position.
        choose: Picks one of n things that could happen next.
        in_place: Whether input and output are the same memory.
    """
    ranks = [Rank(program, source, in_place) for program, source in zip(programs, inputs, strict=True)]
    sends: dict[tuple[int, int, int], Slice] = {}
    posted: dict[tuple[int, int, int], Slice] = {}
    used: set[tuple[str, int, int, int]] = set()

    def execute(position: int) -> Callable[[], None] | None:
        """Returns what the rank would do next; None if it must wait."""
        rank = ranks[position]
        if rank.at == len(rank.instructions):
            return None
        item = rank.instructions[rank.at]

        def act() -> None:
            rank.at += 1
            match item:
                case Send(peer, step, source):
                    assert peer != position
                    key = (position, peer, step)
                    assert ("send", *key) not in used, "a step is used once for each pair and direction"
                    used.add(("send", *key))
                    sends[key] = source
                    rank.unflushed.add((peer, step))
                case Receive(peer, step, into):
                    assert peer != position
                    key = (peer, position, step)
                    assert ("receive", *key) not in used, "a step is used once for each pair and direction"
                    used.add(("receive", *key))
                    posted[key] = into
                    rank.receives.append(((peer, step), into))
                case Copy(source, into):
                    rank.write(into, rank.read(source))
                case Fold(source, into, first):
                    values = rank.read(source)
                    rank.write(into, values if first else list(zip(rank.read(into), values, strict=True)))
                case Finish(source, into, contributions):
                    assert all(contributed(value) == contributions for value in rank.read(source))
                    rank.write(into, [("folded", value) for value in rank.read(source)])

        match item:
            case Await(numbers):
                if not all(rank.receives[number][0] in rank.arrived for number in numbers):
                    return None
            case Flush():
                if rank.unflushed:
                    return None
        return act

    def deliver(key: tuple[int, int, int]) -> Callable[[], None]:
        def act() -> None:
            source, target, step = key
            ranks[target].write(posted.pop(key), ranks[source].read(sends.pop(key)))
            ranks[target].arrived.add((source, step))
            ranks[source].unflushed.discard((target, step))

        return act

    while True:
        possible = [act for position in range(len(ranks)) if (act := execute(position)) is not None]
        possible += [deliver(key) for key in sorted(sends.keys() & posted.keys())]
        if not possible:
            break
        possible[choose(len(possible))]()
    if not all(rank.over for rank in ranks):
        raise Deadlock([(i, rank.instructions[rank.at :]) for i, rank in enumerate(ranks) if not rank.over])
    assert not sends
    assert not posted, "every message that is waited for is sent"
    return [rank.memory[Buffer.OUTPUT] for rank in ranks]

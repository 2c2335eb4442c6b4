"""Runs a program on real arrays: the only place where schedules, arrays and channels meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.algorithms.program import (
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
from dmesh.collectives.reduction import Reduction
from dmesh.collectives.transport.base import Completion


class Link(Protocol):
    """How a running collective reaches its peers, and waits for them with a limit."""

    def send(self, rank: int, step: int, data: memoryview) -> None:
        """Starts to send."""

    def receive(self, rank: int, step: int, into: memoryview) -> Completion:
        """Starts to receive."""

    def wait(self, completions: Sequence[Completion]) -> None:
        """Waits until all are complete."""

    def flush(self) -> None:
        """Waits until the memory of all sends may be written to."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The buffers of one execution, each a one-dimensional array."""

    arrays: dict[Buffer, NDArray[Any]]
    """By buffer; those that the program does not use may be missing."""

    @classmethod
    def allocate(
        cls,
        program: Program,
        source: NDArray[Any] | None,
        result: NDArray[Any],
        reduction: Reduction | None,
        *,
        aliased: bool,
    ) -> Memory:
        """Provides what a program needs beside the caller's arrays.

        Args:
            program: The program.
            source: The input, flat; None if this rank has none.
            result: The output, flat.
            reduction: What folds, if anything does.
            aliased: Whether input and output are the same memory.
        """
        arrays = {Buffer.OUTPUT: result}
        if source is not None:
            arrays[Buffer.INPUT] = source
        if size := program.size(Buffer.TOKEN):
            arrays[Buffer.TOKEN] = np.zeros(size, np.uint8)
        if reduction is not None and (size := program.size(Buffer.ACCUMULATOR)):
            if stage := program.size(Buffer.STAGE):
                arrays[Buffer.STAGE] = np.empty(stage, reduction.wire)
            place = program.accumulates_into
            if place is not None and reduction.accumulator == result.dtype and not aliased:
                arrays[Buffer.ACCUMULATOR] = result[place.start : place.stop]
            else:
                arrays[Buffer.ACCUMULATOR] = np.empty(size, reduction.accumulator)
        return cls(arrays)

    def elements(self, part: Slice) -> NDArray[Any]:
        """Returns a slice as an array."""
        return self.arrays[part.buffer][part.start : part.stop]

    def octets(self, part: Slice) -> memoryview:
        """Returns a slice as bytes, without a copy."""
        # Through uint8, because many dtypes (bfloat16, datetime64) have no buffer of their own.
        return self.elements(part).view(np.uint8).data


def run(
    program: Program, memory: Memory, ranks: Sequence[int], link: Link, reduction: Reduction | None
) -> None:
    """Executes a program.

    Args:
        program: What to do.
        memory: Its buffers.
        ranks: The rank at each position of the group.
        link: The way to the peers; not touched by a program without peers.
        reduction: What folds, if anything does.
    """
    receives: list[Completion] = []
    sent = False
    for item in program.instructions:
        match item:
            case Send(peer, step, source):
                link.send(ranks[peer], step, memory.octets(source))
                sent = True
            case Receive(peer, step, into):
                receives.append(link.receive(ranks[peer], step, memory.octets(into)))
            case Await(numbers):
                link.wait([receives[number] for number in numbers])
            case Flush():
                if sent:
                    link.flush()
                sent = False
            case Copy(source, into):
                _copy(memory.elements(source), memory.elements(into))
            case Fold(source, into, first):
                assert reduction is not None
                reduction.fold(memory.elements(source), memory.elements(into), first)
            case Finish(source, into):
                assert reduction is not None
                accumulator, result = memory.elements(source), memory.elements(into)
                shared = accumulator.dtype == result.dtype and _same_memory(accumulator, result)
                reduction.finish(accumulator, accumulator if shared else result, len(ranks))
    if sent:
        link.flush()


def _copy(source: NDArray[Any], into: NDArray[Any]) -> None:
    # As bytes: NumPy would convert structured elements field by field, and leave out their padding.
    if not _same_memory(source, into):
        into.view(np.uint8)[...] = source.view(np.uint8)


def _same_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    # Two parts of buffers are the same or have nothing in common, so that their bounds tell.
    return np.may_share_memory(a, b)

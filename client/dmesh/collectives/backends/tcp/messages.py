"""Message backend: runs a schedule of sends, receives and folds over the channels of a transport.

Every group has it, so every call can be carried out: a group's first call, arrays and sizes that the other
backends do not support, groups whose connections are encrypted, and groups without the native core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.tcp.exchange import Attempt, Waits, all_of
from dmesh.collectives.backends.tcp.transport import Channel, Completion, Transport
from dmesh.collectives.request import Buffers, Reduction, Request
from dmesh.collectives.schedules import (
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
    select,
)
from dmesh.collectives.tuning import SEND_BUFFER, SHIPPED, Tuning

Connects = Callable[[Channel], Waits[Tuning]]
"""Capability exchange of a group's first call: returns the group's tuning."""


class MessageBackend(Backend):
    """Schedules over messages.

    Args:
        transport: Carries the messages; unused in a group of one.
        ranks: The group's members, by position.
        rank: This client's position.
        generation: Number of the generation.
        connects: Capability exchange; used once, in the first collective. None if there is none.
    """

    name = "messages"
    capabilities = Capabilities(
        media="framed messages over TCP, encrypted if the cluster says so",
        arrays="NumPy",
        operations="all",
        dtypes="all of fixed size",
        condition="always",
    )

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        rank: int,
        generation: int,
        connects: Connects | None,
    ) -> None:
        self.tuning: Tuning = SHIPPED
        """Tuning by which schedules are chosen; until the first call is over, the shipped one."""
        self._transport = transport
        self._ranks = ranks
        self._rank = rank
        self._generation = generation
        self._connects = connects

    def between(self, ranks: tuple[int, ...], rank: int) -> MessageBackend:
        """Return a backend for messages between some of the members."""
        return MessageBackend(self._transport, ranks, rank, self._generation, None)

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the arrays are NumPy's; see `Backend.supports`."""
        return request.device is None

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Open the channel of the call and run its schedule; see `Backend.start`."""
        # A transfer's ranks may have heard of the group's tuning at different times: its schedule needs none.
        stream = call.stream
        program = select(
            request.kind,
            len(self._ranks),
            self._rank,
            request.count,
            request.nbytes_per_rank,
            root=request.root,
            pairs=request.pairs,
            contributes=request.contributes,
            flat=self.tuning.message_flat,
            tree=self.tuning.message_tree,
            send_buffer=SEND_BUFFER,
        )
        memory = Memory.allocate(program, request, buffers)
        channel: Channel | None = None
        connects: Connects | None = None
        if len(self._ranks) > 1:
            channel = self._transport.open(
                stream.number, call.sequence, request.text.encode(), self._generation
            )
            if call.sequence == 1 and stream.pair is None:
                connects, self._connects = self._connects, None
        steps = run(program, memory, self._ranks, channel, request.reduction)
        if connects is not None:
            assert channel is not None
            steps = self._connect_first(connects, channel, steps)
        return MessageOperation(channel, steps)

    def _connect_first(self, connects: Connects, channel: Channel, steps: Waits[None]) -> Waits[None]:
        # All members begin with the shipped tuning: the schedule of this call was chosen by it.
        self.tuning = yield from connects(channel)
        yield from steps


class MessageOperation(Operation):
    """A schedule under way; see `Operation`.

    Args:
        channel: Channel of the call; None in a group of one.
        steps: Yields what is waited for.
    """

    def __init__(self, channel: Channel | None, steps: Waits[None]) -> None:
        self._channel = channel
        self._steps = steps
        self._attempt: Attempt | None = None
        self._begun = False

    def progress(self, seconds: float) -> bool:
        """Go on with the schedule; see `Operation.progress`."""
        if not self._begun:
            self._begun = True
            self._attempt = next(self._steps, None)
        deadline = time.monotonic() + seconds
        while (attempt := self._attempt) is not None:
            if not attempt(max(deadline - time.monotonic(), 0.0)):
                return False
            self._attempt = next(self._steps, None)
        return True

    def missing(self) -> tuple[int, ...]:
        """Return the ranks whose messages are missing."""
        return () if self._channel is None else self._channel.waiting_for()

    def fail(self, error: BaseException) -> None:
        """Fail the channel."""
        if self._channel is not None:
            self._channel.fail(error)

    def revoke(self) -> None:
        """Close the channel: no memory is touched after that."""
        if self._channel is not None:
            self._channel.close()
        self._steps.close()


@dataclass(frozen=True, slots=True)
class Memory:
    """Buffers of one schedule, each a one-dimensional array."""

    arrays: dict[Buffer, NDArray[Any]] = field(default_factory=dict)
    """By buffer; those that the schedule does not use may be missing."""

    @classmethod
    def allocate(cls, program: Program, request: Request, buffers: Buffers) -> Memory:
        """Return the caller's buffers, and what the schedule needs beside them."""
        result = buffers.result
        if request.shape is None and program.size(Buffer.OUTPUT):  # this rank folds a part for the root
            result = np.empty(program.size(Buffer.OUTPUT), request.dtype)
        arrays = {Buffer.OUTPUT: result}
        if buffers.source is not None:
            arrays[Buffer.INPUT] = buffers.source
        if size := program.size(Buffer.TOKEN):
            arrays[Buffer.TOKEN] = np.zeros(size, np.uint8)
        reduction = request.reduction
        if reduction is not None and (size := program.size(Buffer.ACCUMULATOR)):
            if stage := program.size(Buffer.STAGE):
                arrays[Buffer.STAGE] = np.empty(stage, reduction.wire)
            place = program.accumulates_into
            if place is not None and reduction.accumulator == result.dtype and not buffers.in_place:
                arrays[Buffer.ACCUMULATOR] = result[place.start : place.stop]
            else:
                arrays[Buffer.ACCUMULATOR] = np.empty(size, reduction.accumulator)
        return cls(arrays)

    def elements(self, part: Slice) -> NDArray[Any]:
        """Return a slice as an array."""
        return self.arrays[part.buffer][part.start : part.stop]

    def octets(self, part: Slice) -> memoryview:
        """Return a slice as bytes, without a copy."""
        # Through uint8, because many dtypes (bfloat16, datetime64) have no buffer of their own.
        return self.elements(part).view(np.uint8).data


def run(
    program: Program,
    memory: Memory,
    ranks: Sequence[int],
    channel: Channel | None,
    reduction: Reduction | None,
) -> Waits[None]:
    """Execute a schedule.

    Args:
        program: What to do.
        memory: Its buffers.
        ranks: The rank at each position of the group.
        channel: Carries the messages; None for a schedule without peers.
        reduction: How contributions are folded, if they are.

    Yields:
        What is waited for.
    """
    receives: list[Completion] = []
    sent = False
    for item in program.instructions:
        match item:
            case Send(peer, step, source):
                assert channel is not None
                channel.send(ranks[peer], step, memory.octets(source))
                sent = True
            case Receive(peer, step, into):
                assert channel is not None
                receives.append(channel.receive(ranks[peer], step, memory.octets(into)))
            case Await(numbers):
                yield all_of(channel, [receives[number] for number in numbers])
            case Flush():
                if sent:
                    assert channel is not None
                    yield channel.flush
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
        assert channel is not None
        yield channel.flush


def _copy(source: NDArray[Any], into: NDArray[Any]) -> None:
    # As bytes: NumPy would convert structured elements field by field, and leave out their padding.
    if not _same_memory(source, into):
        into.view(np.uint8)[...] = source.view(np.uint8)


def _same_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    # Two parts of buffers are the same or have nothing in common, so that their bounds tell.
    return np.may_share_memory(a, b)

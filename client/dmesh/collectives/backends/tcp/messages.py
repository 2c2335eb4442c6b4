"""Message backend: runs a schedule of sends, receives and folds over the channels of a transport.

Every group has it, so every call can be carried out: calls that the other backends do not support, groups
whose connections are encrypted, and groups without the native core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives import schedules
from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.tcp.channel import Channel, Receive, Steps, Waits
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.request import Buffers, Reduction, Request
from dmesh.collectives.schedules import Buffer, Program, Slice
from dmesh.collectives.tuning import SEND_BUFFER, SHIPPED, Tuning


class MessageBackend(Backend):
    """Schedules over messages; a group of one sends none."""

    name = "messages"
    capabilities = Capabilities(
        media="framed messages over TCP, encrypted if the cluster says so",
        arrays="NumPy",
        operations="all",
        dtypes="all of fixed size",
        condition="always",
    )

    def __init__(self, transport: Transport, ranks: tuple[int, ...], rank: int, generation: int) -> None:
        self.tuning: Tuning = SHIPPED
        """Tuning by which schedules are chosen: the group's, once its first call has found it out."""
        self._transport = transport
        self._ranks = ranks
        self._rank = rank
        self._generation = generation

    def between(self, ranks: tuple[int, ...], rank: int) -> MessageBackend:
        """Return a backend for messages between some of the members."""
        return MessageBackend(self._transport, ranks, rank, self._generation)

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the arrays are NumPy's; see `Backend.supports`."""
        return request.device is None

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Open the channel of the call and run its schedule; see `Backend.start`."""
        # A transfer's ranks may have heard of the group's tuning at different times: its schedule needs none.
        elements = (request.count, request.nbytes_per_rank)
        roles = (request.root, request.pairs, request.contributes)
        limits = (self.tuning.message_flat, self.tuning.message_tree, SEND_BUFFER)
        program = schedules.select(request.kind, len(self._ranks), self._rank, *elements, *roles, *limits)
        memory = Memory(program, request, buffers)
        channel: Channel | None = None
        if len(self._ranks) > 1:
            number, signature = call.stream.number, request.text.encode()
            channel = self._transport.message_queue.open(number, call.sequence, signature, self._generation)
        return MessageOperation(channel, run(program, memory, self._ranks, channel, request.reduction))


class MessageOperation(Steps, Operation):
    """A schedule under way; see `Operation`."""


class Memory:
    """Buffers of one schedule, each a one-dimensional array: the caller's, and what the schedule needs."""

    def __init__(self, program: Program, request: Request, buffers: Buffers) -> None:
        result = buffers.result
        if request.shape is None and program.size(Buffer.OUTPUT):  # this rank folds a part for the root
            result = np.empty(program.size(Buffer.OUTPUT), request.dtype)
        self._arrays = arrays = {Buffer.OUTPUT: result}
        if buffers.source is not None:
            arrays[Buffer.INPUT] = buffers.source
        if size := program.size(Buffer.TOKEN):
            arrays[Buffer.TOKEN] = np.zeros(size, np.uint8)
        place, reduction = program.accumulates_into, request.reduction
        if place is not None and reduction is not None:
            arrays[Buffer.STAGE] = np.empty(program.size(Buffer.STAGE), reduction.wire)
            if reduction.accumulator == result.dtype and not buffers.in_place:
                arrays[Buffer.ACCUMULATOR] = result[place.start : place.stop]
            else:
                arrays[Buffer.ACCUMULATOR] = np.empty(len(place), reduction.accumulator)

    def elements(self, part: Slice) -> NDArray[Any]:
        """Return a slice as an array."""
        return self._arrays[part.buffer][part.start : part.stop]

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
    """Execute a schedule, with the rank at each position of the group; yields what is waited for."""
    # A program sends and receives only if there is a channel, and folds only if there is a reduction.
    carrier, folding = cast(Channel, channel), cast(Reduction, reduction)
    receives: list[Receive] = []
    sent = False
    for item in program.instructions:
        match item:
            case schedules.Send(peer, step, source):
                carrier.send(ranks[peer], step, memory.octets(source))
                sent = True
            case schedules.Receive(peer, step, into):
                receives.append(carrier.receive(ranks[peer], step, memory.octets(into)))
            case schedules.Await(numbers):
                yield partial(carrier.wait, [receives[number] for number in numbers])
            case schedules.Flush():
                if sent:
                    yield carrier.flush
                sent = False
            case schedules.Copy(source, into):
                # As bytes: NumPy would convert structured elements field by field, without their padding.
                if not _same_memory(memory.elements(source), memory.elements(into)):
                    memory.elements(into).view(np.uint8)[...] = memory.elements(source).view(np.uint8)
            case schedules.Fold(source, into, first):
                folding.fold(memory.elements(source), memory.elements(into), first)
            case schedules.Finish(source, into):
                accumulator, result = memory.elements(source), memory.elements(into)
                shared = accumulator.dtype == result.dtype and _same_memory(accumulator, result)
                folding.finish(accumulator, accumulator if shared else result, len(ranks))
    if sent:
        yield carrier.flush


def _same_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    # Two parts of buffers are the same or have nothing in common, so that their bounds tell.
    return np.may_share_memory(a, b)

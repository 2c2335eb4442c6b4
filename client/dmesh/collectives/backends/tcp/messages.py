"""Message backend: runs a schedule of sends, receives and folds over the channels of a transport.

Every group has it, so every call can be carried out: calls that the other backends do not support, groups
whose connections are encrypted, and groups without the native core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.tcp.channel import Channel, Receive, Steps, Waits
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.request import Buffers, Reduction, Request
from dmesh.collectives.schedules import program as programs
from dmesh.collectives.schedules.choice import select
from dmesh.collectives.schedules.cost import Model
from dmesh.collectives.schedules.program import Buffer, Program, Slice
from dmesh.collectives.tuning import SEND_BUFFER, SHIPPED, Tuning

_SECOND_STEPS = 1 << 16
"""First message number of a call's second request; the schedule of the first one has fewer messages."""


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
        self._kept: dict[tuple[int, int], Channel] = {}  # of calls with two requests, by stream and sequence

    def between(self, ranks: tuple[int, ...], rank: int) -> MessageBackend:
        """Return a backend for messages between some of the members."""
        return MessageBackend(self._transport, ranks, rank, self._generation)

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the arrays are NumPy's; see `Backend.supports`."""
        return request.device is None and (stream.pair is None or stream.pair[0] != stream.pair[1])

    def arrival(self, stream: Stream, sequence: int, seconds: float) -> tuple[str, int] | None:
        """Return the descriptor of a message that has come; see `Backend.arrival`."""
        if stream.uses_endpoint(sequence):
            return None
        found = next((text for number, text in self.waiting(stream.number) if number == sequence), None)
        return None if found is None else (found, 0)

    def waiting(self, stream: int) -> list[tuple[int, str]]:
        """Return number and descriptor of the messages of a stream that no receive has taken, in order."""
        found = self._transport.message_queue.waiting(stream, self._generation)
        return [(number, signature.decode("utf-8", "replace")) for number, signature in found]

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Open the channel of the call and run its schedule; see `Backend.start`."""
        # A transfer's ranks may have heard of the group's tuning at different times: its schedule needs none.
        elements = (request.count, request.nbytes_per_rank)
        roles = (request.root, request.pairs, request.contributes)
        tuning, reduction = self.tuning, request.reduction
        limits = (tuning.message_flat, tuning.message_tree, -1 if request.synchronous else SEND_BUFFER)
        model = Model(tuning.latency, tuning.message, tuning.byte, tuning.local, tuning.connection)
        undivided = reduction is not None and reduction.undivided
        pinned = tuning.folding != "any" or (reduction is not None and not reduction.commutative)
        more = (model, pinned, undivided, request.blocks)
        program = select(request.kind, len(self._ranks), self._rank, *elements, *roles, *limits, *more)
        memory = Memory(program, request, buffers)
        key = call.stream.number, call.sequence
        channel = self._kept.pop(key, None)
        first_step = _SECOND_STEPS if channel is not None else 0
        if channel is None and len(self._ranks) > 1:
            signature = request.text.encode()
            channel = self._transport.message_queue.open(*key, signature, self._generation)
        steps = run(program, memory, self._ranks, channel, request.reduction, first_step)
        keep = None
        if request.precedes and channel is not None:
            keep = partial(self._kept.__setitem__, key, channel)
        return MessageOperation(channel, steps, keep)

    def close(self, *, orderly: bool) -> None:
        """Close the channels of calls whose second request never came; see `Backend.close`."""
        del orderly
        while self._kept:
            self._kept.popitem()[1].close()


class MessageOperation(Steps, Operation):
    """A schedule under way; see `Operation`.

    `keep` takes the open channel, once the schedule is complete, for the second request of the call.
    """

    def __init__(
        self, channel: Channel | None, steps: Waits[None], keep: Callable[[], None] | None = None
    ) -> None:
        super().__init__(channel, steps)
        self._keep = keep

    def revoke(self) -> None:
        """Close the channel, unless the call goes on; see `Operation.revoke`."""
        keep, self._keep = self._keep, None
        if keep is not None and self.complete:
            keep()
        else:
            super().revoke()


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
        travels = request.dtype if reduction is None else reduction.wire
        # Zeros, for blocks that are padded to equal lengths: what a peer gets is never left over from before.
        arrays[Buffer.STAGE] = np.zeros(program.size(Buffer.STAGE), travels)
        arrays[Buffer.RELAY] = np.zeros(program.size(Buffer.RELAY), request.dtype)
        if (folded := program.size(Buffer.ACCUMULATOR)) and reduction is not None:
            arrays[Buffer.PARTIAL] = np.empty(program.size(Buffer.PARTIAL), reduction.accumulator)
            fits = place is not None and len(place) == folded and reduction.accumulator == result.dtype
            if place is not None and fits and not buffers.in_place:
                arrays[Buffer.ACCUMULATOR] = result[place.start : place.stop]
            else:
                arrays[Buffer.ACCUMULATOR] = np.empty(folded, reduction.accumulator)

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
    first_step: int = 0,
) -> Waits[None]:
    """Execute a schedule, with the rank at each position of the group; yields what is waited for.

    `first_step` is added to the numbers of its messages.
    """
    # A program sends and receives only if there is a channel, and folds only if there is a reduction.
    carrier, folding = cast(Channel, channel), cast(Reduction, reduction)
    receives: list[Receive] = []
    sent = False
    for item in program.instructions:
        match item:
            case programs.Send(peer, step, source):
                carrier.send(ranks[peer], first_step + step, memory.octets(source))
                sent = True
            case programs.Receive(peer, step, into):
                receives.append(carrier.receive(ranks[peer], first_step + step, memory.octets(into)))
            case programs.Await(numbers):
                yield partial(carrier.wait, [receives[number] for number in numbers])
            case programs.Flush():
                if sent:
                    yield carrier.flush
                sent = False
            case programs.Copy(source, into):
                # As bytes: NumPy would convert structured elements field by field, without their padding.
                if not _same_memory(memory.elements(source), memory.elements(into)):
                    memory.elements(into).view(np.uint8)[...] = memory.elements(source).view(np.uint8)
            case programs.Fold(source, into, first):
                folding.fold(memory.elements(source), memory.elements(into), first)
            case programs.Finish(source, into, contributions):
                accumulator, result = memory.elements(source), memory.elements(into)
                shared = accumulator.dtype == result.dtype and _same_memory(accumulator, result)
                folding.finish(accumulator, accumulator if shared else result, contributions)
    if sent:
        yield carrier.flush


def _same_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    # Two parts of buffers are the same or have nothing in common, so that their bounds tell.
    return np.may_share_memory(a, b)

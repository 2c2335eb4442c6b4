"""Message backend: runs a schedule of sends, receives and folds over the channels of a transport.

Every group has it, so every call can be carried out: a group's first call, arrays and sizes that the other
backends do not support, groups whose connections are encrypted, and groups without the native core. In a
group's first call, an `Exchange` finds out which other backends the group has.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives import schedules
from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.tcp.channel import Channel, Receive
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.request import Buffers, Reduction, Request
from dmesh.collectives.schedules import Buffer, Program, Slice
from dmesh.collectives.tuning import SEND_BUFFER, SHIPPED, Tuning

T = TypeVar("T")
Attempt = Callable[[float], bool]
"""Waits for something for at most so many seconds; True once it is there. Raises the channel's failure."""
Waits = Generator[Attempt, None, T]
"""Goes on whenever the attempt that it has yielded has succeeded."""
Connects = Callable[[Channel], Waits[Tuning]]
"""Capability exchange of a group's first call: returns the group's tuning."""
Counts = tuple[int, int]
"""Number of transfers to a member, and from it."""
_FIRST_STEP = 2**31
"""Number of an exchange's first message, far from the steps of schedules."""
_VERDICT = struct.Struct("!BQQ")
_ODD = struct.Struct("!i")


class MessageBackend(Backend):
    """Schedules over messages; a group of one has none. `connects` is used once, in the first collective."""

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
        elements = (request.count, request.nbytes_per_rank)
        roles = (request.root, request.pairs, request.contributes)
        limits = (self.tuning.message_flat, self.tuning.message_tree, SEND_BUFFER)
        program = schedules.select(request.kind, len(self._ranks), self._rank, *elements, *roles, *limits)
        memory = Memory(program, request, buffers)
        channel: Channel | None = None
        connects: Connects | None = None
        if len(self._ranks) > 1:
            stream, sequence, signature = call.stream, call.sequence, request.text.encode()
            channel = self._transport.message_queue.open(stream.number, sequence, signature, self._generation)
            if sequence == 1 and stream.pair is None:
                connects, self._connects = self._connects, None
        steps = run(program, memory, self._ranks, channel, request.reduction)
        return MessageOperation(channel, self._steps(connects, channel, steps))

    def _steps(self, connects: Connects | None, channel: Channel | None, steps: Waits[None]) -> Waits[None]:
        if connects is not None and channel is not None:
            # All members begin with the shipped tuning: the schedule of this call was chosen by it.
            self.tuning = yield from connects(channel)
        yield from steps


class MessageOperation(Operation):
    """A schedule under way; see `Operation`. A group of one has no channel."""

    def __init__(self, channel: Channel | None, steps: Waits[None]) -> None:
        self._channel = channel
        self._steps = steps
        self._attempt: Attempt | None = lambda seconds: True  # the schedule begins with the first progress

    def progress(self, seconds: float) -> bool:
        """Go on with the schedule; see `Operation.progress`."""
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """Outcome of `Exchange.agree`, the same on all members but for the counts."""

    level: int
    """The lowest level of any member."""
    against: int
    """First rank with that level."""
    sends_from: tuple[int, ...]
    """For each member, the number of the first transfer to it that neither has begun."""
    receives_from: tuple[int, ...]
    """The same for transfers from it."""


class Exchange:
    """Messages among members of a group in its first call, round by round; all members make the same rounds.

    `freeze` returns the counts for each member: no later transfer may begin before the group has chosen. It
    is None if transfers are none of this exchange's concern. `steps` are the step numbers of the messages.
    """

    def __init__(
        self,
        channel: Channel,
        ranks: Sequence[int],
        position: int,
        freeze: Callable[[], Sequence[Counts]] | None = None,
        steps: Iterator[int] | None = None,
    ) -> None:
        self.channel = channel
        self.ranks = ranks
        self.position = position
        self._freeze = freeze
        self._steps = steps or itertools.count(_FIRST_STEP)

    def among(self, positions: Sequence[int]) -> Exchange:
        """Return an exchange among some of the members, while all others make as many rounds."""
        ranks = [self.ranks[at] for at in positions]
        return Exchange(self.channel, ranks, positions.index(self.position), None, self._steps)

    def swap(self, messages: Sequence[bytes]) -> Waits[list[bytes]]:
        """Send each member a message, all of equal length; return the members' messages for this one."""
        channel, step = self.channel, next(self._steps)
        found = [bytearray(message) for message in messages]
        others = [(rank, at) for at, rank in enumerate(self.ranks) if at != self.position]
        receives = [channel.receive(rank, step, memoryview(found[at])) for rank, at in others]
        for rank, at in others:
            channel.send(rank, step, memoryview(messages[at]))
        yield partial(channel.wait, receives)
        yield channel.flush
        return [bytes(data) for data in found]

    def agree(self, level: int) -> Waits[Agreement]:
        """Find out how far all members go along; on level 0 a member does not."""
        counts = [(0, 0)] * len(self.ranks) if self._freeze is None else self._freeze()
        answers = yield from self.swap([_VERDICT.pack(level, *count) for count in counts])
        verdicts = [_VERDICT.unpack(answer) for answer in answers]
        levels = [theirs for theirs, _, _ in verdicts]
        pairs = list(zip(counts, verdicts, strict=True))
        return Agreement(
            min(levels),
            self.ranks[levels.index(min(levels))],
            sends_from=tuple(1 + max(sent, got) for (sent, _), (_, _, got) in pairs),
            receives_from=tuple(1 + max(got, sent) for (_, got), (_, sent, _) in pairs),
        )

    def find_odd(self, mine: bytes) -> Waits[int]:
        """Return the position of a member whose message is zero or differs from the others'; -1 if none does.

        All messages go to the first member, which answers: so large groups do not need all connections.
        """
        channel, ranks, others = self.channel, self.ranks, range(1, len(self.ranks))
        step, answer_step = next(self._steps), next(self._steps)
        answer = bytearray(_ODD.size)
        if self.position == 0:
            found = [bytearray(len(mine)) for _ in others]
            receives = [channel.receive(ranks[at], step, memoryview(found[at - 1])) for at in others]
            yield partial(channel.wait, receives)
            odd = next((at for at in others if found[at - 1] != mine), -1)
            _ODD.pack_into(answer, 0, odd if any(mine) else 0)
            for at in others:
                channel.send(ranks[at], answer_step, memoryview(answer))
        else:
            channel.send(ranks[0], step, memoryview(mine))
            yield partial(channel.wait, [channel.receive(ranks[0], answer_step, memoryview(answer))])
        yield channel.flush
        return int(_ODD.unpack(answer)[0])

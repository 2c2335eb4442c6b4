"""Waits of a call on messages, and the exchanges by which a group chooses its backends in its first call."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dmesh.collectives.backends.tcp.transport import Channel, Completion

T = TypeVar("T")
Attempt = Callable[[float], bool]
"""Waits for something for at most so many seconds; True once it is there. Raises the channel's failure."""
Waits = Generator[Attempt, None, T]
"""Goes on whenever the attempt that it has yielded has succeeded."""
Counts = tuple[int, int]
"""Number of transfers to a member, and from it."""
_FIRST_STEP = 2**31
"""Number of the first message, far from the steps of schedules."""
_VERDICT = struct.Struct("!BQQ")
_ODD = struct.Struct("!i")


def all_of(channel: Channel | None, completions: Sequence[Completion]) -> Attempt:
    """Return the attempt to complete all of some receives."""
    assert channel is not None
    return lambda seconds: channel.wait(completions, seconds)


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

    Args:
        channel: Channel of the call.
        ranks: The members.
        position: This client's position among them.
        freeze: Returns the counts for each member; no later transfer may begin before the group has chosen.
            None if transfers are none of this exchange's concern.
        steps: Step numbers of the messages.
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
        completions = [channel.receive(rank, step, memoryview(found[at])) for rank, at in others]
        for rank, at in others:
            channel.send(rank, step, memoryview(messages[at]))
        yield all_of(channel, completions)
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
            yield all_of(
                channel, [channel.receive(ranks[at], step, memoryview(found[at - 1])) for at in others]
            )
            odd = next((at for at in others if found[at - 1] != mine), -1)
            _ODD.pack_into(answer, 0, odd if any(mine) else 0)
            for at in others:
                channel.send(ranks[at], answer_step, memoryview(answer))
        else:
            channel.send(ranks[0], step, memoryview(mine))
            yield all_of(channel, [channel.receive(ranks[0], answer_step, memoryview(answer))])
        yield channel.flush
        return int(_ODD.unpack(answer)[0])

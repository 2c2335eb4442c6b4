"""Waits of a call on messages, one after the other, and exchanges made of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from dmesh.collectives.backends.tcp.transport import Channel, Completion

T = TypeVar("T")
Attempt = Callable[[float], bool]
"""Waits for something for at most so many seconds; True once it is there. Raises the channel's failure."""
Waits = Generator[Attempt, None, T]
"""Goes on whenever the attempt that it has yielded has succeeded."""


def all_of(channel: Channel | None, completions: Sequence[Completion]) -> Attempt:
    """Return the attempt to complete all of some receives."""
    assert channel is not None
    return lambda seconds: channel.wait(completions, seconds)


def exchange(
    channel: Channel, ranks: Sequence[int], position: int, step: int, messages: Sequence[bytes]
) -> Waits[list[bytes]]:
    """Send each member a message, all of equal length; return what they have sent, in the order of the group.

    Args:
        channel: Carries the messages.
        ranks: The members.
        position: This client's.
        step: Step number of the messages.
        messages: One for each member.
    """
    found = [bytearray(message) for message in messages]
    others = [index for index in range(len(ranks)) if index != position]
    completions = [channel.receive(ranks[index], step, memoryview(found[index])) for index in others]
    for index in others:
        channel.send(ranks[index], step, memoryview(messages[index]))
    yield all_of(channel, completions)
    yield channel.flush
    return [bytes(data) for data in found]

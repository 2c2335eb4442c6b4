"""Times at which a waiting collective asks the other ranks and announces its wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dmesh._log import announce as announce_to_user


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """Seconds of waiting after which a rank asks the others where they are, and tells its user."""

    ask_after: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Seconds of waiting after which it asks."""
    ask_every: float = 10.0
    """Seconds between questions after that."""
    announce_every: float = 10.0
    """Seconds of waiting between two announcements."""
    look_every: float = 0.25
    """Seconds between looks at whether somebody it waits for has left."""
    answers_within: float = 0.25
    """Seconds for which it waits for last answers when its time has run out, so that the error is exact."""
    announce: Callable[[str], None] = announce_to_user
    """Tells the user."""

    def questions(self) -> Iterator[float]:
        """Yields the seconds of waiting after which to ask, without end."""
        yield from self.ask_after
        after = self.ask_after[-1] if self.ask_after else 0.0
        while True:
            after += self.ask_every
            yield after

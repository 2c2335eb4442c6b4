"""Interface of a client to its groups: its identity, its settings, and the way to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dmesh._log import announce as announce_to_user
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.backends.shm.arrays import SharedMemory
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.control_messages import Message
from dmesh.collectives.events import EventRing
from dmesh.collectives.skipped import Barriers
from dmesh.collectives.tuning import Tuning


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


class Services(Protocol):
    """Parts of the communicator that groups, generations and works use."""

    rank: int
    """This client's id."""
    timeout: float
    """Seconds that a call may take if its caller says nothing else."""
    stuck_after: float
    """Seconds of waiting after which the observer hears which ranks a call waits for; 0 for never."""
    wait_policy: WaitPolicy
    """Times at which a waiting rank asks the others and announces the wait."""
    clock: Callable[[], float]
    """Seconds of the monotonic clock."""
    transport: Transport
    """Carries messages between clients."""
    shared_memory: SharedMemory | None
    """Memory shared with clients on the same host; None if there is none."""
    mpi: MpiWorld | None
    """MPI launch that carries the arrays; None if TCP does."""
    tuning: Tuning
    """This client's tuning."""
    neighbours: int
    """Number of clients on this host, this one included."""
    events: EventRing
    """Calls of this client, under way and over."""
    barriers: Barriers
    """Barriers of the coordination service in which this client waits."""
    generation: int
    """Generation that this client is in."""

    def tell(self, rank: int, message: Message) -> None:
        """Send a control message to a client, as far as that is possible."""

    def describe(self, rank: int) -> str:
        """Return a client's name for people."""

    def process_of(self, rank: int) -> int | None:
        """Return what tells one process of a client from the next; None if it is lost."""

    def why_gone(self, rank: int) -> str | None:
        """Return why a client is gone; None if it is not known to be."""

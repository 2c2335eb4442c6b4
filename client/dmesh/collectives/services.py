"""Interface of a client to its groups: its identity, its settings, and the way to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.backends.shm.registry import SharedMemoryRegistry
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.control_messages import Message
from dmesh.collectives.events import EventRing
from dmesh.collectives.skipped import Barriers
from dmesh.collectives.tuning import Tuning
from dmesh.collectives.wait_policy import WaitPolicy


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
    shared_memory: SharedMemoryRegistry | None
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

"""Interface of a client to its groups: its identity, its settings, and the way to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dmesh._log import announce as announce_to_user
from dmesh.collectives.api import ProcessGroup
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.backends.shm.arrays import Pool
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.control_messages import Message
from dmesh.collectives.events import EventRing
from dmesh.collectives.request import as_called
from dmesh.collectives.tuning import Tuning
from dmesh.errors import DMeshError

Pair = tuple[int, int]
"""Positions of the sender and the receiver of a transfer."""

ANY_RANK = -1
"""Place of a sender that is not known yet."""

NAMED = 8
"""Largest number of ranks that one message names."""


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """Seconds of waiting after which a rank asks the others for their positions, and notifies its user."""

    ask_after: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Seconds of waiting after which it asks."""
    ask_every: float = 10.0
    """Seconds between later questions."""
    announce_every: float = 10.0
    """Seconds of waiting between two announcements."""
    look_every: float = 0.25
    """Seconds between checks for departed ranks among those it waits for."""
    answers_within: float = 0.25
    """Seconds to wait for last answers after a timeout, so that the error is exact."""
    announce: Callable[[str], None] = announce_to_user
    """Function that prints a line for the user."""


@dataclass(frozen=True, slots=True)
class BarrierWait:
    """A barrier of the coordination service in which a thread of this process waits."""

    name: str
    ranks: frozenset[int] | None
    """The participants; None for all clients."""
    thread: int
    """Id of the thread that waits."""
    gives_up_in: float
    """Seconds after which it gives up; infinite if it never does."""
    leaving: bool
    """True for the barrier of the shutdown."""

    def includes(self, rank: int) -> bool:
        """Return whether a rank takes part."""
        return self.ranks is None or rank in self.ranks


class Barriers:
    """The barriers of this process, of which it has none without a coordination service. Any thread."""

    def waits(self) -> Sequence[BarrierWait]:
        """Return the barriers in which threads of this process wait."""
        return ()

    def threads(self) -> set[int]:
        """Return the threads that have called barriers."""
        return set()

    def fail(self, name: str, error: DMeshError) -> None:
        """Make the wait in a barrier raise an error."""


class Services(Protocol):
    """Parts of the communicator that groups, generations and works use."""

    rank: int
    timeout: float
    """Seconds that a call may take if its caller says nothing else."""
    stuck_after: float
    """Seconds of waiting after which the observer hears which ranks a call waits for; 0 for never."""
    wait_policy: WaitPolicy
    transport: Transport
    shared_memory: SharedMemoryRegistry | None
    """Memory shared with clients on the same host; None if there is none."""
    pool: Pool | None
    """Arrays in shared memory; None if this client shares none."""
    mpi: MpiWorld | None
    """MPI launch that carries the arrays; None if TCP does."""
    tuning: Tuning
    neighbours: int
    """Number of clients on this host, this one included."""
    events: EventRing
    barriers: Barriers
    generation: int

    def add_group(self, number: int, ranks: tuple[int, ...], name: str) -> ProcessGroup:
        """Make the group of an id that its members have agreed on."""

    def clock(self) -> float:
        """Return the seconds of the monotonic clock."""

    def send_control(self, rank: int, message: Message) -> None:
        """Send a control message to a client, as far as that is possible."""

    def describe(self, rank: int) -> str:
        """Return a client's name for people."""

    def process_of(self, rank: int) -> int | None:
        """Return what tells one process of a client from the next; None if it is lost."""

    def why_gone(self, rank: int) -> str | None:
        """Return why a client is gone; None if it is not known to be."""


class Members:
    """Ranks of a group and its name, as its calls need them.

    Args:
        services: This client.
        ranks: The members, by position.
        name: The group's name; empty if it has none.
        group: The group's id, the same on all members.
        resets: Number of times that the group has been reset; each time it gets another id.
    """

    def __init__(
        self, services: Services, ranks: tuple[int, ...], name: str, group: int, resets: int = 0
    ) -> None:
        self.services = services
        self.ranks = ranks
        self.rank = ranks.index(services.rank)
        """This client's position."""
        self.group = group
        self.resets = resets
        self.label = f"group {name}" if name else f"group of ranks {', '.join(map(str, ranks))}"
        """The group's name for people."""
        self.name = name or self.label
        """Its name in records."""

    def call_label(self, pair: Pair | None, sequence: int) -> str:
        """Return number and group of a call, for people."""
        if pair is None:
            return f"collective #{sequence} of {self.label}"
        if pair[0] == ANY_RANK:
            return f"receive #{sequence} of {self.label}"
        source, target = self.of(pair)
        return f"transfer #{sequence} from rank {source} to rank {target} of {self.label}"

    def call_text(self, pair: Pair | None, rank: int, text: str) -> str:
        """Return a descriptor as `rank` wrote the call: a transfer is a `send` or a `recv`."""
        if pair is None:
            return as_called(text, None)
        return as_called(text, pair[0] != ANY_RANK and self.ranks[pair[0]] == rank)

    def of(self, pair: Pair | None) -> tuple[int, ...]:
        """Return the ranks that take part in the calls of a stream."""
        if pair is None or pair[0] == ANY_RANK:
            return self.ranks
        return tuple(self.ranks[at] for at in pair)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the names of some ranks for people, of `NAMED` at most."""
    shown = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"

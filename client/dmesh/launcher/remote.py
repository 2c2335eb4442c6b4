"""Several hosts as the place where a job's clients run."""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from dmesh.config.addresses import is_loopback, join_address
from dmesh.distribute.cluster_resolver.launched import own_host
from dmesh.errors import HostError, ResolverError
from dmesh.launcher.agent import PING_INTERVAL
from dmesh.launcher.connection import SILENCE, HostConnection, RemoteClient
from dmesh.launcher.frames import Frame, frame
from dmesh.launcher.hosts import Host, Way
from dmesh.launcher.input import InputReader
from dmesh.launcher.orphans import Guard
from dmesh.launcher.plan import ClientPlan, LaunchOptions, Place
from dmesh.launcher.ports import LOOPBACK
from dmesh.launcher.process import Terminal


class RemoteHosts:
    """Connections to the hosts of a job.

    Args:
        hosts: The hosts, in the order of the ranks.
        way: How each is reached.
        start_timeout: Seconds that the agents have to start.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        way: Callable[[Host], Way],
        start_timeout: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.selector: selectors.BaseSelector = selectors.PollSelector()  # watches files, too
        """Watches the connections."""
        self._hosts = hosts
        self._way = way
        self._start_timeout = start_timeout
        self._clock = clock
        self._connections: list[HostConnection] = []
        self._by_rank: list[HostConnection] = []
        self._input: InputReader | None = None
        self._over = threading.Event()

    @contextlib.contextmanager
    def connected(self, options: LaunchOptions, directory: str) -> Iterator[Guard]:
        """Enter a context in which the hosts' agents are there and have ports.

        Args:
            options: What to run.
            directory: Where to run it, on each host.

        Raises:
            HostError: A host cannot be reached, has no dmesh or another version, or refuses.
        """
        with contextlib.closing(self.selector), contextlib.closing(Guard()) as guard:
            try:
                self._connect(guard, options, directory)
                yield guard
            finally:
                self._over.set()
                for connection in self._connections:
                    connection.hang_up()
                for connection in self._connections:
                    connection.close()

    def _connect(self, guard: Guard, options: LaunchOptions, directory: str) -> None:
        for host in self._hosts:
            way = self._way(host)
            connection = HostConnection(host, way, self.selector, guard, self._clock)
            self._connections.append(connection)
            setup = {
                "way": way.name, "directory": directory, "module": options.module,
                "command": options.command, "clients": host.slots, "silence": SILENCE, "bind": options.bind,
            }  # fmt: skip
            connection.begin(frame("setup", setup))
        deadline = self._clock() + self._start_timeout
        while missing := [connection for connection in self._connections if connection.ready is None]:
            left = deadline - self._clock()
            if left <= 0:
                names = ", ".join(connection.host.name for connection in missing[:8])
                said = missing[0].last_words
                raise HostError(
                    f"host {names}: no agent of dmesh has started within {self._start_timeout:g} s. If "
                    f"starting takes longer, raise --start-timeout{f' ({said})' if said else ''}"
                )
            for key, _ in self.selector.select(left):
                key.data.read()
        self._by_rank = [connection for connection in self._connections for _ in range(connection.host.slots)]

    def places(self) -> tuple[Place, ...]:
        """Return the place of each client, by rank."""
        return tuple(
            Place(index, host.slots, host.name) for host in self._hosts for index in range(host.slots)
        )

    def addresses(self) -> tuple[str, ...]:
        """Return an address of each host that the other hosts can reach.

        Raises:
            HostError: A host's address is not known.
        """
        if len(self._connections) == 1:
            return (LOOPBACK,)
        known = []
        for connection in self._connections:
            assert connection.ready is not None
            bare = connection.host.name.strip("[]")
            known.append(LOOPBACK if connection.way.name == "here" else connection.ready.address or bare)
        others = [address for address in known if not is_loopback(address)]
        if not others:
            return tuple(known)
        return tuple(_seen_from(others[0]) if is_loopback(address) else address for address in known)

    def jobs(self) -> tuple[str, ...]:
        """Return HOST:PORT of each client, by rank."""
        found: list[str] = []
        for connection, address in zip(self._connections, self.addresses(), strict=True):
            assert connection.ready is not None
            found += [join_address(address, port) for port in connection.ready.ports]
        return tuple(found)

    def hand_over(self, files: Mapping[str, str]) -> None:
        """Give each host files, by the variables that are to name them there."""
        for connection in self._connections:
            connection.send(frame("files", files))

    # What the supervisor asks for ----------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter a context in which clients can be started, after `connected`."""
        pings = threading.Thread(target=self._ping, daemon=True)
        pings.start()
        try:
            yield
        finally:
            self._over.set()
            pings.join()
            if self._input is not None:
                self._input.close()

    def start(self, plan: ClientPlan, terminal: Terminal, now: float, restarts: int) -> RemoteClient:
        """Start a client; rank 0 has this process's standard input, but when it is started again."""
        connection = self._by_rank[plan.rank]
        client = RemoteClient(plan, terminal, connection, now, restarts)
        connection.clients[plan.rank] = client
        connection.show_words(terminal.err)
        has_input = plan.rank == 0 and restarts == 0
        wanted = {"environment": dict(plan.environment), "restarts": restarts, "input": has_input}
        connection.send(frame("start", wanted, plan.rank))
        if connection.lost:
            client.lose(f"the connection to host {connection.host.name} is gone: {connection.lost}")
        elif has_input:
            self._input = InputReader(0, self.selector, connection.outbox, plan.rank)
            connection.on_taken = self._input.on_taken
        return client

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `on_time`; None for none."""
        return min(
            (connection.deadline for connection in self._connections if connection.deadline is not None),
            default=None,
        )

    def on_time(self, now: float) -> None:
        """Send what waits, and give up agents that are silent."""
        for connection in self._connections:
            connection.on_time(now)

    def pause(self) -> None:
        """Have the agents expect no signs of life while this process is stopped."""
        for connection in self._connections:
            connection.send(Frame("pause", 0))

    @property
    def unsent(self) -> Sequence[str]:
        """Names of hosts for which something waits to be sent."""
        return [connection.host.name for connection in self._connections if not connection.outbox.idle]

    def resume(self) -> None:
        """Have the agents expect signs of life again."""
        for connection in self._connections:
            connection.send(Frame("resume", 0))

    def _ping(self) -> None:
        """Send signs of life: from a thread of its own, for a terminal may hold the launcher up."""
        while not self._over.wait(PING_INTERVAL):
            for connection in self._connections:
                if connection.outbox.idle:
                    connection.send(Frame("ping", 0))


def _seen_from(other: str) -> str:
    """Return this machine's address in the network of another host."""
    try:
        return own_host(join_address(other, 1))
    except ResolverError as error:
        raise HostError(f"this machine's address is not known to host {other}: {error}") from error

"""A TCP proxy that makes a good network a bad one, on demand, without root."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, TypeVar

from dmesh._log import logger
from dmesh.config.addresses import split_address
from dmesh.errors import AddressInUseError, ConfigurationError, DMeshError
from dmesh.testing.lanes import Conditions, Lane

Direction = Literal["both", "to_target", "to_client"]
"""Direction of the bytes that a fault is for: sent by clients, received by them, or both."""

T = TypeVar("T")

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_PAUSE = 1.0
"""Seconds before it accepts again when the system has nothing left for another connection."""
_START = 30.0


class Fault:
    """A fault that was injected; use it in a `with` statement to take it back at the end of the block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        """Made by the methods of `FaultProxy`."""
        self._undo = undo

    def heal(self) -> None:
        """Takes the fault back. What it held back goes on at once, in order."""
        self._undo()

    def __enter__(self) -> Fault:
        """Returns the fault, which is in place already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the fault back."""
        self.heal()


class FaultProxy:
    """Proxy between clients and a server that delays, drops, throttles, resets or refuses traffic.

    It runs in a thread of its own; its methods may be called by any thread, and have taken effect when they
    return. Faults hold for the connections that are there and for those to come, until they are taken back:
    by `heal` of what the method returned, at the end of its `with` block, or all by `FaultProxy.heal`.

    ```python
    with FaultProxy("127.0.0.1:8470") as proxy:
        agent = Agent(proxy.address, identity)      # or DMESH_COORDINATOR=proxy.address
        proxy.delay(0.2, jitter=0.05)               # both directions, until proxy.heal()
        with proxy.drop("to_client"):               # requests arrive, answers do not ...
            ...
        proxy.reset()                               # ... and every open connection ends with a reset
    ```

    Bytes are never lost or reordered within a connection, as TCP promises: what is dropped is held, as a
    network that comes back would send it again.

    Args:
        target: HOST:PORT that connections are passed on to; may be changed later, for new connections.
        listen: HOST:PORT to listen on; port 0 for any free one.
        seed: Of the jitter.

    Raises:
        ConfigurationError: An address is malformed.
    """

    def __init__(self, target: str, listen: str = "127.0.0.1:0", seed: int = 0) -> None:
        self._target = split_address(target, "the proxy's target")
        self._listen = _split_listen(listen)
        self._chance = random.Random(seed)  # noqa: S311 -- jitter, not a secret
        self._lanes: dict[str, Conditions] = {}
        self._connections: set[_Connection] = set()
        self._accepted = 0
        self._moved = {"to_target": 0, "to_client": 0}
        self._listener: socket.socket | None = None
        self._reserved: socket.socket | None = None
        """Keeps the port, and does not listen, while connections are refused."""
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None

    # Running ------------------------------------------------------------------------------------------------

    def start(self) -> FaultProxy:
        """Begins to listen; returns itself.

        Raises:
            AddressInUseError: The port is taken.
        """
        if self._thread is not None:
            raise ConfigurationError("a FaultProxy can be started once; make a new one")
        self._thread = threading.Thread(target=self._run, name="dmesh-fault-proxy", daemon=True)
        self._thread.start()
        self._started.result(_START)
        return self

    def close(self) -> None:
        """Stops listening, resets all connections, and ends the thread. Idempotent."""
        if self._thread is None:
            return
        loop, self._loop = self._loop, None
        if loop is not None and self._stop is not None:
            loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START)

    def __enter__(self) -> FaultProxy:
        """Starts it."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    # What it is ---------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """HOST:PORT to connect to instead of the target."""
        host = self._listen[0]
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    @property
    def target(self) -> str:
        """HOST:PORT that new connections are passed on to."""
        host, port = self._target
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @target.setter
    def target(self, address: str) -> None:
        self._target = split_address(address, "the proxy's target")

    @property
    def connections(self) -> int:
        """Number of connections that are open now."""
        return self._call(self._count)

    @property
    def accepted(self) -> int:
        """Number of connections that were accepted so far."""
        return self._accepted

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that got through so far, `to_target` and `to_client`."""
        return self._call(self._measure)

    # Faults -------------------------------------------------------------------------------------------------

    def delay(self, seconds: float, jitter: float = 0.0, direction: Direction = "both") -> Fault:
        """Lets everything arrive later, by `seconds` give or take up to `jitter`.

        Raises:
            ConfigurationError: A number is negative, or the direction is none.
        """
        _check("seconds", seconds)
        _check("jitter", jitter)
        return self._inject(direction, {"delay": seconds, "jitter": jitter}, {"delay": 0.0, "jitter": 0.0})

    def throttle(self, bytes_per_second: float, direction: Direction = "both") -> Fault:
        """Lets at most so many bytes a second through, on every connection by itself.

        Raises:
            ConfigurationError: The number is not positive, or the direction is none.
        """
        _check("bytes_per_second", bytes_per_second)
        if not bytes_per_second:
            raise ConfigurationError("bytes_per_second is 0; to let nothing through, use FaultProxy.drop")
        return self._inject(direction, {"rate": bytes_per_second}, {"rate": 0.0})

    def drop(self, direction: Direction = "both") -> Fault:
        """Lets nothing through, as a cable that was cut: no error, no end of a connection, only silence.

        New connections are accepted (the kernel does that) and then hear nothing. With one direction, the
        network is partitioned asymmetrically.

        Raises:
            ConfigurationError: The direction is none.
        """
        return self._inject(direction, {"dropped": True}, {"dropped": False})

    def half_open(self, direction: Direction = "to_client") -> Fault:
        """Makes the connections half open: this direction is silent, and its end is not reported either.

        The same as `drop` of one direction, under the name of what follows from it: if the end that is not
        heard closes or dies, the other does not learn of it.

        Raises:
            ConfigurationError: The direction is "both", which leaves nothing open, or none at all.
        """
        if direction == "both":
            raise ConfigurationError(
                "half_open() is for one direction, to_target or to_client; for both, use drop()"
            )
        return self.drop(direction)

    def refuse(self) -> Fault:
        """Refuses new connections, as a machine does if no process listens. Open ones go on."""
        self._call(self._refuse)
        return Fault(lambda: self._call(self._open_listener))

    def reset(self) -> int:
        """Resets all open connections, at both ends; returns how many. New ones are welcome."""
        return self._call(self._reset)

    def heal(self) -> None:
        """Takes all faults back: what was held goes on at once, in order, and connections are accepted."""

        def healthy() -> None:
            for lane in self._lanes.values():
                lane.change(delay=0.0, jitter=0.0, rate=0.0, dropped=False)

        self._call(healthy)
        self._call(self._open_listener)

    # Inside -------------------------------------------------------------------------------------------------

    def _inject(self, direction: Direction, fault: dict[str, Any], healthy: dict[str, Any]) -> Fault:
        if direction not in ("both", "to_target", "to_client"):
            raise ConfigurationError(f"direction is both, to_target or to_client, not {direction!r}")

        def change(values: dict[str, Any]) -> None:
            for name, lane in self._lanes.items():
                if direction in ("both", name):
                    lane.change(**values)

        def undo() -> None:
            # Taking back the fault of a proxy that is closed is no error: a `with` block may end after it.
            if self._loop is not None:
                self._call(lambda: change(healthy))

        self._call(lambda: change(fault))
        return Fault(undo)

    def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._await(call())

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            coroutine.close()
            raise DMeshError("the FaultProxy is not running: use it in a `with` statement, or start it")
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_START)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 -- this is the thread's last frame
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._lanes = {"to_target": Conditions(), "to_client": Conditions()}
        self._stop = asyncio.Event()
        self._open_listener()
        self._loop = asyncio.get_running_loop()
        self._started.set_result(None)
        await self._stop.wait()
        self._close_listener()
        self._release()
        self._reset()
        # Their tasks end by themselves, or with the loop.

    def _open_listener(self) -> None:
        if self._listener is not None:
            return
        host, port = self._listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            if port and not self._port:
                socket.create_server((host, port), family=family).close()  # nobody else listens there
            self._listener = socket.create_server((host, self._port or port), family=family, reuse_port=True)
        except OSError as error:
            raise AddressInUseError(
                f"the FaultProxy cannot listen on {host}:{self._port or port}: {error.strerror or error}"
            ) from error
        self._port = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._accept_from(self._listener)
        self._release()

    def _refuse(self) -> None:
        if self._listener is None:
            return
        # Without it, another process could be given the port before this one listens again.
        self._reserved = socket.socket(self._listener.family)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(self._listener.getsockname())
        self._close_listener()

    def _release(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept_from(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        # Not asyncio's server, which leaves connections open that come in the very moment in which it ends.
        try:
            client, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has been reset meanwhile
        except OSError as error:
            # Out of descriptors or memory: to try again at once would only burn time.
            logger.warning("the FaultProxy cannot accept a connection: %s", error.strerror or error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_PAUSE, self._accept_from, listener)
            return
        client.setblocking(False)
        self._accepted += 1
        connection = _Connection(client)
        self._connections.add(connection)
        connection.begin(self._target, self._lanes, self._chance, self._over)

    def _over(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        for name, count in connection.moved().items():
            self._moved[name] += count

    def _reset(self) -> int:
        connections = list(self._connections)
        for connection in connections:
            connection.reset()
        return len(connections)

    def _count(self) -> int:
        return len(self._connections)

    def _measure(self) -> dict[str, int]:
        total = dict(self._moved)
        for connection in self._connections:
            for name, count in connection.moved().items():
                total[name] += count
        return total


class _Connection:
    """One accepted connection and its continuation to the target. Lives on the proxy's loop."""

    def __init__(self, client: socket.socket) -> None:
        self._client: socket.socket | None = client  # until asyncio has it
        self._writers: list[asyncio.StreamWriter] = []
        self._lanes: dict[str, Lane] = {}
        self._conditions: dict[str, Conditions] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(
        self,
        target: tuple[str, int],
        conditions: dict[str, Conditions],
        chance: random.Random,
        over: Callable[[_Connection], None],
    ) -> None:
        """Passes bytes on until both ends have closed, or one was reset; calls `over` then."""
        self._task = asyncio.get_running_loop().create_task(self._run(target, conditions, chance))
        self._task.add_done_callback(lambda _: over(self))

    async def _run(
        self, target: tuple[str, int], conditions: dict[str, Conditions], chance: random.Random
    ) -> None:
        self._conditions = conditions
        sock, self._client = self._client, None
        try:
            reader, client = await asyncio.open_connection(sock=sock, limit=256 << 10)
            self._writers.append(client)
            # A black hole does not connect either: whoever connects hears nothing, not even a refusal.
            while conditions["to_target"].dropped:
                await conditions["to_target"].changed.wait()
            try:
                their_reader, server = await asyncio.open_connection(*target, limit=256 << 10)
            except OSError:
                self.reset()
                return
            self._writers.append(server)
            self._lanes = {
                "to_target": Lane(conditions["to_target"], reader, server, chance),
                "to_client": Lane(conditions["to_client"], their_reader, client, chance),
            }
            done = await asyncio.gather(
                *(self._pump(lane) for lane in self._lanes.values()), return_exceptions=True
            )
            if any(isinstance(outcome, BaseException) for outcome in done):
                self.reset()
        except asyncio.CancelledError:
            pass  # reset
        finally:
            for writer in self._writers:
                with contextlib.suppress(OSError, RuntimeError):
                    writer.close()

    async def _pump(self, lane: Lane) -> None:
        try:
            await lane.run()
        except OSError:
            # An end that was reset: the other is to know at once, not at the end of what is on its way; but
            # through a silent network it learns nothing.
            for conditions in self._conditions.values():
                while conditions.dropped:
                    await conditions.changed.wait()
            self.reset()
            raise

    def moved(self) -> dict[str, int]:
        """Bytes that got through."""
        return {name: lane.moved for name, lane in self._lanes.items()}

    def reset(self) -> None:
        """Ends it with a reset at both ends."""
        sock, self._client = self._client, None
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.close()
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


def _split_listen(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if colon and port == "0":
        return split_address(f"{host}:1", "the proxy's address to listen on")[0], 0
    return split_address(listen, "the proxy's address to listen on")


def _check(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be a number from 0, not {value!r}")

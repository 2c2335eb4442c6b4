"""Runs scripts as the clients of a real cluster: one process each, over real sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from tests.e2e import forkserver
from tests.waiting import free_ports

DEADLINE = 90.0
"""Seconds after which a test has failed. Nothing waits this long unless something is broken."""


class Process:
    """A child whose output can be waited for line by line."""

    def __init__(
        self, arguments: list[str], environ: Mapping[str, str], *, stdin: bool = False, fresh: bool = False
    ) -> None:
        self._process = forkserver.start(
            arguments,
            {**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            fresh=fresh,
        )
        self.pid = self._process.pid
        self._lines: list[str] = []
        self._errors: list[str] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self._process.stdout, self._lines), (self._process.stderr, self._errors))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines: list[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def out(self) -> str:
        return "\n".join(self._lines)

    @property
    def err(self) -> str:
        return "\n".join(self._errors)

    def wait_for(self, text: str, where: str = "out", timeout: float = DEADLINE) -> str:
        """Waits until a line of the output contains `text`; returns the line."""
        lines = self._lines if where == "out" else self._errors

        def found() -> str | None:
            return next((line for line in lines if text in line), None)

        def over() -> bool:
            return found() is not None or not any(reader.is_alive() for reader in self._readers)

        deadline = time.monotonic() + timeout
        with self._changed:
            while not over() and time.monotonic() < deadline:
                self._changed.wait(0.2)
        line = found()
        assert line is not None, f"{text!r} never came.\n--- out\n{self.out}\n--- err\n{self.err}"
        return line

    def wait(self, timeout: float = DEADLINE) -> int:
        """Waits for the end; returns the exit code."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)
            raise AssertionError(f"still running.\n--- out\n{self.out}\n--- err\n{self.err}") from None
        for reader in self._readers:
            reader.join(10)
        return code

    def signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def close_stdin(self) -> None:
        """Ends its standard input, which was opened for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Kills it, if it still runs, and reaps it."""
        self.signal(signal.SIGKILL)
        self.close_stdin()
        self._process.wait(DEADLINE)
        for reader in self._readers:
            reader.join(10)


@contextlib.contextmanager
def run_clients(
    count: int,
    script: str,
    *,
    environ: Mapping[str, str] | None = None,
    per_client: Mapping[int, Mapping[str, str]] | None = None,
    only: tuple[int, ...] | None = None,
    ports: list[int] | None = None,
    stdin: bool = False,
    fresh: bool = False,
) -> Iterator[dict[int, Process]]:
    """Starts `script` as each of `count` clients of one cluster; none is left when the block ends.

    The script is its text, or its path if that ends in ".py". `fresh`: see `forkserver.start`.
    """
    ports = ports or free_ports(count)
    jobs = ",".join(f"127.0.0.1:{port}" for port in ports)
    clients: dict[int, Process] = {}
    try:
        for rank in only if only is not None else range(count):
            clients[rank] = Process(
                [sys.executable, script] if script.endswith(".py") else [sys.executable, "-c", script],
                {
                    "DTENSOR_JOBS": jobs,
                    "DTENSOR_CLIENT_ID": str(rank),
                    **(environ or {}),
                    **(per_client or {}).get(rank, {}),
                },
                stdin=stdin,
                fresh=fresh,
            )
        yield clients
    finally:
        for client in clients.values():
            client.end()


@contextlib.contextmanager
def run_server(*arguments: str) -> Iterator[tuple[Process, str]]:
    """Runs `dmesh serve`; yields it and the address of its gRPC side."""
    server = Process(
        [sys.executable, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
         *(arguments or ("--memory",))],
        {},
    )  # fmt: skip
    try:
        ready = server.wait_for("dmesh-server ready")
        yield server, ready.split("grpc=")[1].split()[0]
    finally:
        server.end()

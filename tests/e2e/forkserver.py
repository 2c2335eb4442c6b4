"""Starts Python programs as forks of a process that has imported dmesh, so that they need not import it.

A fork server imports NumPy, gRPC and dmesh, and nothing of them runs in it. Each of its children becomes one
program: with arguments, environment, directory and standard streams of its own, it runs the program as the
interpreter's main module, and ends as an interpreter ends. A program whose variables matter before it runs,
such as LD_PRELOAD, is started as usual.

As a program, this module is the fork server: `python forkserver.py DESCRIPTOR`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

PACKAGES = (
    "dmesh.cli",
    "dmesh.collectives",
    "dmesh.config",
    "dmesh.coordination",
    "dmesh.mesh",
    "dmesh.runtime",
    "dmesh_server",
)
MODULES = ("numpy", "grpc.aio", "ml_dtypes", "sqlite3", "uvicorn", "fastapi", "jinja2", "dmesh")
NATIVE = "DMESH_NATIVE"
"""Variable that is read when dmesh is imported, and has a fork server for each of its values."""
READ_BEFORE = (
    "GRPC_", "LANG", "LC_", "LD_", "OMP_", "OPENBLAS_", "OTEL_PROPAGATORS", "OTEL_PYTHON_", "PYTHON", "TZ",
)  # fmt: skip
"""Beginnings of the names of other variables that matter before a program runs."""
READ_LATER = ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
_HEADER = struct.Struct("!I")
_EVENT = struct.Struct("!?ii")


class Program:
    """Child of a fork server, with the methods and attributes of `subprocess.Popen` that tests use."""

    def __init__(self, server: ForkServer, pid: int, *streams: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._server.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        with self._server.changed:
            if not self._server.changed.wait_for(lambda: self.pid in self._server.codes, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._server.codes[self.pid]

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """A fork server, which ends with this process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes of its children that have ended."""
        self.changed = threading.Condition()
        self._born: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            end, none = theirs.fileno(), subprocess.DEVNULL
            command = [sys.executable, __file__, str(end)]
            self._process = subprocess.Popen(command, env=environ, stdin=none, stdout=none, pass_fds=[end])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, order: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Start a program with three standard streams; return its process id."""
        data = json.dumps(order).encode()
        with self._starting:
            socket.send_fds(self._socket, [_HEADER.pack(len(data))], streams)
            self._socket.sendall(data)
            try:
                pid = self._born.get(timeout=60)
            except queue.Empty:
                raise RuntimeError("the fork server has not started the program within 60 s") from None
        if not pid:
            raise RuntimeError(
                "the fork server has ended; it may have said why on the standard error of the tests"
            )
        return pid

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream, contextlib.suppress(ConnectionError):
            while len(event := stream.read(_EVENT.size)) == _EVENT.size:
                is_born, pid, code = _EVENT.unpack(event)
                if is_born:
                    self.codes.pop(pid, None)
                    self._born.put(pid)
                    continue
                with self.changed:
                    self.codes[pid] = code
                    self.changed.notify_all()
        self._born.put(0)

    def end(self) -> None:
        """End it; its children go on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._reader.join()
        self._socket.close()


_servers: dict[str, ForkServer] = {}
_making = threading.Lock()


def end_all() -> None:
    """End the fork servers."""
    with _making:
        while _servers:
            _servers.popitem()[1].end()


def start(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdin: int,
    stderr: int | IO[Any],
    fresh: bool = False,
) -> Program | subprocess.Popen[bytes]:
    """Start a program whose standard output is a pipe, as `subprocess.Popen` does.

    Args:
        arguments: The command line. Programs of this interpreter are forked.
        environ: Its whole environment.
        stdin: `subprocess.PIPE` or `subprocess.DEVNULL`.
        stderr: `subprocess.PIPE`, or a file, such as `sys.__stderr__`.
        fresh: Fork nothing: the test is about what the program imports, or about its traceback.
    """
    program, *rest = arguments
    names = {
        name for name in (*environ, *os.environ) if name.startswith(READ_BEFORE) and name not in READ_LATER
    }
    is_plain = all(environ.get(name) == os.environ.get(name) for name in names)
    is_program = program == sys.executable and (rest[0] in ("-c", "-m") or not rest[0].startswith("-"))
    if fresh or not is_plain or not is_program:
        command, pipe = list(arguments), subprocess.PIPE
        return subprocess.Popen(command, env=dict(environ), stdin=stdin, stdout=pipe, stderr=stderr)
    native = environ.get(NATIVE, "")
    with _making:
        if native not in _servers:
            _servers[native] = ForkServer({**os.environ, NATIVE: native})
        server = _servers[native]
    with contextlib.ExitStack() as theirs:
        streams = []
        ours: list[IO[bytes] | None] = []
        for stream, mode in ((stdin, "rb"), (subprocess.PIPE, "wb"), (stderr, "wb")):
            if stream == subprocess.PIPE:
                reads, writes = os.pipe()
                end = reads if mode == "rb" else writes
                ours.append(os.fdopen(writes, "wb", 0) if mode == "rb" else os.fdopen(reads, "rb"))
            else:
                is_file = not isinstance(stream, int)
                end = os.dup(stream.fileno()) if is_file else os.open(os.devnull, os.O_RDWR)
                ours.append(None)
            theirs.callback(os.close, end)
            streams.append(end)
        order = {"arguments": rest, "environ": dict(environ), "directory": os.getcwd()}
        return Program(server, server.start(order, streams), *ours)


# -- in the fork server --------------------------------------------------------------------------------------


def prepare() -> None:
    """Import what programs need. There is no thread afterwards that a child would lack."""
    for name in MODULES:
        importlib.import_module(name)
    for name in PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # of an extra that is not installed
                    importlib.import_module(found.name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # children that collect garbage would copy all of it


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each order. Returns the order in the child, and None when there are no more."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    children: dict[int, int] = {}  # process ids by descriptor
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != connection.fileno():
                pid = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.sendall(_EVENT.pack(False, pid, code))
                continue
            header, streams, _, _ = socket.recv_fds(connection, _HEADER.size, 3)
            if len(header) < _HEADER.size:
                return None
            data = connection.recv(_HEADER.unpack(header)[0], socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                for inherited in (connection.detach(), *children):
                    os.close(inherited)
                for place, stream in enumerate(streams):
                    os.dup2(stream, place)
                    os.close(stream)
                return dict(json.loads(data))
            for stream in streams:
                os.close(stream)
            found = os.pidfd_open(pid)
            children[found] = pid
            poll.register(found, select.POLLIN)
            connection.sendall(_EVENT.pack(True, pid, 0))


def become(order: Mapping[str, Any]) -> None:
    """Run a program, as the interpreter does with these arguments."""
    import faulthandler
    import io
    import runpy

    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # type: ignore[misc]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    first, *rest = order["arguments"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
        main.__file__ = first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
        exec(code, main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test
    prepare()
    if (taken := serve(socket.socket(fileno=int(sys.argv[1])))) is None:
        os._exit(0)  # what this process has imported is not to be torn down
    become(taken)

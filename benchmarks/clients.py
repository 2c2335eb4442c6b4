"""Many clients on one server: register, pass a barrier twice, leave. Prints one line of JSON.

Every client has a TCP connection and a session of its own and sends its heartbeats; a few processes share the
load of running them. They speak the protocol over grpc.aio: the SDK's own agent has a few threads each, made
for one per process, and a thousand of them would measure the machine's scheduler. The server is a real
`dmesh serve`, with its state in memory, or on disk with --data-dir.

    python benchmarks/clients.py --clients 1000 --processes 4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection

import grpc
import psutil

from dmesh.v1 import common_pb2 as common
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import coordination_pb2_grpc

JOB = "worker"
PHASES = ("register", "barrier", "again", "leave")
LIMIT = 120.0
"""Seconds that any step may take."""


class _WithToken:
    """A channel whose calls carry the run's token."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {os.environ['DMESH_TOKEN']}"),)

    def __getattr__(self, kind: str) -> Callable[..., object]:
        make = getattr(self._channel, kind)
        return lambda *args, **more: functools.partial(make(*args, **more), metadata=self._metadata)


class Client:
    """One client, with what it needs of the protocol."""

    def __init__(self, address: str, index: int, jobs: list[common.Job]) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # or all of a process would share one connection
        self._channel = grpc.aio.insecure_channel(address, options)
        self._stub = coordination_pb2_grpc.CoordinationServiceStub(_WithToken(self._channel))
        task = common.Task(job=JOB, index=index)
        self._caller = common.Caller(cluster="load", task=task, incarnation=secrets.randbits(63) + 1)
        self._jobs = jobs
        self._outgoing: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._barrier: asyncio.Future[pb.BarrierResult] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._passed = 0

    async def register(self) -> None:
        """Takes the seat and attaches a session."""
        request = pb.RegisterRequest(caller=self._caller, request_id=secrets.token_hex(8), jobs=self._jobs)
        answer = await self._stub.Register(request, timeout=LIMIT, wait_for_ready=True)
        self._outgoing.put_nowait(pb.SessionRequest(attach=pb.Attach(caller=self._caller)))
        self._call = self._stub.Session(self._requests())
        first = await self._call.read()
        assert first.WhichOneof("kind") == "attached", first
        interval = answer.heartbeat_interval_ms / 1000
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat(interval))]

    async def barrier(self) -> None:
        """Meets all the others."""
        self._barrier = asyncio.get_running_loop().create_future()
        enter = pb.EnterBarrier(name="meet", instance=self._passed, timeout_ms=int(LIMIT * 1000))
        self._outgoing.put_nowait(pb.SessionRequest(enter_barrier=enter))
        result = await asyncio.wait_for(self._barrier, LIMIT)
        assert not result.HasField("error"), result.error
        self._passed += 1

    async def leave(self) -> None:
        """Gives the seat up."""
        request = pb.LeaveRequest(caller=self._caller, request_id=secrets.token_hex(8))
        await self._stub.Leave(request, timeout=LIMIT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._channel.close()

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _listen(self) -> None:
        while (response := await self._call.read()) is not grpc.aio.EOF:
            kind = response.WhichOneof("kind")
            if kind == "barrier_result" and self._barrier is not None:
                self._barrier.set_result(response.barrier_result)
            elif kind == "session_end":
                raise ConnectionError(response.session_end.error.message)

    async def _beat(self, interval: float) -> None:
        for sequence in range(1, 2**31):
            await asyncio.sleep(interval)
            heartbeat = pb.Heartbeat(sequence=sequence)
            self._outgoing.put_nowait(pb.SessionRequest(heartbeat=heartbeat))


def run_share(address: str, total: int, share: range, pipe: Connection) -> None:
    """Runs some of the clients; each command from the pipe is one phase for all of them."""
    asyncio.run(_run_share(address, total, share, pipe))


async def _run_share(address: str, total: int, share: range, pipe: Connection) -> None:
    jobs = [common.Job(name=JOB, addresses=[f"client:{1 + index}" for index in range(total)])]
    clients = [Client(address, index, jobs) for index in share]
    loop = asyncio.get_running_loop()
    actions = {
        "register": Client.register,
        "barrier": Client.barrier,
        "again": Client.barrier,
        "leave": Client.leave,
    }
    while (phase := (await loop.run_in_executor(None, pipe.recv_bytes)).decode()) != "end":
        done = await asyncio.gather(*(actions[phase](client) for client in clients), return_exceptions=True)
        errors = [f"{type(error).__name__}: {error}" for error in done if error is not None]
        pipe.send_bytes(json.dumps(errors).encode())


def measure(
    options: argparse.Namespace, address: str, server: psutil.Process
) -> tuple[dict[str, object], list[str]]:
    """Runs all phases; returns the report and the errors."""
    idle = server.memory_info().rss
    context = multiprocessing.get_context("spawn")
    report: dict[str, object] = {"clients": options.clients, "processes": options.processes}
    errors: list[str] = []
    with contextlib.ExitStack() as cleanup:
        pipes = []
        for number in range(options.processes):
            ours, theirs = context.Pipe()
            share = range(number, options.clients, options.processes)
            worker = context.Process(target=run_share, args=(address, options.clients, share, theirs))
            worker.start()
            cleanup.callback(worker.join)
            cleanup.callback(ours.send_bytes, b"end")
            pipes.append(ours)
        for phase in PHASES:
            started = time.monotonic()
            for pipe in pipes:
                pipe.send_bytes(phase.encode())
            for pipe in pipes:
                errors += [f"{phase}: {error}" for error in json.loads(pipe.recv_bytes())]
            report[f"{phase}_s"] = round(time.monotonic() - started, 2)
            if phase == "again":
                used = server.memory_info().rss
                connections = server.net_connections(kind="tcp")
                report["connections"] = sum(one.status == psutil.CONN_ESTABLISHED for one in connections)
                report["server_rss_mib"] = round(used / 2**20, 1)
                report["server_kib_per_client"] = round((used - idle) / 1024 / options.clients, 1)
    report["errors"] = len(errors)
    return report, errors


def main() -> int:
    """Runs the phases and reports; returns 1 if there was any error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--data-dir", help="keep the server's state there; default: in memory")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    os.environ["DMESH_TOKEN"] = secrets.token_hex(32)  # for the server and the processes with the clients
    store = ["--data-dir", options.data_dir] if options.data_dir else ["--memory"]
    server = subprocess.Popen(
        [sys.executable, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--no-http", *store],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split("grpc=")[1].split()[0]
        report, errors = measure(options, address, psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(report))
    for error in errors[:10]:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Simulated clients, thousands in a process, and their server; used by `clients.py`.

Every client has a TCP connection and a session of its own, and speaks the protocol over grpc.aio. The SDK's
own agent would not do: it has a few threads and is made for one client per process, so a thousand agents
would measure the machine's scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import grpc
import psutil

from dmesh.protocol import jobs_digest
from dmesh.v1 import common_pb2 as common
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import coordination_pb2_grpc

CLUSTER = "load"
JOB = "worker"
LIMIT = 300.0
"""Seconds that any step may take."""


def job_addresses(total: int) -> list[str]:
    """Return the addresses of a job of so many clients, which are never connected to."""
    return [f"client:{1 + index}" for index in range(total)]


class Client:
    """One client, with what it needs of the protocol."""

    def __init__(self, address: str, index: int, jobs: list[common.Job], jobs_digest: bytes) -> None:
        self._address = address
        self._connect()
        task = common.Task(job=JOB, index=index)
        self._caller = common.Caller(
            cluster=CLUSTER,
            task=task,
            incarnation=secrets.randbits(63) + 1,
            credential=secrets.token_bytes(32),
        )
        self._jobs = jobs
        self._jobs_digest = jobs_digest
        self._random = random.Random(index)
        token = os.environ.get("DMESH_TOKEN")
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._outgoing: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._barrier: asyncio.Future[pb.BarrierResult] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._passed = 0
        self._sent: dict[int, float] = {}
        self._failure: Exception | None = None
        self._departed: set[int] = set()
        self._told = asyncio.Event()
        self._expects_departures = False
        self.acknowledged: list[float] = []
        """How long each heartbeat took to be acknowledged, seconds."""
        self.released_at = 0.0
        self.told_at = 0.0
        """When the latest departure was told."""
        self.lease = 0.0
        """As the server granted it, seconds."""
        self.retries = 0
        """Attempts to attach again that failed."""

    def _connect(self) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # or all of a process would share one connection
            ("grpc.max_receive_message_length", 64 << 20),
            # What a channel does to find and judge its server costs more than to talk to it.
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_channelz", 0),
            ("grpc.http2.bdp_probe", 0),
        ]
        self._channel = grpc.aio.insecure_channel(f"ipv4:{self._address}", options=options)
        self._stub = coordination_pb2_grpc.CoordinationServiceStub(self._channel)

    async def exist(self) -> None:
        """Do nothing: the process has started."""

    async def register(self) -> None:
        """Take the task slot and attach a session."""
        request = pb.RegisterRequest(
            caller=self._caller, request_id=secrets.token_hex(8), jobs_digest=self._jobs_digest
        )
        try:
            answer = await self._register(request)
        except grpc.aio.AioRpcError as error:
            if "does not know this job list" not in (error.details() or ""):
                raise
            request.ClearField("jobs_digest")
            request.jobs.extend(self._jobs)
            answer = await self._register(request)
        self.lease = answer.lease_ms / 1000
        self._interval = answer.heartbeat_interval_ms / 1000
        await self._attach()

    async def _attach(self) -> None:
        self._outgoing = asyncio.Queue()
        self._outgoing.put_nowait(pb.SessionRequest(attach=pb.Attach(caller=self._caller)))
        self._call = self._stub.Session(self._requests(), metadata=self._metadata)
        first = await self._call.read()
        if first is grpc.aio.EOF:
            raise ConnectionError(await self._call.details())
        assert first.WhichOneof("kind") == "attached", first
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat(self._interval))]

    async def reset(self, outage: float = 0.0) -> None:
        """Attach again after the connection was reset, as the SDK does: at once, then after growing waits.

        Args:
            outage: Seconds for which there is no way to the server.
        """
        await self._hang_up()
        await asyncio.sleep(outage)
        delay, deadline = 0.1, time.monotonic() + LIMIT
        while True:
            self._connect()
            try:
                await self._attach()
            except (ConnectionError, grpc.aio.AioRpcError) as error:
                fenced = "not a member" in str(error)
                if fenced or time.monotonic() > deadline:
                    raise
            else:
                return
            await self._hang_up()
            self.retries += 1
            await asyncio.sleep(delay * self._random.uniform(0.8, 1.2))
            delay = min(1.0, delay * 1.5)

    async def _register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        return await self._stub.Register(request, timeout=LIMIT, wait_for_ready=True, metadata=self._metadata)

    async def barrier(self) -> None:
        """Meet all the others."""
        self._check()
        self._barrier = asyncio.get_running_loop().create_future()
        enter = pb.EnterBarrier(name="meet", instance=self._passed, timeout_ms=int(LIMIT * 1000))
        self._outgoing.put_nowait(pb.SessionRequest(enter_barrier=enter))
        result = await asyncio.wait_for(self._barrier, LIMIT)
        assert not result.HasField("error"), result.error
        self._passed += 1

    async def heartbeats(self) -> None:
        """Begin to measure heartbeats."""
        self.acknowledged.clear()

    async def heartbeats_over(self) -> None:
        """Raise what went wrong with heartbeats."""
        self._check()
        if not self._tasks[1].done():
            return
        await self._tasks[1]

    async def state(self) -> list[str]:
        """Look at all members; return what is wrong with any of them."""
        request = pb.GetClusterStateRequest(caller=self._caller)
        state = await self._stub.GetClusterState(request, timeout=LIMIT, metadata=self._metadata)
        return [
            f"{member.task.index} is {common.MemberState.Name(member.state)}, "
            f"{common.Liveness.Name(member.liveness)}: {member.reason}"
            for member in state.members
            if member.state != common.MEMBER_STATE_CONNECTED
            or member.liveness in (common.LIVENESS_BLOCKED, common.LIVENESS_STUCK)
        ]

    async def expect_departures(self) -> None:
        """Accept from now on that others depart."""
        self._expects_departures = True

    async def vanish(self) -> None:
        """Hang up, as if the process were killed."""
        await self._hang_up()

    async def witness(self, gone: int) -> None:
        """Wait until as many others have departed, by what the server said."""
        async with asyncio.timeout(LIMIT):
            while len(self._departed) < gone:
                self._check()
                self._told.clear()
                await self._told.wait()

    async def leave(self) -> None:
        """Give the task slot up."""
        request = pb.LeaveRequest(caller=self._caller, request_id=secrets.token_hex(8))
        await self._stub.Leave(request, timeout=LIMIT, metadata=self._metadata)
        await self._hang_up()

    def stop(self) -> None:
        """Expect nothing more of the connection."""
        self._check()
        for task in self._tasks:
            task.cancel()

    async def _hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._outgoing.put_nowait(None)  # or gRPC waits for requests of a call that has failed
        self._call.cancel()
        await self._channel.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._told.set()
        if self._barrier is not None and not self._barrier.done():
            self._barrier.set_exception(error)

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _listen(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._hear(response)
            code = await self._call.code()
            self._fail(ConnectionError(f"the session ended: {code}: {await self._call.details()}"))
        except grpc.RpcError as error:
            self._fail(ConnectionError(str(error)))

    def _hear(self, response: pb.SessionResponse) -> None:
        now = time.monotonic()
        match response.WhichOneof("kind"):
            case "heartbeat_ack":
                sent = self._sent.pop(response.heartbeat_ack.sequence, None)
                if sent is not None:
                    self.acknowledged.append(now - sent)
            case "barrier_result":
                if self._barrier is not None and not self._barrier.done():
                    self.released_at = now
                    self._barrier.set_result(response.barrier_result)
            case "membership_change":
                self._departed.update(member.task.index for member in response.membership_change.departed)
                self.told_at = now
                self._told.set()
                if not self._expects_departures:
                    first = response.membership_change.departed[0]
                    self._fail(AssertionError(f"{first.task.index} was declared dead: {first.reason}"))
            case "session_end":
                self._fail(ConnectionError(response.session_end.error.message))

    async def _beat(self, interval: float) -> None:
        # Each at a time of its own, or thousands would send at once for ever.
        await asyncio.sleep(self._random.uniform(0, interval))
        for sequence in range(1, 2**31):
            self._sent[sequence] = time.monotonic()
            self._outgoing.put_nowait(pb.SessionRequest(heartbeat=pb.Heartbeat(sequence=sequence)))
            await asyncio.sleep(interval)


def run_share(address: str, total: int, share: range, pipe: Connection) -> None:
    """Run some of the clients; each command from the pipe is one phase for all of them."""
    asyncio.run(_run_share(address, total, share, pipe))


async def _run_share(address: str, total: int, share: range, pipe: Connection) -> None:
    jobs = [common.Job(name=JOB, addresses=job_addresses(total))]
    digest = jobs_digest([(job.name, job.addresses) for job in jobs])
    clients = {index: Client(address, index, jobs, digest) for index in share}
    loop = asyncio.get_running_loop()
    while (command := json.loads(await loop.run_in_executor(None, pipe.recv_bytes))) is not None:
        phase, chosen, arguments = command["phase"], command["clients"], command["arguments"]
        named = [index for index in share if chosen[0] <= index < chosen[1]]
        if phase == "reset":
            for index in named:
                clients[index].stop()
            await asyncio.sleep(0)
            reset_connections(int(address.rpartition(":")[2]))
        actions = (getattr(clients[index], phase)(**arguments) for index in named)
        done = await asyncio.gather(*actions, return_exceptions=True)
        answer: dict[str, Any] = {
            "errors": [
                f"{phase}: client {index}: {type(error).__name__}: {error}"
                for index, error in zip(named, done, strict=True)
                if isinstance(error, BaseException)
            ],
            "said": [line for one in done if isinstance(one, list) for line in one],
            "released": [clients[index].released_at for index in named],
            "told": [clients[index].told_at for index in named],
            "retries": sum(clients[index].retries for index in named),
            "lease": max((clients[index].lease for index in named), default=0.0),
        }
        if phase == "heartbeats_over":
            answer["acknowledged"] = [round(one, 4) for index in named for one in clients[index].acknowledged]
        pipe.send_bytes(json.dumps(answer).encode())


def reset_connections(port: int) -> None:
    """Shut all of this process's connections to a port down."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own, closed by now
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate: gRPC closes its own when it notices.
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)


class SimulatedClients:
    """The processes that run the clients."""

    def __init__(self, address: str, clients: int, processes: int, total: int | None = None) -> None:
        """Start the processes.

        Args:
            address: HOST:PORT of the server.
            clients: Number of clients, those of the lowest indices.
            processes: Processes that share them.
            total: Clients of the job in all, if others are run elsewhere.
        """
        self.clients = clients
        self.errors: list[str] = []
        """What went wrong so far."""
        self._pipes: list[Connection] = []
        self._cleanup = contextlib.ExitStack()
        context = multiprocessing.get_context("spawn")
        for number in range(processes):
            ours, theirs = context.Pipe()
            share = range(number, clients, processes)
            worker = context.Process(target=run_share, args=(address, total or clients, share, theirs))
            worker.start()
            self._cleanup.callback(worker.join)
            self._cleanup.callback(ours.send_bytes, b"null")
            self._pipes.append(ours)

    def phase(
        self, name: str, first: int = 0, last: int | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Have a range of the clients do something at the same time; return the processes' answers."""
        last = self.clients if last is None else last
        command = {"phase": name, "clients": [first, last], "arguments": arguments}
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(command).encode())
        answers = [json.loads(pipe.recv_bytes()) for pipe in self._pipes]
        for answer in answers:
            self.errors += answer["errors"] + answer["said"]
        if name == "register" and self.errors:
            raise SystemExit("\n".join([f"{len(self.errors)} clients could not register:", *self.errors[:5]]))
        return answers

    def close(self) -> None:
        """End the processes."""
        self._cleanup.close()


class Server:
    """A real `dmesh serve`."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        assert process.stdout is not None
        self._log = log
        self.address = process.stdout.readline().split("grpc=")[1].split()[0]
        self.process = psutil.Process(process.pid)
        self.complaints: list[str] = []
        """Errors in its log, once it has ended."""

    def departures(self) -> list[float]:
        """Return when members departed, by its log and the monotonic clock."""
        log = self._log.fileno()
        # Not read(): the server writes where this file stands.
        lines = os.pread(log, os.fstat(log).st_size, 0).decode().splitlines()
        return [float(line.split("monotonic=")[1]) for line in lines if " member_departed " in line]

    def cpu(self) -> float:
        """Return the processor time used so far, seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def serving(arguments: str = "", data_dir: str | None = None, profile: str | None = None) -> Iterator[Server]:
    """Run a server.

    Args:
        arguments: More options of `dmesh serve`.
        data_dir: Where its state is kept; None: in memory.
        profile: File for what cProfile finds; None for no profiler.
    """
    os.environ.setdefault("DMESH_TOKEN", secrets.token_hex(32))
    profiler = ["-m", "cProfile", "-o", profile] if profile else []
    store = ["--data-dir", data_dir] if data_dir else ["--memory"]
    command = [sys.executable, *profiler, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--no-http"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *store, *shlex.split(arguments)], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            server = Server(process, log)
            yield server
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        server.complaints += [line.strip() for line in log if " ERROR " in line or "Traceback" in line]


def raise_file_limit(needed: int) -> None:
    """See to enough file descriptors, for this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        with contextlib.suppress(ValueError, OSError):  # may be allowed to root
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            return
        raise SystemExit(f"{needed} file descriptors are needed, and {hard} allowed: see ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def check_ports(needed: int) -> None:
    """Refuse to start what would run out of source ports."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if high - low < needed:
        raise SystemExit(
            f"{needed} source ports are needed, and {high - low} there: widen net.ipv4.ip_local_port_range"
        )

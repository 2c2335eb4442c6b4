"""Many clients on one server: register, meet, send heartbeats, be reset, be gone. Prints one line of JSON.

Every client has a TCP connection and a session of its own and sends its heartbeats; a few processes share the
load of running them. They speak the protocol over grpc.aio: the SDK's own agent has a few threads each, made
for one per process, and a thousand of them would measure the machine's scheduler. The server is a real
`dmesh serve`, with its state in memory, or on disk with --data-dir.

    python benchmarks/clients.py --clients 1000 --processes 4
    python benchmarks/clients.py --clients 10000 --heartbeat 300 --ending vanish --check

Any error counts: a call that fails, a session that ends, a member that is told to have departed while all are
there, a member that is not live after the heartbeats. With --check, the limits that the project promises
count as well: registering and meeting within a minute, the spread of a release, memory per client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import psutil

from dmesh.protocol import jobs_digest
from dmesh.v1 import common_pb2 as common
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import coordination_pb2_grpc

JOB = "worker"
LIMIT = 300.0
"""Seconds that any step may take."""
WITNESSES = 16
"""Clients that stay when all others vanish, and must be told of each of them."""
JOIN_LIMIT = 60.0
"""Seconds for registering and the first barrier together (--check)."""
SPREAD_LIMIT = 10.0
"""Seconds between the first and the last to be released from a barrier (--check)."""
KIB_LIMIT = 100.0
"""Server memory per client (--check)."""


class Client:
    """One client, with what it needs of the protocol."""

    def __init__(self, address: str, index: int, jobs: list[common.Job], jobs_digest: bytes) -> None:
        self._address = address
        self._connect()
        task = common.Task(job=JOB, index=index)
        self._caller = common.Caller(
            cluster="load",
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
        """Does nothing: its process has started."""

    async def register(self) -> None:
        """Takes the task slot and attaches a session."""
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

    async def reset(self) -> None:
        """Loses its connection, and attaches again as the SDK does: at once, then after growing waits."""
        self._check()
        for task in self._tasks:
            task.cancel()
        await self._channel.close()
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
            await self._channel.close()
            await asyncio.sleep(delay * self._random.uniform(0.8, 1.2))
            delay = min(1.0, delay * 1.5)

    async def _register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        return await self._stub.Register(request, timeout=LIMIT, wait_for_ready=True, metadata=self._metadata)

    async def barrier(self) -> None:
        """Meets all the others."""
        self._check()
        self._barrier = asyncio.get_running_loop().create_future()
        enter = pb.EnterBarrier(name="meet", instance=self._passed, timeout_ms=int(LIMIT * 1000))
        self._outgoing.put_nowait(pb.SessionRequest(enter_barrier=enter))
        result = await asyncio.wait_for(self._barrier, LIMIT)
        assert not result.HasField("error"), result.error
        self._passed += 1

    async def heartbeats(self) -> None:
        """Goes on sending heartbeats for a while; what goes wrong in it is seen here."""
        self.acknowledged.clear()

    async def heartbeats_over(self) -> None:
        """Sees what the heartbeats have come to."""
        self._check()
        if not self._tasks[1].done():
            return
        await self._tasks[1]

    async def state(self) -> list[str]:
        """Looks at all members; returns what is wrong with any of them."""
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
        """From now on others may depart."""
        self._expects_departures = True

    async def vanish(self) -> None:
        """Hangs up, as if its process were killed."""
        await self._stop()

    async def witness(self, gone: int) -> None:
        """Waits until it was told of the departure of as many others."""
        async with asyncio.timeout(LIMIT):
            while len(self._departed) < gone:
                self._check()
                self._told.clear()
                await self._told.wait()

    async def leave(self) -> None:
        """Gives the task slot up."""
        request = pb.LeaveRequest(caller=self._caller, request_id=secrets.token_hex(8))
        await self._stub.Leave(request, timeout=LIMIT, metadata=self._metadata)
        await self._stop()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
    """Runs some of the clients; each command from the pipe is one phase for all of them."""
    asyncio.run(_run_share(address, total, share, pipe))


async def _run_share(address: str, total: int, share: range, pipe: Connection) -> None:
    jobs = [common.Job(name=JOB, addresses=[f"client:{1 + index}" for index in range(total)])]
    digest = jobs_digest([(job.name, job.addresses) for job in jobs])
    clients = {index: Client(address, index, jobs, digest) for index in share}
    loop = asyncio.get_running_loop()
    while (command := json.loads(await loop.run_in_executor(None, pipe.recv_bytes))) is not None:
        phase, chosen, arguments = command["phase"], command["clients"], command["arguments"]
        named = [index for index in share if chosen[0] <= index < chosen[1]]
        before = time.process_time()
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
            "cpu": time.process_time() - before,
        }
        if phase == "heartbeats_over":
            answer["acknowledged"] = [round(one, 4) for index in named for one in clients[index].acknowledged]
        pipe.send_bytes(json.dumps(answer).encode())


class Load:
    """The processes that run the clients, and what is measured meanwhile."""

    def __init__(self, options: argparse.Namespace, address: str, server: psutil.Process) -> None:
        self._options, self._server = options, server
        self._pipes: list[Connection] = []
        self._cleanup = contextlib.ExitStack()
        self.report: dict[str, Any] = {"clients": options.clients, "processes": options.processes}
        self.errors: list[str] = []
        context = multiprocessing.get_context("spawn")
        for number in range(options.processes):
            ours, theirs = context.Pipe()
            share = range(number, options.clients, options.processes)
            worker = context.Process(target=run_share, args=(address, options.clients, share, theirs))
            worker.start()
            self._cleanup.callback(worker.join)
            self._cleanup.callback(ours.send_bytes, b"null")
            self._pipes.append(ours)

    def phase(
        self, name: str, first: int = 0, last: int | None = None, *, title: str = "", **arguments: Any
    ) -> list[dict[str, Any]]:
        """Has a range of the clients do something at the same time; notes how long it took."""
        last = self._options.clients if last is None else last
        command = {"phase": name, "clients": [first, last], "arguments": arguments}
        used, started = self._server_cpu(), time.monotonic()
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(command).encode())
        answers = [json.loads(pipe.recv_bytes()) for pipe in self._pipes]
        if title:
            self.report[f"{title}_s"] = round(time.monotonic() - started, 2)
            self.report[f"{title}_server_cpu_s"] = round(self._server_cpu() - used, 2)
            print(f"{title}: {self.report[f'{title}_s']} s", file=sys.stderr, flush=True)
        for answer in answers:
            self.errors += answer["errors"] + answer["said"]
        if name == "register" and self.errors:
            raise SystemExit("\n".join([f"{len(self.errors)} clients could not register:", *self.errors[:5]]))
        return answers

    def run(self) -> None:
        """Runs all phases."""
        options, report = self._options, self.report
        idle = self._server.memory_info().rss
        self.phase("exist")
        self.phase("register", title="register")
        for title in ("barrier", "again"):
            released = [one for answer in self.phase("barrier", title=title) for one in answer["released"]]
            report[f"{title}_release_spread_s"] = round(max(released) - min(released), 2)
        connections = self._server.net_connections(kind="tcp")
        report["connections"] = sum(one.status == psutil.CONN_ESTABLISHED for one in connections)
        if options.heartbeat:
            self._heartbeats(options.heartbeat)
        if options.resets:
            self._resets(options.resets)
        used = self._server.memory_info().rss
        report["server_rss_mib"] = round(used / 2**20, 1)
        report["server_kib_per_client"] = round((used - idle) / 1024 / options.clients, 1)
        self.phase("state", 0, 1)
        self.phase("expect_departures")
        if options.ending == "vanish" and options.clients > WITNESSES:
            gone = options.clients - WITNESSES
            started = time.monotonic()
            self.phase("vanish", WITNESSES, title="vanish")
            self.phase("witness", 0, WITNESSES, title="witness", gone=gone)
            report["all_departures_told_s"] = round(time.monotonic() - started, 2)
            self.phase("leave", 0, WITNESSES, title="leave")
        else:
            self.phase("leave", title="leave")

    def _resets(self, times: int) -> None:
        took = []
        for _ in range(times):
            started = time.monotonic()
            self.phase("reset")
            took.append(round(time.monotonic() - started, 2))
            self.phase("barrier")
            self.phase("state", 0, 1)
        self.report["resets_s"] = took

    def close(self) -> None:
        """Ends the processes."""
        self._cleanup.close()

    def _heartbeats(self, seconds: float) -> None:
        used = self._server_cpu()
        self.phase("heartbeats")
        time.sleep(seconds)
        answers = self.phase("heartbeats_over")
        took = sorted(one for answer in answers for one in answer["acknowledged"])
        self.report |= {
            "heartbeats": len(took),
            "heartbeats_server_cores": round((self._server_cpu() - used) / seconds, 2),
            "heartbeat_p50_ms": round(took[len(took) // 2] * 1000, 1) if took else None,
            "heartbeat_p99_ms": round(took[int(len(took) * 0.99)] * 1000, 1) if took else None,
            "heartbeat_max_ms": round(took[-1] * 1000, 1) if took else None,
        }

    def _server_cpu(self) -> float:
        times = self._server.cpu_times()
        return float(times.user + times.system)


def broken_limits(report: dict[str, Any]) -> list[str]:
    """Returns which of the promised limits a report breaks."""
    broken = []
    if (joined := report["register_s"] + report["barrier_s"]) > JOIN_LIMIT:
        broken.append(f"registering and meeting took {joined:.1f} s, limit {JOIN_LIMIT:g}")
    if (spread := report["barrier_release_spread_s"]) > SPREAD_LIMIT:
        broken.append(f"a barrier's release was spread over {spread} s, limit {SPREAD_LIMIT:g}")
    if (memory := report["server_kib_per_client"]) > KIB_LIMIT:
        broken.append(f"the server needs {memory} KiB per client, limit {KIB_LIMIT:g}")
    if report["connections"] < report["clients"]:
        broken.append(f"the server has {report['connections']} connections")
    return broken


def raise_file_limit(needed: int) -> None:
    """Sees to enough file descriptors, for this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        with contextlib.suppress(ValueError, OSError):  # may be allowed to root
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            return
        raise SystemExit(f"{needed} file descriptors are needed, and {hard} allowed: see ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def check_ports(needed: int) -> None:
    """Refuses to start what would run out of source ports."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if high - low < needed:
        raise SystemExit(
            f"{needed} source ports are needed, and {high - low} there: widen net.ipv4.ip_local_port_range"
        )


def main() -> int:
    """Runs the phases and reports; returns 1 if there was any error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--heartbeat", type=float, default=0.0, help="seconds of nothing but heartbeats")
    parser.add_argument("--resets", type=int, default=0, help="how often all connections are reset at once")
    parser.add_argument("--ending", choices=("leave", "vanish"), default="leave")
    parser.add_argument("--check", action="store_true", help="hold the project's limits, too")
    parser.add_argument("--data-dir", help="keep the server's state there; default: in memory")
    parser.add_argument("--serve", default="", help="more options of `dmesh serve`, in one argument")
    parser.add_argument("--profile", help="run the server under cProfile, and write what it found there")
    options = parser.parse_args()
    raise_file_limit(options.clients + 500)
    check_ports(options.clients)
    os.environ.setdefault("DMESH_TOKEN", secrets.token_hex(32))
    store = ["--data-dir", options.data_dir] if options.data_dir else ["--memory"]
    profiler = ["-m", "cProfile", "-o", options.profile] if options.profile else []
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [
                sys.executable,
                *profiler,
                "-m",
                "dmesh",
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--no-http",
                *store,
                *shlex.split(options.serve),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split("grpc=")[1].split()[0]
            load = Load(options, address, psutil.Process(server.pid))
            try:
                load.run()
            finally:
                load.close()
        finally:
            server.terminate()
            server.wait()
        log.seek(0)
        complaints = [line.strip() for line in log if " ERROR " in line or "Traceback" in line]
    errors = [*load.errors, *(f"server: {line}" for line in complaints)]
    if options.check:
        errors += broken_limits(load.report)
    print(json.dumps(load.report | {"errors": len(errors)}))
    for error in errors[:10]:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

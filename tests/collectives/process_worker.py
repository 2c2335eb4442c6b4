"""One rank in a process of its own: does what it is told, one JSON object a line, and answers with one.

It can be a member of several clusters at once, one for each size, so that a test session needs but five
processes.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tests.collectives.process_calls import CALLS, MISMATCHES, repeat
from tests.collectives.process_checks import CHECKS, equal
from tests.collectives.properties import run

from dmesh import native
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.local import LocalNetwork
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.backends.tcp.tls import PeerTls
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.collectives.tuning import SEND_BUFFER, SHIPPED, Tuning
from dmesh.errors import CollectiveError, PeerLostError
from dmesh.security.certificates import IdentityFiles

SECRET = b"known to the test and its workers"
LIMIT = 30
"""Seconds after which a forked process ends, whatever becomes of the test."""


class Member:
    """The end of one cluster in this process."""

    def __init__(self, rank: int, size: int, way: str) -> None:
        self.rank, self.size, self.way = rank, size, way
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.communicator: Communicator | None = None
        self.transport: TcpTransport | None = None

    def connect(self, ports: list[int], pids: list[int]) -> None:
        peers = [
            Peer(rank, (f"127.0.0.1:{port}",), 0, f"/job:worker/task:{rank} (host h, pid {pid})")
            for rank, (port, pid) in enumerate(zip(ports, pids, strict=True))
        ]
        self.transport = transport = TcpTransport(
            self.rank, self.listener, lambda: SECRET, b"%08d" % self.size, tls=certified(self.way)
        )
        self.communicator = Communicator(
            self.rank,
            peers,
            transport,
            timeout=60,
            shared_memory=shared_memory(self.way, self.rank),
            tuning=Tuning(streams=2) if self.way in ("dedicated", "encrypted") else SHIPPED,
        )

    @property
    def world(self) -> Group:
        assert self.communicator is not None
        return self.communicator.world


def shared_memory(way: str, rank: int = 0) -> SharedMemoryRegistry | None:
    """What it shares: with `messages` nobody has heard of that. Odd ranks are read where their arrays are."""
    match way:
        case "messages":
            return None
        case "native":
            return SharedMemoryRegistry(1 << 28, native.core(), single_copy_from=1 if rank % 2 else None)
        case "dedicated" | "encrypted":
            return SharedMemoryRegistry(0, native.core())
    raise AssertionError(way)


def certified(way: str) -> PeerTls | None:
    """Return what peers encrypt with; the authority is the test's, which issues one certificate for all."""
    if way != "encrypted":
        return None
    directory = Path(os.environ["DMESH_TEST_CERTIFICATES"])
    return PeerTls(IdentityFiles(directory / "peer.pem", directory / "peer.key"), directory / "ca.pem")


def inputs(world: Group, dtype: Any, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The arrays of all ranks, which every rank knows."""
    return [np.random.default_rng(rank).integers(0, 9, shape).astype(dtype) for rank in range(world.size)]


def check(world: Group, operation: str) -> None:
    """Does one operation in several ways; raises if a result is wrong."""
    rank, size, last = world.rank, world.size, world.size - 1
    for dtype in ("f4", "i8", ml_dtypes.bfloat16):
        for shape in ((), (2, 0), (3, 4), (3, 20_003)):
            all_inputs = inputs(world, dtype, shape)
            x, total = all_inputs[rank], all_inputs[0].copy()
            for other in all_inputs[1:]:
                total += other
            # With NumPy 1, a float32 without dimensions and an int are a float64.
            rows = [np.stack([a + 1] * size).astype(dtype) for a in all_inputs]
            match operation:
                case "all_reduce":
                    equal(world.all_reduce(x), total)
                case "reduce":
                    result = world.reduce(x, "sum", last)
                    equal(result, total) if rank == last else equal(np.array(result is None), np.array(True))
                case "reduce_scatter":
                    equal(world.reduce_scatter(np.stack([x] * size)), total)
                case "broadcast":
                    equal(world.broadcast(x, last), all_inputs[last])
                case "all_gather":
                    equal(world.all_gather(x), np.stack(all_inputs))
                case "gather":
                    result = world.gather(x, last)
                    assert (result is not None) == (rank == last)
                    if result is not None:
                        equal(result, np.stack(all_inputs))
                case "scatter":
                    equal(world.scatter(rows[last] if rank == last else x, last), rows[last][rank])
                case "all_to_all":
                    equal(world.all_to_all(rows[rank]), np.stack([row[rank] for row in rows]))
                case "permute":
                    pairs = [(source, source - 1) for source in range(1, size)]
                    expected = all_inputs[rank + 1] if rank < last else np.zeros_like(x)
                    equal(world.permute(x, pairs), expected)
                case "send_recv":
                    if size > 1:
                        sent = world.send(x, (rank + 1) % size, async_op=True)
                        equal(world.recv(x, (rank - 1) % size), all_inputs[rank - 1])
                        sent.result(60)
                case "exchange":
                    if size > 1:
                        exchange(world, x, all_inputs)
                case "barrier":
                    world.barrier()
    if operation in CHECKS:
        CHECKS[operation](world)


def exchange(world: Group, x: np.ndarray, all_inputs: list[np.ndarray]) -> None:
    """Sends to both neighbours before it receives: without waiting, and small arrays by blocking calls."""
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent = [world.send(x, other, async_op=True) for other in (after, before)]
    got = [world.recv(x, other, async_op=True) for other in (before, after)]
    equal(got[1].result(60), all_inputs[after])
    equal(got[0].result(60), all_inputs[before])
    for future in sent:
        future.result(60)
    if x.nbytes <= SEND_BUFFER:
        world.send(x, after)
        equal(world.recv(x, before), all_inputs[before])


def reduce_for_ever(world: Group) -> dict[str, Any]:
    """All-reduces until somebody dies; tells how that showed."""
    step = 0
    try:
        while True:
            world.all_reduce(np.ones(1000 if step % 2 else 200_000))
            step += 1
            if step == 3:
                answer({"running": True})
    except CollectiveError as error:
        return {
            "error": type(error).__name__,
            "rank": getattr(error, "rank", None),
            "message": str(error),
        }


def kill_in(call: str, way: str, victim: int, size: int) -> list[dict[str, Any]]:
    """Kill a rank while forked processes make a call over and over.

    Returns:
        How the call, and then another one, ended on each of the others.
    """
    members = [Member(rank, size, way) for rank in range(size)]
    ports = [member.listener.getsockname()[1] for member in members]
    processes: list[int] = []
    reports = []
    try:
        for member in members:
            reading, writing = os.pipe()
            process = os.fork()
            if not process:
                live(member, members, ports, call, writing)
            os.close(writing)
            processes.append(process)
            reports.append(os.fdopen(reading))
        for member in members:
            member.listener.close()
        for report in reports:
            first = json.loads(report.readline())
            assert first == {"running": True}, first
        killed = time.monotonic()
        os.kill(processes[victim], signal.SIGKILL)
        answers = [json.loads(report.readline()) for report in reports if report is not reports[victim]]
        for answer in answers:
            answer["seconds"] = answer.pop("at", math.inf) - killed
        return answers
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for report in reports:
            report.close()


def live(member: Member, members: list[Member], ports: list[int], name: str, writing: int) -> None:
    """Make a call until it fails, in a forked process; tell how, and wait for the end."""
    signal.alarm(LIMIT)
    with os.fdopen(writing, "w", buffering=1) as report:

        def tell(**told: Any) -> None:
            print(json.dumps(told), file=report)

        try:
            for other in members:
                if other is not member:
                    other.listener.close()
            member.connect(ports, [os.getppid()] * member.size)
            try:
                repeat(member.world, CALLS[name], lambda: tell(running=True))
            except PeerLostError as error:
                found = {"rank": error.rank, "message": str(error), "at": time.monotonic()}
            try:
                member.world.barrier(timeout=LIMIT / 2)
            except CollectiveError as again:
                tell(**found, again=str(again))
        except BaseException:  # noqa: BLE001
            tell(traceback=traceback.format_exc())
        signal.pause()  # nobody hears of the end of this process while the others still wait


def mismatch(world: Group, name: str) -> dict[str, Any]:
    """Make a call that does not match the others', and reset the group; tell how the call has ended."""
    try:
        MISMATCHES[name][0](world)
    except CollectiveError as error:
        world.reset()
        return {"error": type(error).__name__, "message": str(error)}
    raise AssertionError("it did not fail")


COUNT = 8 << 20
"""Elements of arrays whose reduction takes long enough to stop a rank in the middle of it."""


def check_many(member: Member) -> dict[str, Any]:
    """Makes a call of each kind, of short and longer arrays; tells with how many ranks it is connected."""
    world = member.world
    rank, size, last = world.rank, world.size, world.size - 1
    for count in (1, 500, 20_000):
        arrays = [np.random.default_rng([at, count]).normal(size=count).astype("f4") for at in range(size)]
        x, total = arrays[rank], arrays[0].copy()
        for other in arrays[1:]:
            total += other
        world.barrier()
        equal(world.all_reduce(x), total)  # the same bits as a fold in the order of ranks
        equal(world.broadcast(x, 3), arrays[3])
        result = world.reduce(x, "sum", last)
        assert result is None if rank != last else (result == total).all()
        if count > 500:
            continue
        rows, everything = np.stack([x] * size), np.stack(arrays)
        equal(world.all_gather(x), everything)
        equal(world.all_to_all(rows), everything)
        equal(world.reduce_scatter(rows), total)
        equal(world.scatter(everything if rank == 1 else x, 1), x)
        result = world.gather(x, 2)
        assert result is None if rank != 2 else (result == everything).all()
        ring = [(at, (at + 1) % size) for at in range(size)]
        equal(world.permute(x, ring), arrays[rank - 1])
    names = [backend.name for backend in world.current.backends]
    if "hierarchical" in names:
        large = np.random.default_rng(0).integers(0, 9, (3, 300_000)).astype("f4")  # whose sums are exact
        x, total = large[rank % 3], sum(large[at % 3] for at in range(size))
        equal(world.all_reduce(x), total)
        equal(world.broadcast(x, 5), large[2])
        result = world.reduce(x, "mean", last)
        assert result is None if rank != last else np.allclose(result, total / size, 1e-6)
        equal(world.all_gather(x[:2000]), np.stack([large[at % 3, :2000] for at in range(size)]))
        part = x[: 2000 * size].reshape(size, -1)
        equal(world.reduce_scatter(part), total[: 2000 * size].reshape(size, -1)[rank])
    assert isinstance(member.transport, TcpTransport)
    connections = member.transport._connections
    return {"backends": names, "peers": len({*connections.dialed, *connections.accepted} - {rank})}


def reduce_in_shared_memory(communicator: Communicator, peer: int | None) -> dict[str, Any]:
    """All-reduces in shared memory; stops the peer, if there is one, while it writes to this rank's result.

    Returns:
        How the call ended, and whether a later array kept its contents when the peer went on.
    """
    assert communicator.shared_memory is not None
    pool = communicator.pool
    assert pool is not None
    group = communicator.new_group([0, 1], "late")
    group.barrier()
    x, out = pool.empty(COUNT, float), pool.empty(COUNT, float)
    x[:], out[:] = 1, 0
    group.barrier()
    stopper = threading.Thread(target=_stop_when_written, args=(peer, out[COUNT // 2 :]))
    if peer is not None:
        stopper.start()
    try:
        group.all_reduce(x, out=out, timeout=2.0 if peer is not None else 60.0)
        error = ""
    except CollectiveError as failure:
        error = type(failure).__name__
    if peer is None:
        return {"error": error}
    stopper.join()
    in_time = not out[-1]
    del group, out
    gc.collect()
    later = [pool.empty(COUNT, float)]  # as large as the one that is gone
    later[0][:] = 7
    os.kill(peer, signal.SIGCONT)
    answer({"error": error, "in time": in_time})
    sys.stdin.readline()  # when the peer has noticed
    return {"kept": bool((later[0] == 7).all())}


def _stop_when_written(process: int, part: Any) -> None:
    while not part[0]:
        pass
    os.kill(process, signal.SIGSTOP)


def interrupt_waits(rounds: int) -> dict[str, Any]:
    """Has Ctrl-C come at any moment of a wait, again and again; tells how often that left a lock locked."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    locked = interrupted = 0
    for number in range(rounds):
        channel = LocalNetwork(2).transport(0).message_queue.open(1, 1, b"")
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.0000017 * (number % 300))
            while True:
                channel.wait([], 1.0)
        except KeyboardInterrupt:
            interrupted += 1
        closing = threading.Thread(target=channel.close, daemon=True)
        closing.start()
        closing.join(10)
        if closing.is_alive():
            locked += 1
            break
    return {"interrupted": interrupted, "locked": locked}


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    members: dict[int, Member] = {}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            match order["do"]:
                case "listen":
                    member = members[order["size"]] = Member(order["rank"], order["size"], order["way"])
                    result: dict[str, Any] = {"port": member.listener.getsockname()[1]}
                case "connect":
                    members[order["size"]].connect(order["ports"], order["pids"])
                    result = {}
                case "check":
                    member = members[order["size"]]
                    check(member.world, order["operation"])
                    over_tcp = member.size > 1 and member.way in ("dedicated", "encrypted")
                    assert (member.world.backend("tcp") is not None) == over_tcp
                    result = {}
                case "run":
                    run(members[order["size"]].world, order["cases"])
                    result = {}
                case "check many":
                    result = check_many(members[order["size"]])
                case "reduce for ever":
                    result = reduce_for_ever(members[order["size"]].world)
                case "reduce in shared memory":
                    member = members[order["size"]]
                    assert member.communicator is not None
                    result = reduce_in_shared_memory(member.communicator, order.get("peer"))
                case "interrupt waits":
                    result = interrupt_waits(order["rounds"])
                case "kill in":
                    result = {"answers": kill_in(order["call"], order["way"], order["victim"], 3)}
                case "mismatch":
                    result = mismatch(members[order["size"]].world, order["name"])
        except Exception:  # noqa: BLE001
            result = {"traceback": traceback.format_exc()}
        answer(result)
    for member in members.values():
        if member.communicator is not None:
            member.communicator.close(linger=1.0)


if __name__ == "__main__":
    main()

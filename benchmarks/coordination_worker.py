"""Processes of `coordination.py`: clients of one coordination service, or JAX's service itself.

    python benchmarks/coordination_worker.py clients dmesh   # commands on stdin, one JSON object a line
    python benchmarks/coordination_worker.py serve-jax COUNT HEARTBEAT_TIMEOUT

The program runs in two environments, dmesh's and one with jaxlib, so it imports neither library before a
command names one. As `clients`, it imports the client library once and then forks as many clients as each
case needs, before the library has started a thread: 128 imports of a second each would measure the file
system. Each client is a process with a connection of its own. Every phase begins at the same instant of the
monotonic clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, Protocol

VALUE = b"v" * 64
KEYS = 16
"""Keys that each client writes in turn."""
LIMIT = 120
"""Seconds that any one call may take."""
SAMPLES = 4000
"""Latencies that a client hands back of one phase, evenly chosen."""
_PR_SET_PDEATHSIG = 1


class Client(Protocol):
    """What each system's client can do, in words that both have."""

    def register(self) -> None: ...
    def meet(self) -> None: ...
    def barrier(self, name: str) -> None: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def leave(self) -> None: ...


class DmeshClient:
    """The SDK's own agent, as `dmesh.coordination` uses it."""

    def __init__(self, case: dict[str, Any], index: int) -> None:
        from dmesh.coordination.agent import Agent, Identity

        jobs = {"worker": tuple(f"client:{1 + one}" for one in range(case["count"]))}
        identity = Identity.of_this_process("worker", index, jobs, cluster="bench")
        self._agent = Agent(case["address"], identity, connect_timeout=LIMIT, announce=lambda text: None)

    def register(self) -> None:
        self._agent.start()

    def meet(self) -> None:
        self.barrier("joined")  # as dmesh.initialize does; JAX's connect() returns when all have come

    def barrier(self, name: str) -> None:
        self._agent.barrier(name, timeout=LIMIT)

    def set(self, key: str, value: bytes) -> None:
        self._agent.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        return self._agent.key_value_try_get(key)

    def leave(self) -> None:
        self._agent.leave()


class JaxClient:
    """JAX's client, set as `jax.distributed.initialize` sets it but for the heartbeats."""

    def __init__(self, case: dict[str, Any], index: int) -> None:
        from jaxlib import _jax

        self._client = _jax.get_distributed_runtime_client(
            case["address"],
            index,
            init_timeout=LIMIT,
            shutdown_timeout=LIMIT,
            heartbeat_timeout=case["heartbeat_timeout"],
            shutdown_on_destruction=False,
            use_compression=True,
        )

    def register(self) -> None:
        self._client.connect()

    def meet(self) -> None: ...

    def barrier(self, name: str) -> None:
        self._client.wait_at_barrier(name, LIMIT * 1000)

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        return self._client.key_value_try_get_bytes(key)  # type: ignore[no-any-return]

    def leave(self) -> None:
        self._client.shutdown()


CLIENTS: dict[str, type[DmeshClient] | type[JaxClient]] = {"dmesh": DmeshClient, "jax": JaxClient}


class Runner:
    """One client process: does what it is told, phase after phase."""

    def __init__(self, make: type[DmeshClient] | type[JaxClient], case: dict[str, Any], index: int) -> None:
        self._make, self._case, self._index = make, case, index
        self._client: Client
        self._written: list[str] = []
        self._random = random.Random(index)

    def join(self, start: float) -> dict[str, Any]:
        self._client = self._make(self._case, self._index)
        self._client.register()
        registered = time.monotonic()
        self._client.meet()
        return {"registered": registered - start, "joined": time.monotonic() - start}

    def barrier(self, start: float, *, name: str, times: int, spread: float = 0.0) -> dict[str, Any]:
        clock, client = time.monotonic, self._client
        entered, left = [], []
        for _ in range(times):
            if spread:
                time.sleep(self._random.uniform(0, spread))
            entered.append(clock())
            client.barrier(name)
            left.append(clock())
        return {"entered": entered, "left": left}

    def set(self, start: float, *, seconds: float) -> dict[str, Any]:
        client = self._client
        keys = [f"bench/{self._index}/{number}" for number in range(KEYS)]

        def one(number: int) -> None:
            client.set(keys[number % KEYS], VALUE)

        report = _repeat(one, start + seconds)
        self._written = keys[: report["calls"]]
        return report

    def get(self, start: float, *, seconds: float) -> dict[str, Any]:
        client, keys = self._client, self._written

        def one(number: int) -> None:
            if client.get(keys[number % len(keys)]) != VALUE:
                raise AssertionError(f"{keys[number % len(keys)]} does not have the value that was set")

        return _repeat(one, start + seconds)

    def doom(self, start: float) -> dict[str, Any]:
        """Waits at a barrier that a participant will not live to see."""
        try:
            self._client.barrier("doom")
        except Exception as error:  # noqa: BLE001 -- each system has its own; what counts is when
            return {"told": time.monotonic(), "words": str(error)[:300]}
        raise AssertionError("the barrier of a killed client succeeded")

    def leave(self, start: float) -> dict[str, Any]:
        self._client.leave()
        return {"left": time.monotonic() - start}


def _repeat(action: Any, end: float) -> dict[str, Any]:
    clock = time.perf_counter
    took: list[float] = []
    began = clock()
    while time.monotonic() < end or not took:
        before = clock()
        action(len(took))
        took.append(clock() - before)
    elapsed = clock() - began
    step = len(took) // SAMPLES + 1
    return {"calls": len(took), "elapsed": elapsed, "took": [round(one, 7) for one in took[::step]]}


def live(runner: Runner, pipe: socket.socket) -> None:
    """Obeys until the pipe closes."""
    commands = pipe.makefile("r")
    for line in commands:
        command = json.loads(line)
        phase, start = command.pop("phase"), command.pop("start")
        time.sleep(max(0.0, start - time.monotonic()))
        used = time.process_time()
        try:
            answer = getattr(runner, phase)(start, **command)
        except Exception:  # noqa: BLE001 -- reported to the one who asked
            answer = {"failure": traceback.format_exc(limit=-3)}
        answer["cpu"] = time.process_time() - used
        pipe.sendall(json.dumps(answer).encode() + b"\n")


class Children:
    """The clients of one case, seen from the process that forked them."""

    def __init__(self, make: type[DmeshClient] | type[JaxClient], case: dict[str, Any]) -> None:
        self._pids: list[int] = []
        self._pipes: list[socket.socket] = []
        for index in range(case["count"]):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if not pid:
                _die_with_parent()
                for pipe in (*self._pipes, ours):
                    pipe.close()
                with contextlib.suppress(BaseException):
                    live(Runner(make, case, index), theirs)
                os._exit(0)
            theirs.close()
            self._pids.append(pid)
            self._pipes.append(ours)
        self._files = [pipe.makefile("r") for pipe in self._pipes]

    def phase(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Has all of them do one thing, and returns their answers."""
        # Later than any of them needs to read this, also when the machine is busy.
        command["start"] = time.monotonic() + 0.05 + 0.002 * len(self._pids)
        self._send(command, range(len(self._pids)))
        answers = []
        for index, file in enumerate(self._files):
            line = file.readline()
            answers.append(json.loads(line) if line else {"failure": f"client {index} died"})
        return answers

    def detect(self, delay: float) -> list[dict[str, Any]]:
        """Kills the last one, and returns when each of the others was told: in words, or by its own end."""
        victim = len(self._pids) - 1
        self._send({"phase": "doom", "start": time.monotonic()}, range(victim))
        time.sleep(delay)
        killed = time.monotonic()
        os.kill(self._pids[victim], signal.SIGKILL)
        answers: list[dict[str, Any]] = []
        waiting = {self._pipes[index].fileno(): index for index in range(victim)}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], LIMIT)
            if not ready:
                answers.append({"failure": f"clients {sorted(waiting.values())} were told nothing"})
                break
            for fileno in ready:
                seen = time.monotonic()
                index = waiting.pop(fileno)
                line = self._files[index].readline()
                answer = json.loads(line) if line else {"told": seen, "words": "the client aborted"}
                if "told" in answer:
                    answer["told"] -= killed
                answers.append(answer)
        return answers

    def end(self) -> None:
        """Ends those that are left."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for file, pipe in zip(self._files, self._pipes, strict=True):
            file.close()
            pipe.close()

    def _send(self, command: dict[str, Any], to: range) -> None:
        for index in to:
            with contextlib.suppress(BrokenPipeError):
                self._pipes[index].sendall(json.dumps(command).encode() + b"\n")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_clients(system: str) -> None:
    """Obeys the benchmark: forks clients, sends them through the phases, ends them."""
    _die_with_parent()
    make = CLIENTS[system]
    if make is JaxClient:
        from jaxlib import _jax  # noqa: F401 -- before the fork, for all clients
    else:
        import dmesh.coordination.agent  # noqa: F401
    children: Children | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        answer: object = None
        if do == "fork":
            children = Children(make, command)
        elif children is None:
            raise RuntimeError(f"{do!r} before there are clients")
        elif do == "phase":
            answer = children.phase(command)
        elif do == "detect":
            answer = children.detect(command["delay"])
        elif do == "end":
            children.end()
            children = None
        print(json.dumps(answer), flush=True)


def serve_jax(count: int, heartbeat_timeout: int) -> None:
    """Runs JAX's coordination service for a number of clients, until it is killed."""
    _die_with_parent()
    from jaxlib import _jax

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=heartbeat_timeout)
    print(f"grpc={address}", flush=True)
    signal.pause()
    del service


if __name__ == "__main__":
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if sys.argv[1] == "clients":
        run_clients(sys.argv[2])
    else:
        serve_jax(int(sys.argv[2]), int(sys.argv[3]))

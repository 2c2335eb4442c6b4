"""What a `ClientProcess` runs: does what lines of JSON on its standard input say; see `processes.py`.

Answers are lines of JSON on the descriptor that was its standard output; the program's own prints go there as
they are. Ends when its standard input ends.
"""

from __future__ import annotations

import enum
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback

import numpy as np

import dmesh
from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.retry import Patience, RetryPolicy


def write(told: dict) -> None:
    # One write below PIPE_BUF would be atomic by itself; larger ones need the lock.
    with _writing:
        line = json.dumps(told, default=plain).encode() + b"\n"
        while line:
            line = line[os.write(1, line) :]


def say(event: str, **fields) -> None:
    """Tells the test something by the way."""
    write({"event": event, "at": time.monotonic(), **fields})


def plain(value):
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "rank") and hasattr(value, "incarnation"):
        return member(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return repr(value)


def member(who) -> dict:
    process = getattr(who, "process", None)
    told = {
        "rank": who.rank,
        "task": who.task,
        "incarnation": who.incarnation,
        "state": who.state.name,
        "host": getattr(process, "host", ""),
        "pid": getattr(process, "pid", 0),
        "reason": getattr(who, "reason", ""),
    }
    for name in ("last_seen_age", "registered_age", "liveness", "activity"):
        if hasattr(who, name):
            value = getattr(who, name)
            told[name] = value.name if isinstance(value, enum.Enum) else value
    return told


def describe(error: BaseException, at: float) -> dict:
    return {
        "kind": type(error).__name__,
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "members": [member(who) for who in getattr(error, "members", ())],
        "fields": {
            name: value for name, value in vars(error).items() if isinstance(value, (int, str, float, bool))
        },
        "trace": traceback.format_exc()[-4000:],
        "at": at,
    }


def run(number: int, source: str) -> None:
    started = time.monotonic()
    try:
        try:
            code = compile(source, "<test>", "eval")
        except SyntaxError:
            names.pop("result", None)
            exec(compile(source, "<test>", "exec"), names)
            value = names.get("result")
        else:
            value = eval(code, names)
    except Exception as error:  # noqa: BLE001 -- the test is told
        write({"id": number, "error": describe(error, time.monotonic())})
    else:
        write({"id": number, "value": value, "started": started, "ended": time.monotonic()})


def departed(who) -> None:
    say("departed", **member(who))


def failed(error, *rest, **more) -> None:
    say("failure", kind=type(error).__name__, message=str(error))


def join() -> None:
    if mode == "sdk":
        dmesh.initialize_accelerator_system()
        names["agent"] = current_agent()
        listen(names["agent"])
        return
    agent = names["agent"]
    listen(agent)
    agent.start()


def listen(agent) -> None:
    agent.add_departure_listener(departed)
    agent.add_failure_listener(failed)
    if hasattr(agent, "add_liveness_listener"):
        agent.add_liveness_listener(lambda who: say("liveness", **member(who)))


def read() -> None:
    buffer = b""
    while chunk := os.read(0, 65536):
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["thread"]:
                threading.Thread(target=run, args=(order["id"], order["source"]), daemon=True).start()
            else:
                orders.put(order)
    orders.put(None)


mode, address, index, size, cluster = (
    sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
)  # fmt: skip
_writing = threading.Lock()
orders: queue.SimpleQueue = queue.SimpleQueue()
names = {
    "agent": None, "dmesh": dmesh, "np": np, "os": os, "signal": signal, "sys": sys, "threading": threading,
    "time": time, "say": say, "join": join, "Agent": Agent, "Identity": Identity, "Patience": Patience,
    "RetryPolicy": RetryPolicy,
}  # fmt: skip

if mode == "agent":
    jobs = {"worker": tuple(f"host:{port}" for port in range(1, size + 1))}
    wishes = {}
    if os.environ.get("FAULTS_SETTINGS"):
        from dmesh.coordination.cluster_settings import ClusterSettings, RestartPolicy

        names["RestartPolicy"] = RestartPolicy
        wishes["settings"] = ClusterSettings(**eval(f"dict({os.environ['FAULTS_SETTINGS']})", names))
    identity = Identity.of_this_process("worker", index, jobs, cluster=cluster, **wishes)
    names["identity"] = identity
    options = eval(f"dict({os.environ.get('FAULTS_OPTIONS', '')})", names)
    options.setdefault("connect_timeout", 90.0)
    names["agent"] = Agent(address, identity, **options)

threading.Thread(target=read, daemon=True).start()
while (order := orders.get()) is not None:
    run(order["id"], order["source"])

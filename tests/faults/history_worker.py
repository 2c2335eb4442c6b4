"""A client that uses the key-value store as fast as it can, and writes down what it does and what it is told.

    python history_worker.py ADDRESS INDEX SIZE FILE SEED

Ends when its standard input does, or with 3 when it is fenced. Every line of FILE is written at once, and
before what it announces is done, so that a kill -9 at any time leaves a history that says what may have
happened; see `history.load`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.cluster_settings import ClusterSettings, RestartPolicy
from dmesh.errors import (
    ClientIdTakenError,
    DMeshError,
    FencedError,
    KeyExistsError,
    KeyTypeError,
    WatchCompactedError,
)

KEYS = 4
"""Keys that all clients work on at a time."""
GENERATION = 1.5
"""Seconds until they go on to new keys, so that the history of each stays short enough to be searched."""
CERTAIN = (KeyExistsError, KeyTypeError)
KINDS = ("set", "set", "create", "get", "get", "get", "cas", "cas", "increment", "delete", "list")


def write(**told: object) -> None:
    os.write(log, json.dumps(told).encode() + b"\n")


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def execute(kind: str, key: str, arguments: tuple) -> tuple[object, int]:
    """Does one thing; returns the answer in the model's words, and the revision if it names one."""
    match kind:
        case "set" | "create":
            return "ok", agent.key_value_set(key, arguments[0], allow_overwrite=kind == "set")
        case "get":
            return text(agent.key_value_try_get(key)), 0
        case "cas":
            result = agent.key_value_compare_and_set(key, *arguments)
            return [result.succeeded, text(result.value)], result.revision
        case "increment":
            return agent.key_value_increment(key, arguments[0]), 0
        case "delete":
            return agent.key_value_delete(key), 0
    snapshot = agent.key_value_list(key)
    return {name: value.decode() for name, value in snapshot.items()}, snapshot.revision


def operate() -> None:
    """Random operations until the end."""
    last: dict[str, str | None] = {}
    for number in itertools.count(1):
        if over.is_set():
            return
        generation = int(time.monotonic() / GENERATION)
        key = f"{generation}/{chance.randrange(KEYS)}"
        kind = chance.choice(KINDS)
        mine = chance.choice([f"{index}-{os.getpid()}-{number}", str(chance.randrange(100))])
        arguments: tuple = ()
        if kind in ("set", "create"):
            arguments = (mine,)
        elif kind == "cas":
            arguments = (last.get(key), mine)
        elif kind == "increment":
            arguments = (chance.choice([1, 1, 5, -2]),)
        elif kind == "list":
            key = f"{generation}/"
        write(id=number, kind=kind, key=key, arguments=arguments, at=time.monotonic())
        try:
            answer, revision = execute(kind, key, arguments)
        except CERTAIN as error:
            write(id=number, answer=type(error).__name__, revision=0, at=time.monotonic())
        except DMeshError as error:
            write(id=number, unknown=type(error).__name__, words=str(error)[:200], at=time.monotonic())
            if isinstance(error, FencedError):
                os._exit(3)  # the test starts another one
            if over.wait(0.05):
                return
        else:
            write(id=number, answer=answer, revision=revision, at=time.monotonic())
            if kind == "get":
                last[key] = answer  # type: ignore[assignment]


def watch() -> None:
    """Watches everything, now from the beginning and now from where it stopped, for a while each time."""
    following = 1
    for number in itertools.count():
        if over.is_set():
            return
        first = following if number % 4 else 1
        try:
            with agent.watch("", first) as watching:
                write(watch=number, first=first)
                stop = time.monotonic() + chance.uniform(0.5, 4)
                timer = threading.Timer(max(0.0, stop - time.monotonic()), watching.close)
                timer.start()
                for event in watching:
                    write(event=[event.revision, event.key, text(event.value)])
                    following = max(following, event.revision + 1)
                timer.cancel()
        except WatchCompactedError as error:
            write(watch=-1, first=0, compacted=str(error)[:200])
            return
        except DMeshError:
            over.wait(0.05)


def follow() -> None:
    """Watches everything from the beginning to the end: what all else is compared with."""
    with agent.watch("", 1) as watching:
        write(watch="journal", first=1)
        for event in watching:
            write(event=[event.revision, event.key, text(event.value)])
            if event.key == "end":
                return


address, index, size, file, seed = (
    sys.argv[1],
    int(sys.argv[2]),
    int(sys.argv[3]),
    sys.argv[4],
    sys.argv[5],
)
chance = random.Random(seed)
log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
over = threading.Event()
jobs = {"worker": tuple(f"host:{port}" for port in range(1, size + 1))}
while True:
    identity = Identity.of_this_process(
        "worker",
        index,
        jobs,
        cluster="history",
        settings=ClusterSettings(restart_policy=RestartPolicy.REJOIN),
    )
    agent = Agent(address, identity, connect_timeout=90.0, announce=lambda words: None)
    try:
        agent.start()
        break
    except ClientIdTakenError:  # the predecessor was killed while the server was away, and has its lease
        time.sleep(0.5)
print("joined", flush=True)
jobs_of_mine = [follow] if index == 0 else [operate, watch]
threads = [threading.Thread(target=job, daemon=True) for job in jobs_of_mine]
for thread in threads:
    thread.start()
sys.stdin.read()
if index == 0:
    agent.key_value_set("end", "", allow_overwrite=True)
over.set()
for thread in threads:
    thread.join(60)
print("done" if not any(thread.is_alive() for thread in threads) else "hangs", flush=True)
agent.leave()

"""A client that takes a lock, a semaphore and leadership again and again, and writes down what it is told.

    python lock_worker.py ADDRESS INDEX SIZE FILE SEED

Stops at the first line of its standard input, and leaves at its end; ends with 3 when it is fenced. Client 0
takes nothing, but writes down every change of every key, and each leader. Each line of FILE is written at
once, and before what it announces is done.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import sys
import threading
import time

from lock_history import PLACES  # beside this script

from dmesh.coordination import Election, Increment, Lock, Put, Semaphore
from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.cluster_settings import ClusterSettings, RestartPolicy
from dmesh.errors import (
    ClientIdTakenError,
    CoordinatorUnavailableError,
    DMeshError,
    FencedError,
    LockLostError,
    LockTimeoutError,
)


def write(what: str, **told: object) -> None:
    os.write(log, json.dumps({"what": what, "at": time.monotonic(), **told}).encode() + b"\n")


def work(kind: str) -> None:
    while not over.is_set():
        place: Lock | Semaphore | Election
        match kind:
            case "lock":
                place = Lock("x", agent=agent)
            case "semaphore":
                place = Semaphore("x", PLACES[kind], agent=agent)
            case _:
                place = Election("x", agent=agent)
        try:
            token = (place.campaign if isinstance(place, Election) else place.acquire)(timeout=5)
        except (LockTimeoutError, LockLostError):
            continue
        except DMeshError as error:
            give_up(error)
            continue
        write("acquired", kind=kind, token=token)
        try:
            guarded(kind, place)
            write("releasing", kind=kind, token=token)
            place.release()
            write("released", kind=kind, token=token)
        except LockLostError:
            write("lost", kind=kind)
        except DMeshError as error:
            give_up(error)


def guarded(kind: str, place: Lock | Semaphore | Election) -> None:
    """Changes what the place protects, as long as this process holds it."""
    for number in range(chance.randrange(1, 6)):
        done = agent.transaction(
            [place.condition], [Put(f"guarded/{kind}", f"{place.token}/{number}"), Increment(f"count/{kind}")]
        )
        write("guarded", kind=kind, token=place.token, succeeded=done.succeeded, revision=done.revision)
        if not done or over.wait(chance.uniform(0, 0.05)):
            return


def give_up(error: DMeshError) -> None:
    write("failed", error=type(error).__name__, words=str(error)[:200])
    if isinstance(error, FencedError):
        os._exit(3)  # the test starts another one
    over.wait(0.05)


def follow() -> None:
    with agent.watch("", 1) as watching:
        write("journal")
        while True:
            try:
                event = next(watching)
            except CoordinatorUnavailableError as error:  # the watch goes on where it stopped
                give_up(error)
                continue
            value = None if event.value is None else event.value.decode()
            write("event", revision=event.revision, key=event.key, value=value)
            if event.key == "end":
                return


def observe() -> None:
    with contextlib.suppress(DMeshError):  # it ends with the agent
        for leader in Election("x", agent=agent).observe():
            write("leader", token=leader.token if leader else 0)


address, index, size, file, seed = (sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
chance = random.Random(seed)
log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
over = threading.Event()
jobs = {"worker": tuple(f"host:{port}" for port in range(1, size + 1))}
while True:
    settings = ClusterSettings(restart_policy=RestartPolicy.REJOIN)
    identity = Identity.of_this_process("worker", index, jobs, cluster="locks", settings=settings)
    agent = Agent(address, identity, connect_timeout=90.0, announce=lambda words: None)
    try:
        agent.start()
        break
    except ClientIdTakenError:  # the predecessor was killed while the server was away, and has its lease
        time.sleep(0.5)
if index:
    agent.key_value_set(f"alive/{index}", str(os.getpid()), allow_overwrite=True, ephemeral=True)
write("joined", pid=os.getpid())
if index == 0:
    threading.Thread(target=observe, daemon=True).start()
works = [functools.partial(work, kind) for kind in PLACES] if index else [follow]
threads = [threading.Thread(target=one, daemon=True) for one in works]
for thread in threads:
    thread.start()
sys.stdin.readline()
if index == 0:
    write("alive", keys=agent.key_value_list("alive/").text())
    agent.key_value_set("end", "", allow_overwrite=True)
over.set()
for thread in threads:
    thread.join(60)
write("hangs" if any(thread.is_alive() for thread in threads) else "done")
sys.stdin.read()
agent.leave()

"""What clients do while a test breaks things, and what must hold of it afterwards.

`Traffic` runs in the client's process (`worker.py` imports it) and writes down what it did; `check` reads
what all clients wrote and finds every acknowledged write that is lost, every increment that counted twice,
every barrier that let somebody through too early or told two outcomes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BARRIER = "traffic/step"
LAST = "traffic/last"


class Traffic:
    """One client's part: it sets, deletes, increments and meets the others, step by step, until told to stop.

    Args:
        agent: With which it does it.
        path: Where its history goes.
        keep: How many keys of its own it uses in turn; 0 for a new one at each step.
        pause: Seconds between two steps.
    """

    def __init__(self, agent: Any, path: str, keep: int = 0, pause: float = 0.0) -> None:
        self.agent = agent
        self.rank = agent.identity.index
        self.keep = keep
        self.pause = pause
        self.steps = 0
        self.stop = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"what": what, "at": time.monotonic(), **fields}).encode() + b"\n")

    def timed(self, what: str, call: Any, **fields: Any) -> Any:
        """Calls, and notes what it answered and how long it took; nothing is noted of what raises."""
        begun = time.monotonic()
        answer = call()
        self.note(what, took=time.monotonic() - begun, answer=answer, **fields)
        return answer

    def run(self) -> int:
        """Does steps until rank 0 was told to stop, which all learn at the same step; returns how many."""
        agent, rank, last = self.agent, self.rank, None
        while last is None or self.steps < last:
            step = self.steps
            slot = step % self.keep if self.keep else step
            key, value = f"traffic/own/{rank}/{slot}", f"{rank}:{step}"
            self.timed("set", lambda: agent.key_value_set(key, value, True), key=key, value=value)  # noqa: B023
            self.timed("own", lambda: agent.key_value_increment(f"traffic/count/{rank}"))
            self.timed("all", lambda: agent.key_value_increment("traffic/count/all"))
            passing = f"traffic/passing/{rank}/{slot}"
            self.timed("set", lambda: agent.key_value_set(passing, value, True), key=passing, value=value)  # noqa: B023
            self.timed("delete", lambda: agent.key_value_delete(passing), key=passing)  # noqa: B023
            if rank == 0 and self.stop and last is None:
                last = step + 3
                agent.key_value_set(LAST, str(last), True)
            self.note("arrive", step=step)
            self.timed("pass", lambda: agent.barrier(BARRIER, timeout=300), step=step)
            self.steps += 1
            if last is None:
                # Rank 0 wrote it before it arrived: whoever passed the same barrier sees the same.
                found = agent.key_value_try_get(LAST)
                last = int(found) if found is not None else None
            time.sleep(self.pause)
        self.note("end", steps=self.steps)
        return self.steps


@dataclass
class Verdict:
    """What the histories say."""

    steps: int = 0
    """Barriers passed by all."""
    operations: int = 0
    """Acknowledged key-value operations and barriers."""
    problems: list[str] = field(default_factory=list)
    """What must not be."""
    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Seconds that each kind of operation took."""


def check(histories: list[Path], listed: dict[str, str]) -> Verdict:
    """Judges the histories of all clients by what the store has in the end.

    Args:
        histories: The files, by rank.
        listed: All keys under `traffic/` with their values, read after everything was over.
    """
    verdict = Verdict()
    wanted: dict[str, str] = {}
    gone: set[str] = set()
    arrivals: dict[int, dict[int, float]] = {}
    passes: dict[int, dict[int, float]] = {}
    totals: Counter[int] = Counter()
    ends = set()
    for rank, path in enumerate(histories):
        own = 0
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            what = entry["what"]
            if "took" in entry:
                verdict.operations += 1
                verdict.latencies.setdefault(what, []).append(entry["took"])
            if what == "set":
                wanted[entry["key"]] = entry["value"]
                gone.discard(entry["key"])
            elif what == "delete":
                wanted.pop(entry["key"], None)
                gone.add(entry["key"])
                if entry["answer"] != 1:
                    verdict.problems.append(f"rank {rank} deleted {entry['key']}: {entry['answer']} keys")
            elif what == "own":
                own += 1
                if entry["answer"] != own:
                    verdict.problems.append(f"rank {rank}: its increment {own} answered {entry['answer']}")
            elif what == "all":
                totals[entry["answer"]] += 1
            elif what == "arrive":
                arrivals.setdefault(entry["step"], {})[rank] = entry["at"]
            elif what == "pass":
                if rank in passes.setdefault(entry["step"], {}):
                    verdict.problems.append(f"rank {rank} passed step {entry['step']} twice")
                passes[entry["step"]][rank] = entry["at"]
            elif what == "end":
                ends.add(entry["steps"])
        if listed.get(f"traffic/count/{rank}") != str(own):
            verdict.problems.append(
                f"rank {rank} was acknowledged {own} increments, the store has "
                f"{listed.get(f'traffic/count/{rank}')}"
            )
    for key, value in wanted.items():
        if listed.get(key) != value:
            verdict.problems.append(f"acknowledged write lost: {key}={value}, now {listed.get(key)}")
    verdict.problems += [f"deleted key is back: {key}" for key in gone if key in listed]
    doubled = [number for number, count in totals.items() if count > 1]
    if doubled or sorted(totals) != list(range(1, len(totals) + 1)):
        verdict.problems.append(
            f"the shared counter's answers are not 1 to {len(totals)}; doubled: {doubled[:10]}"
        )
    if listed.get("traffic/count/all") != str(sum(totals.values())):
        verdict.problems.append("the shared counter is not the number of its increments")
    for step, passed in sorted(passes.items()):
        came = arrivals.get(step, {})
        if len(passed) != len(histories):
            verdict.problems.append(f"step {step} was passed by {sorted(passed)} only")
        elif min(passed.values()) < max(came.values()):
            verdict.problems.append(f"somebody passed step {step} before all had arrived")
        else:
            verdict.steps += 1
    if len(ends) != 1:
        verdict.problems.append(f"the clients ended after different numbers of steps: {sorted(ends)}")
    return verdict


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def describe(verdict: Verdict) -> str:
    """A line for the log."""
    medians = {what: round(statistics.median(took) * 1000, 1) for what, took in verdict.latencies.items()}
    return f"{verdict.steps} steps, {verdict.operations} operations, medians in ms: {medians}"

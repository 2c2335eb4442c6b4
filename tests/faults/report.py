# ruff: noqa: E501 -- the rows of a table
"""Fills the table of docs/robustness.md: `python -m tests.faults.report` after `make faults`.

What is injected, what must hold and where the tests are stands here; the results come from the lines that the
tests added to the figures' file (see `figures.py`). Prints the table; with `--write`, puts it between the
marks in the document.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.faults.figures import FILE, summary

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "robustness.md"
BEGIN, END = (
    "<!-- table: begin (make faults; python -m tests.faults.report --write) -->",
    "<!-- table: end -->",
)


@dataclass(frozen=True)
class Row:
    """One scenario."""

    key: str
    """As in the tests' file names, `test_KEY_...`."""
    injected: str
    """What is done to whom."""
    criterion: str
    """What must hold."""


ROWS = (
    Row("kill", "`kill -9` of the server 100 times at random instants (during traffic, while clients come back, "
        "while it starts), 4 clients that set, delete, increment and meet at barriers all the time",
        "no acknowledged write is lost, no increment counted twice, no barrier passed early, twice or by some clients only, no client falsely declared dead; the programs see nothing but latency"),
    Row("s01", "`kill -9` of the server with 1-7 of 8 at a barrier, or right after the last arrival; restart",
        "clients come back by themselves; the barrier completes exactly once for each, within 5 s of the port; "
        "the new incarnation is reported; with SQLite and with the memory store"),
    Row("s02", "the server dies at each step of a commit and of a compaction (failpoints)",
        "every acknowledged write is there, none is half done, revisions never go back"),
    Row("s03", "server away, or stopped, for 2.5 leases", "no client is declared dead, neither then nor a lease later"),
    Row("s04", "`kill -9` of a client for which three others wait", "each waiter's error names rank, host, pid and "
        "last-seen age, within lease + heartbeat; fail-fast: the task slot stays empty; rejoin: the others wait for the successor and continue"),
    Row("s05", "SIGSTOP of a client for half a lease (and, scenario 6, for three leases)",
        "half: nothing happens. Three: it is declared dead, and the waiters are told; when it wakes up, its first and every later call is refused as fenced, and nothing it writes is accepted"),
    Row("s07", "a client's main thread hangs in its own code while others wait in a barrier or a collective",
        "all members learn that it is stuck, in which operation, with its stack; it is never killed; it is live again when it continues; a time-out's message says so, too"),
    Row("s08", "C code holds a client's interpreter lock for two leases",
        "reported as blocked to all members, not as dead; continues afterwards"),
    Row("s09", "packets between one client and the server dropped: both directions, and each alone; healed",
        "both sides notice; the task slot's new holder is the only owner; the former one is fenced; a short cut is "
        "only latency"),
    Row("s10", "packets between two clients dropped, in one direction and in both, with the server reachable",
        "the collective fails on all ranks within its time-out and names the pair"),
    Row("s11", "two to four processes with one client id, at once and one after the other; a stopped holder",
        "exactly one process holds it; the others get an error with its host and pid; the id is free again only after the holder was declared dead, and the holder is then fenced"),
    Row("s12", "lost replies: requests are sent again", "same answer, one effect, one revision"),
    Row("s13", "barriers entered with other participants, by outsiders, late; one rank never comes",
        "wrong calls are refused at once; a late caller gets the same outcome; every missing rank is listed"),
    Row("s14", "wall clock set by +1 h and -1 h on server and client; other monotonic clocks; the server's "
        "monotonic clock differs after a restart, as after a reboot",
        "no client expires, timers keep their pace; log lines have both clocks"),
    Row("s15", "disk full, read-only, EIO at fsync", "no acknowledgement; reads and heartbeats go on; "
        "`/readyz` says why; recovers with space; the server never acknowledges after a failed fsync on the same descriptor"),
    Row("s16", "torn tails at every offset, flipped bits, empty and newer files",
        "repaired, with a backup, or refused with the place of the damage; never a silent loss"),
    Row("s17", "fuzzed requests and raw bytes", "refused; process alive; no growth"),
    Row("s18", "values up to the limit and beyond, many keys, quota", "typed errors; others are not slowed down"),
    Row("s19", "10,000 clients register, meet, send heartbeats and leave, or vanish all at once",
        "no failed call, no false death; register and barrier <= 60 s; <= 100 KB of server memory for each"),
    Row("s20", "floods of connections and calls", "admitted clients' heartbeats go on"),
    Row("s21", "a reader that stops reading", "its queue is bounded; it is dropped with a reason; no other client is affected"),
    Row("s22", "8 clients' operations and watches under kills and partitions, recorded",
        "operations linearizable; watches ordered, unique, complete, resumable"),
    Row("s24", "no token, wrong token, another server's", "refused in constant time; no token in any output"),
    Row("s25", "right token, wrong role", "refused, with an audit line"),
    Row("s26", "certificates that are wrong in each possible way; rotation", "refused by name; streams go on"),
    Row("s27", "host, program, device, barrier and error text that are HTML, scripts, line breaks, terminal codes, "
        "text from right to left, 10 KB", "inert on the status page, with a policy that allows no script of others; "
        "log lines stay one line; or refused"),
    Row("s28", "a web page that reaches the server through its visitor's browser: foreign Host, Origin and every "
        "method (DNS rebinding); a cookie in place of a token", "refused, no cross-origin headers; the owner is let in"),
    Row("s29", "path traversal, symbolic links in the data directory", "refused; keys never become files"),
    Row("s30", "no token, at an address that other machines reach", "refuses to start"),
    Row("s31", "SIGTERM and Ctrl-C, once and twice, to server, worker and `dmesh run`; `kill -9` of `dmesh run`",
        "server ends with 0 within 10 s and its port is free, its clients go on with its successor; no orphans"),
    Row("s32", "clients of older and newer protocol versions", "they work, or are refused with an error that names both versions"),
    Row("s33", "peers without the secret, of another epoch, with broken frames", "refused before allocation"),
    Row("s34", "random faults for a minute (an hour with DMESH_FAULTS_SOAK=3600): kills, stops and freezes of the "
        "server, frozen clients, delay, drop, throttle, reset, refusal by proxy, alone and in pairs",
        "all that the kill loop checks; memory, descriptors and threads do not grow"),
    Row("s35", "connections of one client, of half of them, of all reset, and refused for a second; a process killed "
        "meanwhile; default settings", "no client is declared dead, barriers and counters continue; a killed process is noticed within half a second"),
    Row("s36", "the server stopped, or its loop held up, for 0.5 to 3 s, with connections reset before and in it",
        "no client is declared dead, except a process that was killed"),
    Row("s37", "the connections of 1,000 clients (10,000 with DMESH_LOAD_RESETS=10000) reset at once",
        "every session is attached again, no client is declared dead"),
    Row("s38", "200 increments and compare-and-sets without an answer when the connection breaks, 20 times; the server "
        "killed in between", "each is made once, and reports what it did"),
    Row("s39", "floods without a token: 1,500 connect-and-drop requests a second, gRPC calls as fast as they are "
        "refused, hundreds of gRPC connections that are held", "operators and clients are served all the while; "
        "strangers' connections are closed"),
    Row("s40", "a tenant beyond its quotas of calls, keys, bytes, tasks and clusters; tokens bound to other clusters, "
        "revoked ones", "refused with an error that names the quota; the neighbours' calls are served as before; nothing "
        "of another cluster is seen"),
    Row("s41", "ephemeral keys, a lock, a semaphore and an election while holders are killed and frozen (one for longer "
        "than its lease), connections cut and the server killed; recorded", "at every instant one holder, one leader, and "
        "no more holders of the semaphore than places; fencing tokens only grow"),
    Row("s42", "the server restarted with a store that is empty, an older copy, or another cluster's",
        "every call under way, watch and next call raises `StoreLostError`; nothing that was under way takes effect "
        "in the new store; owned keys are set again; epochs and revisions never go back"),
    Row("s43", "`kill -9` of ranks in the middle of each collective, while the others shrink their group, and while they "
        "agree, 8 down to 2, over 100 in all; of the server while they decide; a frozen client that comes back; a successor",
        "all survivors have the same group, the same values and right results; a process that was declared lost learns it; the successor is in the world, and not in the smaller group"),
)  # fmt: skip


@dataclass
class Passed:
    """How many runs of a scenario there were, and in how many of them all of its tests passed."""

    runs: int = 0
    passed: int = 0
    tests: int = 0
    """Tests in all runs together, without those that were skipped."""
    skipped: int = 0


def passed_runs(lines: list[dict]) -> dict[str, Passed]:
    """Counts the runs of each scenario, by the lines that tests have added."""
    outcomes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in lines:
        if "outcome" in line:
            outcomes[line["scenario"], line.get("run", "")].append(line["outcome"])
    counted: dict[str, Passed] = defaultdict(Passed)
    for (scenario, _), found in outcomes.items():
        tried = [outcome for outcome in found if outcome != "skipped"]
        counted[scenario].skipped += len(found) - len(tried)
        counted[scenario].tests += len(tried)
        counted[scenario].runs += bool(tried)
        counted[scenario].passed += bool(tried) and set(tried) == {"passed"}
    return counted


def table(lines: list[dict]) -> str:
    """The rows of which there is a result, as Markdown."""
    values: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    counts = passed_runs(lines)
    files: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if "outcome" in line:
            files[line["scenario"]].add(line["file"])
        else:
            values[line["scenario"]][line["name"], line["unit"]] += line["values"]
    out = ["| scenario | injected | must hold | result | tests |", "|---|---|---|---|---|"]
    for row in ROWS:
        counted = counts.get(row.key)
        if not counted:
            continue
        result = f"{counted.passed} of {counted.runs} runs passed ({counted.tests} tests)"
        if counted.skipped:
            result += f", {counted.skipped} skipped"
        for (name, unit), found in values[row.key].items():
            result += f"<br>{name}: {summary(found, unit)}"
        where = ", ".join(f"`{file}`" for file in sorted(files[row.key]))
        number = row.key.removeprefix("s0").removeprefix("s")
        number = {"kill": "kill loop", "5": "5, 6", "22": "22, 23"}.get(number, number)
        out.append(f"| {number} | {row.injected} | {row.criterion} | {result} | {where} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/robustness.md")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    made = table(lines)
    if not arguments.write:
        print(made)
        return
    text = DOCUMENT.read_text()
    new, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{made}\n{END}", text, flags=re.S
    )
    assert count == 1, f"{DOCUMENT} has no marks for the table"
    DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()

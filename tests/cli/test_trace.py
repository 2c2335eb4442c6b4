"""One trace of those of all ranks: which files, whose clocks, and how they are aligned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import free_ports

from dmesh.cli import main
from dmesh.cli.alignment import align

SKEW = 1234.5
PROGRAM = """
import sys, numpy as np, dmesh
dmesh.initialize_accelerator_system("CPU")
for _ in range(300):
    dmesh.collectives.all_reduce(np.ones(1))
dmesh.shutdown_accelerator_system()
"""


def write(directory: Path, rank: int, calls: list[tuple[str, int, float, float]], **head: object) -> Path:
    """Writes a trace: name, sequence, beginning and end in seconds of each call."""
    told = {"format": 1, "rank": rank, "run": "r", "boot_id": f"host{rank}", "monotonic": 0.0, "wall": 1e9}
    events: list[dict] = [{"name": "dmesh_trace", "ph": "M", "pid": rank, "tid": 0, "args": {**told, **head}}]
    events += [
        {
            "name": name, "cat": "collective", "ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6,
            "pid": rank, "tid": 1, "args": {"lane": "a", "sequence": number, "call": f"{name}()"},
        }
        for name, number, begin, end in calls
    ]  # fmt: skip
    events.append({"name": "dmesh_trace_end", "ph": "M", "pid": rank, "args": {"left_out": 0, "lost": 2}})
    path = directory / f"rank-{rank:05d}.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    return path


def merge(capsys, *words: str) -> dict:
    assert main(["trace", "merge", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_hosts_are_aligned_by_calls_that_all_end_together(tmp_path: Path, capsys) -> None:
    # Rank 0 comes last to the first call, rank 1 to the second.
    write(tmp_path, 0, [("all_reduce", 1, 5.0, 5.001), ("all_reduce", 2, 6.0, 7.001), ("send", 3, 8.0, 8.1)])
    late = [("all_reduce", 1, 4.0, 5.001), ("all_reduce", 2, 7.0, 7.001), ("send", 3, 90.0, 90.1)]
    write(tmp_path, 1, [(name, number, begin - SKEW, end - SKEW) for name, number, begin, end in late])
    found = merge(capsys, str(tmp_path))
    assert (found["ranks"], found["events"], found["cut"]) == (2, 6, [])
    clock = found["clocks"]["host1"]
    assert clock["origin"] == "calls"
    assert clock["offset"] == pytest.approx(SKEW, abs=1e-6)
    assert clock["uncertainty"] == pytest.approx(0.001, abs=1e-6)
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    ends = {(e["pid"], e["args"]["sequence"]): e["ts"] + e["dur"] for e in events if e["ph"] == "X"}
    assert ends[0, 1] == pytest.approx(ends[1, 1], abs=1)
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0.0
    assert main(["trace", "merge", str(tmp_path)]) == 0, "what was merged before is not merged again"
    assert "clocks are aligned to within 1.000 ms" in capsys.readouterr().out


def test_ranks_of_one_host_share_a_clock_and_strangers_go_by_the_wall(tmp_path: Path, capsys) -> None:
    write(tmp_path, 0, [("barrier", 1, 1.0, 1.1)], boot_id="one")
    write(tmp_path, 1, [("barrier", 1, 1.05, 1.1)], boot_id="one")
    write(tmp_path, 2, [("broadcast", 9, 1.0, 1.1)], boot_id="two", wall=1e9 + 7)
    clocks = merge(capsys, str(tmp_path))["clocks"]
    assert clocks["one"] == {"offset": 0.0, "uncertainty": 0.0, "origin": "reference"}
    assert clocks["two"] == {"offset": 7.0, "uncertainty": None, "origin": "wall clock"}
    assert main(["trace", "merge", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 0
    assert "their wall clocks were believed" in capsys.readouterr().out


@given(
    offsets=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3),
    arrivals=st.lists(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), min_size=1, max_size=12),
)
def test_the_true_offset_is_within_what_is_promised(
    offsets: list[float], arrivals: list[list[float]]
) -> None:
    """Whoever comes when, on whatever clock: nobody ends before all have begun."""
    times: dict[str, dict] = {f"c{n}": {} for n in range(len(offsets) + 1)}
    for number, begins in enumerate(arrivals):
        start = 2.0 * number
        last = max(begins[: len(times)])
        for n, offset in enumerate([0.0, *offsets]):
            begin, end = start + begins[n], start + last + 0.01 * (n + 1)
            times[f"c{n}"]["a", number] = [(begin - offset, end - offset)]
    found = align(times, dict.fromkeys(times, 0.0))
    for n, offset in enumerate(offsets, 1):
        assert found[f"c{n}"].origin == "calls"
        assert abs(found[f"c{n}"].seconds - offset) <= found[f"c{n}"].uncertainty + 1e-6


def test_clocks_are_aligned_from_host_to_host() -> None:
    spans = {
        "a": {("x", 1): [(0.0, 1.0)]},
        "b": {("x", 1): [(10.0, 11.0)], ("y", 1): [(12.0, 13.0)]},
        "c": {("y", 1): [(112.0, 113.0)]},
    }
    found = align(spans, dict.fromkeys(spans, 0.0))  # type: ignore[arg-type]
    assert [found[clock].seconds for clock in "abc"] == [0.0, -10.0, -110.0]


def test_traces_that_were_cut_are_read_up_to_there(tmp_path: Path, capsys) -> None:
    path = write(tmp_path, 0, [("barrier", n, n, n + 0.5) for n in range(5)])
    text = path.read_text()
    path.write_text(text[: text.index('"sequence": 3')])
    found = merge(capsys, str(tmp_path))
    assert (found["events"], found["cut"]) == (3, [0])
    assert main(["trace", "merge", str(tmp_path)]) == 0
    assert "is incomplete: its process was killed or is still running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not a trace"),
        ("[]", "is not a trace event"),
        ('[\n{"name":"x","ph":"M"}\n]', "is not a trace"),
        ('[\n{"name":"dmesh_trace","ph":"M","args":{"format":99,"rank":0,"run":"r"}}\n]', "is not a trace"),
        ('[\n{"ph":"X"}\n]', "is not a trace event"),
        ('[\n{"ph":"X","ts":NaN,"dur":1}\n]', "is not a trace event"),
        ('[\nnull,\n{"ph":"M"}\n]', "is not a trace event"),
        ("[\n{{{,\n]", "is not a trace event"),
        ("[\n" + "x" * 100_000 + "\n]", "is too long"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, capsys, content: str, words: str) -> None:
    (tmp_path / "rank-00000.json").write_text(content)
    assert main(["trace", "merge", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "merged.json").exists()


def test_traces_of_several_runs_are_not_mixed(tmp_path: Path, capsys) -> None:
    write(tmp_path, 0, [])
    write(tmp_path, 1, [], run="another")
    assert main(["trace", "merge", str(tmp_path)]) == 2
    assert "are of several runs" in capsys.readouterr().err
    assert main(["trace", "merge", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["trace", "merge", str(tmp_path / "empty")]) == 2
    assert "run your program with DMESH_TRACE" in capsys.readouterr().err


def test_real_processes_write_traces_that_can_be_merged(tmp_path: Path, capsys) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    jobs = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    environment = {**os.environ, "DTENSOR_JOBS": jobs, "DMESH_TRACE": str(tmp_path / "traces")}
    clients = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")],
            env={**environment, "DTENSOR_CLIENT_ID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [client.wait(60) for client in clients] == [0, 0]
    found = merge(capsys, str(tmp_path / "traces"))
    assert (found["ranks"], len(found["clocks"]), found["cut"]) == (2, 1, [])
    events = json.loads((tmp_path / "traces" / "merged.json").read_text())["traceEvents"]
    for rank in range(2):
        calls = [e["args"] for e in events if e["pid"] == rank and e["name"] == "all_reduce"]
        assert sorted(call["sequence"] for call in calls) == list(range(1, 301))
        assert [e["args"]["call"] for e in events if e["pid"] == rank and e.get("cat") == "barrier"] == [
            "barrier 'dmesh/shutdown'"
        ]

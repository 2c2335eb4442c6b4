"""The judge of histories finds what it is there to find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.faults.traffic import check


def history(path: Path, rank: int, *, steps: int = 2) -> list[dict]:
    """What a client writes whom nothing happened to."""
    lines: list[dict] = []
    at = 0.0
    for step in range(steps):
        key = f"traffic/own/{rank}/{step}"
        at = 10.0 * step
        lines += [
            {"what": "set", "at": at, "took": 0.1, "answer": 1, "key": key, "value": f"{rank}:{step}"},
            {"what": "own", "at": at, "took": 0.1, "answer": step + 1},
            {"what": "all", "at": at, "took": 0.1, "answer": 2 * step + rank + 1},
            {"what": "set", "at": at, "took": 0.1, "answer": 1, "key": f"p/{rank}", "value": "x"},
            {"what": "delete", "at": at, "took": 0.1, "answer": 1, "key": f"p/{rank}"},
            {"what": "arrive", "at": at + rank, "step": step},
            {"what": "pass", "at": at + 5, "took": 1.0, "answer": None, "step": step},
        ]
    return [*lines, {"what": "end", "at": at + 6, "steps": steps}]


def listed() -> dict[str, str]:
    kept = {f"traffic/own/{rank}/{step}": f"{rank}:{step}" for rank in (0, 1) for step in (0, 1)}
    return {**kept, "traffic/count/0": "2", "traffic/count/1": "2", "traffic/count/all": "4"}


def judge(tmp_path: Path, change=None, store=None) -> list[str]:
    paths = []
    for rank in (0, 1):
        lines = history(tmp_path, rank)
        if change is not None:
            change(rank, lines)
        paths.append(tmp_path / f"{rank}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check(paths, listed() if store is None else store).problems


def test_a_clean_history_has_no_problems(tmp_path):
    assert judge(tmp_path) == []


def test_a_lost_write_is_found(tmp_path):
    store = listed()
    del store["traffic/own/1/0"]
    assert any("lost: traffic/own/1/0" in problem for problem in judge(tmp_path, store=store))
    store["traffic/own/1/0"] = "older"
    assert any("older" in problem for problem in judge(tmp_path, store=store))


def test_a_deleted_key_that_is_back_is_found(tmp_path):
    assert any("back: p/0" in problem for problem in judge(tmp_path, store={**listed(), "p/0": "x"}))


def test_an_increment_that_counted_twice_is_found(tmp_path):
    assert judge(tmp_path, store={**listed(), "traffic/count/0": "3"})
    assert judge(tmp_path, store={**listed(), "traffic/count/all": "5"})

    def twice(rank, lines):
        if rank:
            lines[2]["answer"] = 1

    assert any("doubled: [1]" in problem for problem in judge(tmp_path, twice))


@pytest.mark.parametrize("what", ["early", "twice", "missing"])
def test_a_barrier_that_is_none_is_found(tmp_path, what):
    def change(rank, lines):
        passed = next(line for line in lines if line["what"] == "pass")
        if rank == 0 and what == "early":
            passed["at"] = 0.5  # rank 1 arrives at 1
        elif rank == 0 and what == "twice":
            lines.append(passed)
        elif rank == 0:
            lines.remove(passed)

    assert len(judge(tmp_path, change)) == 1

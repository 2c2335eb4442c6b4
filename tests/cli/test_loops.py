"""Loops of a program in `dmesh top` and `dmesh status`, as pictures and with real clients."""

from __future__ import annotations

import json

from tests.cli.pictures import member, picture, said
from tests.coordination.conftest import eventually
from tests.e2e.clients import run_clients

from dmesh.cli.loops import loop_views
from dmesh.coordination.members import MemberState
from dmesh.v1 import progress_pb2 as pb

CLIENT = """
import sys, dmesh
with dmesh.session("CPU") as me:
    with dmesh.progress(total=40, desc="train", unit="batches") as train:
        train.update(7 + me.rank)
        print("there", flush=True)
        sys.stdin.read()
"""


def telling(rank: int, *loops: pb.LoopProgress, age: float = 0.0) -> pb.MemberProgress:
    found = said(rank, age=age)
    found.report.loops.extend(loops)
    return found


def loop(done: int, rate: float = 2.0, *, total: int = 100, over: bool = False) -> pb.LoopProgress:
    return pb.LoopProgress(name="train", unit="steps", done=done, total=total, rate=rate, over=over)


def test_the_slowest_rank_counts() -> None:
    [view] = loop_views(
        picture([member(0), member(1), member(2)], [telling(0, loop(50)), telling(1, loop(40, 1.0), age=2.0)])
    )
    assert (view.ranks, view.behind, view.least, view.most, view.rate, view.left) == (
        (0, 1),
        (1,),
        40,
        50,
        1.0,
        58.0,
    )
    assert view.describe() == "train: 40-50 of 100 steps, 1.0/s, 58 s left; behind: rank 1."


def test_what_is_over_or_of_members_that_are_gone_is_left_out() -> None:
    gone = member(1, MemberState.LOST)
    views = loop_views(
        picture(
            [member(0), gone, member(2)],
            [telling(1, loop(5)), telling(2, loop(9, 0.0, total=0)), telling(0, loop(1, over=True))],
        )
    )
    assert [view.describe() for view in views] == ["train: 9 steps."]


def test_top_and_status_show_the_loops_of_real_clients(server, dmesh) -> None:
    environ = {"DMESH_COORDINATOR": server.address, "DMESH_HEARTBEAT_INTERVAL": "0.1"}
    with run_clients(2, CLIENT, environ=environ, stdin=True) as clients:
        for client in clients.values():
            client.wait_for("there")

        def told() -> bool:
            rows[:] = json.loads(dmesh("top", "--json").out)["ranks"]
            return [
                row["loops"][0]["done"] for row in sorted(rows, key=lambda row: row["rank"]) if row["loops"]
            ] == [7, 8]

        rows: list[dict] = []
        eventually(told, "reports of both")
        top = dmesh("top").out.splitlines()
        assert top[0].split()[:4] == ["RANK", "STEP", "STEPS/S", "LEFT"]
        assert sorted(line.split()[1] for line in top[1:]) == ["7/40", "8/40"]
        status = dmesh("status")
        assert "train: 7-8 of 40 batches" in status.out
        [view] = dmesh("status", "--json").json["loops"]
        assert (view["name"], view["least"], view["most"], view["behind"]) == ("train", 7, 8, [0])
        for client in clients.values():
            client.close_stdin()
        assert [client.wait() for client in clients.values()] == [0, 0]

"""The adapter through which mpi4py's tests are run, and what is made of their outcomes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collectives.ranks import cluster
from tests.mpi4py_suite.__main__ import merged, report
from tests.mpi4py_suite.buffers import Absent, Datatype, parse
from tests.mpi4py_suite.comm import Comm
from tests.mpi4py_suite.requests import Prequest, Request, Status

INT = Datatype("i")


@pytest.mark.parametrize(
    ("rest", "blocks"),
    [
        ((), [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ((INT,), [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ((2, INT), [[0, 1], [2, 3], [4, 5]]),
        (([2, 0, 1],), [[0, 1], [], [2]]),
        (([1, 2, 1], [6, 3, 0]), [[6], [3, 4], [0]]),
        ((([1, 1, 1], 3), INT), [[0], [3], [6]]),
    ],
)
def test_blocks_of_a_buffer(rest, blocks):
    found = parse((np.arange(8, dtype="i"), *rest)).blocks(3)
    assert [block.tolist() for block in found] == blocks


def test_memory_is_taken_as_it_is():
    memory = bytearray(8)
    parse([memory, 1, INT]).simple()[:] = 7
    assert memory == b"\7\0\0\0\0\0\0\0"
    assert parse([None, 0, "B"]).simple().size == 0


def test_forms_of_a_call():
    def body(c):
        comm, out = Comm(c.world), np.zeros(3)
        comm.Allreduce(np.ones(3), out)
        found = [out.tolist()]
        comm.Iallreduce(np.ones(3), out).Wait()
        request = comm.Scan_init(np.ones(3), out)
        for _ in range(2):
            request.Start()
            request.Wait()
            found.append(out.tolist())
        status = Status()
        comm.Sendrecv(
            np.full(1, comm.rank), 1 - comm.rank, 5, out[:2].view(int), 1 - comm.rank, status=status
        )
        gathered = np.zeros(6, "i")
        counts = ([1, 2], [0, 3])
        comm.Allgatherv(np.full(comm.rank + 1, comm.rank + 1, "i"), (gathered, counts))
        assert not comm.Iprobe()
        return found, out.view(int)[0], (status.source, status.tag), gathered.tolist()

    with cluster(2) as ranks:
        for rank, (found, came, status, gathered) in enumerate(ranks.all(body)):
            assert found == [[2] * 3] + 2 * [[rank + 1] * 3]
            assert (came, *status) == (1 - rank, 1 - rank, 5)
            assert gathered == [1, 0, 0, 2, 2, 0]


def test_what_dmesh_does_not_have_is_absent():
    comm, request = Comm(), Request()
    for call in (
        lambda: comm.Win,
        lambda: request.Cancel,
        lambda: Prequest(request),
        lambda: INT.Create_struct(),
    ):
        with pytest.raises(Absent):
            call()


def test_the_worst_outcome_of_any_rank_counts(capsys):
    def line(number, outcome, **more):
        return {"number": number, "test": f"test_a.T.test_{number}", "outcome": outcome} | more

    first = [line(0, "passed", without=["x"]), line(1, "absent", reason="y"), line(2, "passed", without=[])]
    second = [line(0, "passed", without=[]), line(1, "ended", reason="ended"), line(2, "ended", reason="z")]
    found = list(merged([first, second]))
    assert [one["outcome"] for one in found] == ["passed", "absent", "failed"]
    assert not report(found)
    text = capsys.readouterr().out
    assert "all 3 1 1 0 1 1" in " ".join(text.split())
    assert "test_a.T.test_2: z" in text
    assert report(found[:2])

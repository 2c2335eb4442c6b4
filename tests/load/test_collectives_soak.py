"""Many collectives under kills and mismatches: whoever lives through them keeps nothing of what has ended."""

from __future__ import annotations

import os
import random

import pytest
from tests.collectives.test_processes import WAYS
from tests.collectives.test_rejoin_processes import Job

SMALL = int(os.environ.get("DMESH_SOAK_SMALL") or 100_000)
LARGE = int(os.environ.get("DMESH_SOAK_LARGE") or 1_000)
"""Collectives in all; 1,000,000 and 10,000 in the long form, `make soak`."""
ROUNDS = 40

pytestmark = [pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "messages"])
def test_nothing_is_left_of_what_has_ended(way: str) -> None:
    seed = int(os.environ.get("DMESH_FAULTS_SEED") or random.SystemRandom().getrandbits(32))
    print(f"DMESH_FAULTS_SEED={seed}")
    chance = random.Random(seed)
    job = Job(3, way)
    figures = []
    try:
        for _ in range(ROUNDS):
            answers = job.all(
                "many", seed=chance.getrandbits(32), small=SMALL // ROUNDS, large=LARGE // ROUNDS
            )
            assert len({answer["total"] for answer in answers}) == 1
            if chance.random() < 0.5:
                kill(job, 1 + chance.randrange(2), chance.choice([10, 300_000]))
            else:
                who = chance.randrange(3)
                for answer in job.all("differ", size=chance.choice([10, 300_000]), who=who):
                    assert answer["error"] == "CollectiveMismatchError", answer
                    assert f"rank {who} called" in answer["message"]
                job.epoch += 1
            for rank in job.ranks:
                rank.tell("renew", peers=job.table(), generation=job.epoch)
            assert [rank.answer() for rank in job.ranks] == [{}] * 3
            job.all("use", size=1000)
            # All collect their garbage: what one of them has not forgotten yet keeps memory of the others.
            figures.append(job.all("resources")[0])
    finally:
        job.close()
    quarter = ROUNDS // 4
    print([round(figure["rss"] / 2**20, 1) for figure in figures], figures[-1])
    for what, allowed in (("fds", 0), ("threads", 0), ("rss", 8 * 2**20)):
        settled = max(figure[what] for figure in figures[quarter : 2 * quarter])
        assert max(figure[what] for figure in figures[-quarter:]) <= settled + allowed, what


def kill(job: Job, victim: int, size: int) -> None:
    """kill -9 in the middle of a collective; another process takes the task slot."""
    for rank in job.ranks:
        rank.tell("fail", size=size)
    job.ranks[victim].kill()
    for rank in job.ranks:
        if rank is not job.ranks[victim]:
            answer = rank.answer()
            assert answer["error"] == "PeerLostError", answer
            assert f"lost rank {victim}" in answer["message"]
    job.replace(victim, same_port=False)

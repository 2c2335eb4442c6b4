"""Clusters that exist in the process-wide context only: no server, no peers, just what meshes look at."""

from dataclasses import dataclass, field

import pytest

from dmesh import context
from dmesh.context import Context
from dmesh.coordination.members import Device, Member, MemberState, Process
from dmesh.settings import Settings


@dataclass
class FakeContext(Context):
    """A context whose collectives are the arguments that they were asked for with."""

    asked: list = field(default_factory=list)

    def mesh_group(self, fingerprint, axis, ranks):
        self.asked.append((fingerprint, axis, ranks))
        return ("group", axis, ranks)


def member(index, counts, job="worker"):
    devices = tuple(Device(kind, i) for kind, count in counts.items() for i in range(count))
    return Member(
        job, index, 1000 + index, MemberState.CONNECTED, Process(f"host{index}", 40 + index), devices
    )


@pytest.fixture(autouse=True)
def _no_context():
    context.clear()
    yield
    context.clear()


@pytest.fixture
def join():
    """Makes this process a client: `join(1, cpus=[2, 2])` is client 1 of two, with two CPU devices each."""

    def join(client_id, cpus, gpus=None, known=True, job="worker"):
        gpus = gpus or [0] * len(cpus)
        counts = [{"CPU": c, "GPU": g} for c, g in zip(cpus, gpus, strict=True)]
        jobs = tuple(f"host{i}:{10000 + i}" for i in range(len(cpus)))
        state = FakeContext(
            Settings(jobs=jobs, client_id=client_id, job_name=job),
            "CPU",
            {**counts[client_id], "TPU": 0},
            members=tuple(member(i, c, job) for i, c in enumerate(counts)) if known else (),
        )
        context.install(state)
        return state

    return join


@pytest.fixture
def alone():
    """Makes this process the only client, in local mode."""

    def alone(cpus=1, gpus=0):
        state = FakeContext(Settings(), "CPU", {"CPU": cpus, "GPU": gpus, "TPU": 0})
        context.install(state)
        return state

    return alone

"""Clusters that exist in the process-wide context only: no server, no peers, just what meshes look at."""

import pytest

from dmesh.collectives.communicator import Communicator
from dmesh.config.settings import Settings
from dmesh.coordination.members import Device, Member, Members, MemberState, Process
from dmesh.devices.device import LogicalDevices
from dmesh.runtime import context
from dmesh.runtime.context import Context


class FakeCommunicator:
    """A data plane whose groups are the arguments that they were asked for with."""

    def __init__(self):
        self.asked = []

    def mesh_group(self, fingerprint, axis, ranks):
        self.asked.append((fingerprint, axis, ranks))
        return ("group", axis, ranks)


def member(index, counts, job="worker"):
    devices = tuple(Device(kind, i) for kind, count in counts.items() for i in range(count))
    return Member(
        job, index, 1000 + index, MemberState.CONNECTED, Process(f"host{index}", 40 + index), devices
    )


def install(client_id, settings, counts, members):
    """Makes this process that client; returns its collectives."""
    state = Context(client_id, settings, LogicalDevices("CPU", counts), members)
    communicator = FakeCommunicator()
    state.put(communicator, Communicator)
    context.install(state)
    return communicator


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
        settings = Settings(jobs=jobs, client_id=client_id, job_name=job)
        members = Members(member(i, c, job) for i, c in enumerate(counts)) if known else None
        return install(client_id, settings, {**counts[client_id], "TPU": 0}, members)

    return join


@pytest.fixture
def alone():
    """Makes this process the only client, in local mode."""

    def alone(cpus=1, gpus=0):
        return install(0, Settings(), {"CPU": cpus, "GPU": gpus, "TPU": 0}, None)

    return alone

"""Identity of a client that joins a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dmesh.coordination.cluster_settings import NO_WISHES, ClusterSettings
from dmesh.coordination.members import Device, Process, Task
from dmesh.coordination.process import new_credential, new_incarnation, this_process
from dmesh.errors import ConfigurationError
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb


@dataclass(frozen=True)
class Identity:
    """Identity of a client that joins a cluster."""

    cluster: str
    """Name of the cluster."""
    job: str
    """Name of this process's job."""
    index: int
    """Index within the job: the client id, and rank."""
    incarnation: int
    """Random number of this process; see `process.new_incarnation`."""
    jobs: Mapping[str, tuple[str, ...]]
    """The configured addresses of the tasks of every job; equal in all clients."""
    process: Process
    """Facts about this process."""
    devices: tuple[Device, ...] = ()
    """Its devices, in order of type and index."""
    peer_addresses: tuple[str, ...] = ()
    """HOST:PORT at which its peers reach it, most preferred first."""
    settings: ClusterSettings = NO_WISHES
    """Settings that it wishes for the cluster: the first to register decides, one that differs is refused."""
    credential: bytes = field(default_factory=new_credential, repr=False)
    """Secret that proves to the server that a call comes from this process. Never logged."""

    def __post_init__(self) -> None:
        size = len(self.jobs.get(self.job, ()))
        if not size:
            raise ConfigurationError(
                f"job {self.job!r} is not one of the cluster's: {', '.join(self.jobs) or 'none'}"
            )
        if not 0 <= self.index < size:
            raise ConfigurationError(
                f"task {self.index} of job {self.job!r} does not exist: it has {size} tasks, counted from 0"
            )
        if not 0 < self.incarnation < 1 << 64:
            raise ConfigurationError(f"incarnation {self.incarnation} is not a positive number of 64 bits")

    @classmethod
    def of_this_process(
        cls,
        job: str,
        index: int,
        jobs: Mapping[str, Sequence[str]],
        *,
        cluster: str = "default",
        devices: Sequence[Device] = (),
        peer_addresses: Sequence[str] = (),
        settings: ClusterSettings = NO_WISHES,
    ) -> Identity:
        """Make an identity with the facts about this process and a new incarnation."""
        return cls(
            cluster,
            job,
            index,
            new_incarnation(),
            {name: tuple(addresses) for name, addresses in jobs.items()},
            this_process(),
            tuple(devices),
            tuple(peer_addresses),
            settings,
        )

    @property
    def task(self) -> Task:
        """This process's task slot."""
        return Task(self.job, self.index)

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """All task slots of the cluster, sorted."""
        return tuple(Task(job, index) for job in sorted(self.jobs) for index in range(len(self.jobs[job])))

    def caller(self) -> common_pb2.Caller:
        """Return what says on the wire who calls."""
        return common_pb2.Caller(
            cluster=self.cluster,
            task=self.task.to_proto(),
            incarnation=self.incarnation,
            credential=self.credential,
        )

    def registration(self) -> pb.RegisterRequest:
        """Return the request that takes the task slot, without its request id."""
        return pb.RegisterRequest(
            caller=self.caller(),
            jobs=[common_pb2.Job(name=name, addresses=addresses) for name, addresses in self.jobs.items()],
            process=self.process.to_proto(),
            devices=[
                common_pb2.Device(type=device.type, index=device.index, description=device.description)
                for device in self.devices
            ],
            peer_addresses=self.peer_addresses,
            settings=self.settings.to_proto(),
        )

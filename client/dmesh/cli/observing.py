"""Access of commands to the coordination server of a running cluster, and the data that they read there."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from google.protobuf.message import Message

from dmesh.config.addresses import split_address
from dmesh.config.settings import JOB_NAME_PATTERN, read_jobs
from dmesh.coordination import faults
from dmesh.coordination.credentials import ClientTls, Credentials
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.coordination.members import ClusterState, Member, Task
from dmesh.errors import ConfigurationError, CoordinatorUnavailableError, DMeshError
from dmesh.security.tokens import TokenSource
from dmesh.v1 import common_pb2, coordination_pb2, progress_pb2

if TYPE_CHECKING:
    import grpc

    from dmesh.launcher.registry import Run

DEFAULT_ADDRESS = "127.0.0.1:8470"
"""Default address of `dmesh serve`."""
_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Picture:
    """A cluster as its server saw it at one moment."""

    cluster: str
    """Its name."""
    address: str
    """HOST:PORT of the server."""
    state: ClusterState
    """Its members, vacant tasks and barriers under way."""
    reports: Mapping[Task, progress_pb2.MemberProgress]
    """Latest progress reports of its members, without earlier members of a task."""

    def of(self, tasks: Container[Task]) -> Picture:
        """Returns the same with the reports of some tasks alone."""
        return replace(self, reports={task: said for task, said in self.reports.items() if task in tasks})


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name the server and the cluster."""
    parser.add_argument(
        "--coordinator",
        metavar="H:P",
        help="the coordination server (default: DMESH_COORDINATOR, else the first entry of DTENSOR_JOBS, "
        f"else the server of the only `dmesh run` on this machine, else {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="the cluster (default: DMESH_CLUSTER, else the only one with members)",
    )


def named_coordinator(given: str | None, environ: Mapping[str, str]) -> str | None:
    """Returns the address of the server that the command line or the environment name; None if they do not.

    Args:
        given: What the command line says.
        environ: The environment.

    Raises:
        ConfigurationError: It is no address.
    """
    for value, origin in (
        (given, "--coordinator"),
        (environ.get("DMESH_COORDINATOR", "").strip(), "DMESH_COORDINATOR"),
    ):
        if value:
            split_address(value, origin)
            return value
    jobs = read_jobs(environ)
    return jobs[0] if jobs else None


def only_run() -> Run | None:
    """Returns the `dmesh run` that goes on on this machine; None if there is none.

    Raises:
        ConfigurationError: There are several.
    """
    from dmesh.launcher.registry import living

    runs = living()
    if len(runs) > 1:
        listed = ", ".join(f"{run.address} (pid {run.pid})" for run in runs[:20])
        raise ConfigurationError(
            f"{len(runs)} jobs of `dmesh run` are running on this machine: {listed}. Name one with "
            "--coordinator"
        )
    return runs[0] if runs else None


def find_target(given: str | None, environ: Mapping[str, str]) -> Target:
    """Returns the server that is meant: a named one, that of the only `dmesh run`, or the default address.

    Args:
        given: What the command line says.
        environ: The environment.

    Raises:
        ConfigurationError: The name is no address, or there are several runs.
    """
    address = named_coordinator(given, environ)
    if address is not None:
        return Target(address)
    run = only_run()
    if run is None:
        return Target(DEFAULT_ADDRESS, origin="the default of `dmesh serve`", guessed=True)
    return Target(run.address, run.cluster, run.token, run.tls, f"the `dmesh run` of pid {run.pid}")


def credentials_of(
    environ: Mapping[str, str], token: str = "", tls: Mapping[str, str] | None = None
) -> Credentials:
    """Returns the credentials for a server: those of the environment, or else those found elsewhere.

    Args:
        environ: The environment.
        token: A token that was found elsewhere.
        tls: `DMESH_TLS_*` variables that were found elsewhere.

    Raises:
        ConfigurationError: A file that is named cannot be used.
    """
    named = any(environ.get(name, "").strip() for name in ("DMESH_TOKEN", "DMESH_TOKEN_FILE"))
    if named or not token:
        return Credentials.of_environment()
    environ = {**(tls or {}), **environ}
    names = ("CA", "CERT", "KEY", "SERVER_NAME")
    files = ClientTls.of(*(environ.get(f"DMESH_TLS_{name}", "").strip() or None for name in names))
    return Credentials(TokenSource("dmesh run", value=token), files)


class Target(NamedTuple):
    """Coordination server that a command line is about."""

    address: str
    """HOST:PORT of it."""
    cluster: str | None = None
    """Name of the cluster, if it follows from where the server is."""
    token: str = ""
    """Token to show, if the environment names none; empty for none."""
    tls: Mapping[str, str] = MappingProxyType({})
    """`DMESH_TLS_*` variables to use, where the environment has none."""
    origin: str = "the command line or the environment"
    """Source of the statement."""
    guessed: bool = False
    """True if there is no source."""


class Observer:
    """Queries a coordination server as an observer, without a task slot.

    Args:
        address: HOST:PORT of the server.
        cluster: Which cluster; None for the only one that has members, or the only one.
        token: What to show, in place of what the environment says; empty for that.
        tls: `DMESH_TLS_*` variables to go with it.

    Raises:
        ConfigurationError: The token or a certificate cannot be used, or the cluster's name cannot be one.
    """

    def __init__(
        self,
        address: str,
        cluster: str | None = None,
        token: str = "",
        tls: Mapping[str, str] | None = None,
    ) -> None:
        if cluster is not None and not JOB_NAME_PATTERN.fullmatch(cluster):
            raise ConfigurationError(f"{cluster!r} cannot be the name of a cluster")
        self.address = address
        self.patience = 10.0
        """Seconds that the server may take for an answer."""
        self.link = Link(address, credentials=credentials_of(os.environ, token, tls))
        self._cluster = cluster
        self._guessed = False  # whether the address is the default, as none was named and no run found

    @classmethod
    def of(cls, args: argparse.Namespace) -> Observer:
        """Creates an observer from the flags of `add_target` and the environment."""
        cluster = args.cluster or os.environ.get("DMESH_CLUSTER", "").strip() or None
        target = find_target(args.coordinator, os.environ)
        observer = cls(target.address, cluster or target.cluster, target.token, target.tls)
        observer._guessed = target.guessed
        return observer

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.link.close()

    @property
    def cluster(self) -> str:
        """Name of the cluster.

        Raises:
            ConfigurationError: None was named, and the server has none, or several.
            DMeshError: The server does not answer, or refuses.
        """
        if self._cluster is None:
            names = [cluster.name for cluster in _living(self.clusters())]
            if len(names) != 1:
                what = f"has {len(names)} clusters: {', '.join(names[:20])}" if names else "has no cluster"
                raise ConfigurationError(
                    f"the coordination server at {self.address} {what}"
                    + (". Name one with --cluster" if names else ": no client has registered yet")
                )
            self._cluster = names[0]
        return self._cluster

    @property
    def caller(self) -> common_pb2.Caller:
        """Says on the wire that an observer of the cluster calls."""
        return common_pb2.Caller(cluster=self.cluster)

    @property
    def named(self) -> bool:
        """True if the command line, the environment or a `dmesh run` says which cluster is meant."""
        return self._cluster is not None

    def clusters(self) -> list[progress_pb2.ClusterSummary]:
        """Asks which clusters there are, sorted by name."""
        request = progress_pb2.ListClustersRequest()
        return list(self.ask(self.link.coordination.ListClusters, request).clusters)

    def state(self) -> ClusterState:
        """Asks for members, vacant tasks and barriers."""
        request = coordination_pb2.GetClusterStateRequest(caller=self.caller)
        return ClusterState.from_proto(self.ask(self.link.coordination.GetClusterState, request))

    def member(self, task: Task) -> Member:
        """Returns one member; without incarnation if the task slot was never taken."""
        request = coordination_pb2.GetMemberRequest(caller=self.caller, task=task.to_proto())
        return Member.from_proto(self.ask(self.link.coordination.GetMember, request).member)

    def wait_for_epoch(self, after: int, timeout: float) -> bool:
        """Waits until the cluster's epoch is larger than `after`; returns whether it is."""
        deadline = time.monotonic() + max(0.0, timeout)
        while True:
            wait = min(max(0.0, deadline - time.monotonic()), self.patience)
            request = coordination_pb2.GetClusterStateRequest(
                caller=self.caller, known_epoch=after, wait_ms=math.ceil(wait * 1000)
            )
            state = self.ask(self.link.coordination.GetClusterState, request, self.patience + wait)
            if state.epoch > after:
                return True
            if time.monotonic() >= deadline:
                return False

    def look(self) -> Picture:
        """Asks for all that is known of the cluster."""
        state = self.state()
        request = progress_pb2.GetProgressRequest(caller=self.caller)
        holders = {(member.job, member.index): member.incarnation for member in state.members}
        reports = {
            Task.from_proto(member.task): member
            for member in self.ask(self.link.coordination.GetProgress, request).members
            if holders.get((member.task.job, member.task.index)) == member.incarnation
        }
        return Picture(self.cluster, self.address, state, reports)

    def ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None = None,
    ) -> _Response:
        """Makes a call.

        Args:
            method: The method of a stub.
            request: What to send.
            timeout: Seconds that it may take; `patience` if None.

        Raises:
            CoordinatorUnavailableError: The server does not answer.
            DMeshError: It refused.
        """
        began = time.monotonic()
        outcome = self.link.attempt(method, request, self.patience if timeout is None else timeout)
        if not isinstance(outcome, Fault):
            return outcome
        raise self._error(outcome, time.monotonic() - began)

    def stream(
        self, method: grpc.UnaryStreamMultiCallable[_Request, _Response], request: _Request
    ) -> Iterator[_Response]:
        """Makes a call that is answered again and again, until either side ends it.

        Raises:
            CoordinatorUnavailableError: The server does not answer, or stops.
            DMeshError: It refused.
        """
        import grpc

        began = time.monotonic()
        call = method(request)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._error(faults.from_rpc(error), time.monotonic() - began) from error
        finally:
            call.cancel()

    def send(
        self,
        method: grpc.StreamUnaryMultiCallable[_Request, _Response],
        requests: Iterator[_Request],
        timeout: float,
    ) -> _Response:
        """Makes a call whose request comes in parts.

        Raises:
            CoordinatorUnavailableError: The server does not answer.
            DMeshError: It refused.
        """
        import grpc

        began = time.monotonic()
        try:
            return method(requests, timeout=timeout)
        except grpc.RpcError as error:
            raise self._error(faults.from_rpc(error), time.monotonic() - began) from error

    def _error(self, fault: Fault, seconds: float) -> DMeshError:
        if fault.from_server:
            return fault.exception()
        if _is_unimplemented(fault):
            return faults.not_a_coordinator(self.address, fault.message)
        problem = self.link.tls_problem() or fault.message
        if self._guessed:
            return CoordinatorUnavailableError(
                "no `dmesh run` of this user goes on on this machine, and no server answers at "
                f"{self.address}, the default of `dmesh serve` ({faults.cause_of(problem)}). Ask while a job "
                "runs, start a server, or name one: --coordinator HOST:PORT"
            )
        return faults.unavailable(self.address, problem, seconds, doing="asking it", ever_connected=False)


def _living(clusters: list[progress_pb2.ClusterSummary]) -> list[progress_pb2.ClusterSummary]:
    """Returns the clusters that have members; all, if none has any."""
    return [cluster for cluster in clusters if cluster.present] or clusters


def _is_unimplemented(fault: Fault) -> bool:
    return fault.code is not None and fault.code.name == "UNIMPLEMENTED"

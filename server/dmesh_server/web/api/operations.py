"""Operators' changes through the REST interface: carried out by the core, and logged."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request

from dmesh.security.tokens import Role
from dmesh_server.core.effects import KvIncremented, Operated
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    DeclareCluster,
    DropKey,
    Evict,
    KvIncrement,
    StopBarrier,
    WithdrawCluster,
)
from dmesh_server.core.model import Caller, Member, Task
from dmesh_server.event_log import AdminAction
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry import logs
from dmesh_server.web.api.answers import Operation, asker
from dmesh_server.web.api.audit import record
from dmesh_server.web.gate import has_role

A = TypeVar("A", Operated, KvIncremented)
_AT_A_TIME = 100


async def operate(
    runtime: Runtime,
    request: Request,
    event: DeclareCluster | WithdrawCluster | StopBarrier | Evict | DropKey,
    action: str,
    target: str,
    task: Task | None = None,
) -> Operation:
    """Carry out an operator's request; see `carry_out`."""
    await carry_out(runtime, request, event, Operated, action, target, task)
    return Operation(done=True, action=action, cluster=event.caller.cluster, target=target)


async def carry_out(
    runtime: Runtime,
    request: Request,
    event: DeclareCluster | WithdrawCluster | StopBarrier | Evict | DropKey | KvIncrement,
    expected: type[A],
    action: str,
    target: str,
    task: Task | None = None,
) -> A:
    """Carry out an operator's change and log it, whatever the outcome; return the core's answer.

    Args:
        runtime: The server's runtime.
        request: The HTTP request, for the operator's name.
        event: The core's event.
        expected: Type of its answer.
        action: Name of the action.
        target: Barrier, member or key that it changes.
        task: The member that it changes, if it is one.

    Raises:
        CoreError: It was refused.
    """
    if not has_role(request.scope, Role.ADMIN):  # the gate has asked for it already, by the method
        raise CoreError(ErrorKind.PERMISSION_DENIED, f"{action} needs the role admin")
    cluster = event.caller.cluster
    peer = request.client.host if request.client else "unknown"
    said = {"action": action, "cluster": cluster, "target": target, "by": asker(request), "peer": peer}
    if isinstance(event, Evict) and event.reason:
        said["reason"] = event.reason
    async with record(request, action, f"{cluster}: {target}") as entry:
        entry.detail = said.get("reason", "")
        try:
            answer = await runtime.request(event, expected)
        except CoreError as error:
            logs.warning("admin_action_refused", **said, error=error.kind.name)
            raise
        changed = not isinstance(answer, Operated) or answer.changed
        entry.outcome = "done" if changed else "unchanged"
    logs.warning("admin_action", **said, changed=changed)
    if changed:
        runtime.event_log.note(AdminAction(cluster, action, target, task, asker(request)))
    return answer


async def end(runtime: Runtime, request: Request, cluster: str, target: str, reason: str) -> Operation:
    """Evict all members of a cluster; one line in the audit log and one event stand for all of them.

    Args:
        runtime: The server's runtime.
        request: The HTTP request, for the operator's name.
        cluster: The cluster.
        target: The cluster and its generation, for people.
        reason: Reason, for all to read.

    Raises:
        CoreError: It was refused.
    """
    if not has_role(request.scope, Role.ADMIN):
        raise CoreError(ErrorKind.PERMISSION_DENIED, "end_cluster needs the role admin")
    by, evicted = asker(request), 0
    async with record(request, "end_cluster", target) as entry:
        entry.detail = reason
        for member in _present(runtime, cluster):
            caller = Caller(cluster)
            event = Evict(runtime.next_number(), caller, by, member.task, member.incarnation, reason)
            evicted += (await runtime.request(event, Operated)).changed
        entry.outcome = "done" if evicted else "unchanged"
    logs.warning("admin_action", action="end_cluster", cluster=cluster, by=by, evicted=evicted, reason=reason)
    if evicted:
        runtime.event_log.note(AdminAction(cluster, "end_cluster", target, None, by))
    return Operation(done=True, action="end_cluster", cluster=cluster, target=target)


def _present(runtime: Runtime, cluster: str) -> list[Member]:
    found = list[Member]()
    place = 0
    while some := runtime.views.holders(cluster, place, _AT_A_TIME):
        found += [member for member in some if not member.state.departed]
        place += len(some)
    return found

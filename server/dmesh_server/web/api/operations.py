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
from dmesh_server.core.model import Task
from dmesh_server.event_log import AdminAction
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry import logs
from dmesh_server.web.api.answers import Operation, asker
from dmesh_server.web.api.audit import record
from dmesh_server.web.gate import has_role

A = TypeVar("A", Operated, KvIncremented)


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

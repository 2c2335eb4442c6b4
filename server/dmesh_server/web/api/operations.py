"""Operators' changes through the REST interface: carried out by the core, and logged."""

from __future__ import annotations

from fastapi import Request

from dmesh.security.tokens import Role
from dmesh_server.core.effects import Operated
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import DeclareCluster, DropKey, Evict, StopBarrier, WithdrawCluster
from dmesh_server.core.model import Task
from dmesh_server.event_log import AdminAction
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry import logs
from dmesh_server.web.api.answers import Operation
from dmesh_server.web.api.audit import record
from dmesh_server.web.gate import has_role


async def operate(
    runtime: Runtime,
    request: Request,
    event: DeclareCluster | WithdrawCluster | StopBarrier | Evict | DropKey,
    action: str,
    target: str,
    task: Task | None = None,
) -> Operation:
    """Carries out an operator's request and logs it, whatever the outcome.

    Args:
        runtime: The server's runtime.
        request: The HTTP request, for the operator's name.
        event: The core's event.
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
    said = {"action": action, "cluster": cluster, "target": target, "by": event.by, "peer": peer}
    if isinstance(event, Evict) and event.reason:
        said["reason"] = event.reason
    async with record(request, action, f"{cluster}: {target}") as entry:
        entry.detail = said.get("reason", "")
        try:
            answer = await runtime.request(event, Operated)
        except CoreError as error:
            logs.warning("admin_action_refused", **said, error=error.kind.name)
            raise
        entry.outcome = "done" if answer.changed else "unchanged"
    logs.warning("admin_action", **said, changed=answer.changed)
    if answer.changed:
        runtime.event_log.note(AdminAction(cluster, action, target, task, event.by))
    return Operation(done=True, action=action, cluster=cluster, target=target)

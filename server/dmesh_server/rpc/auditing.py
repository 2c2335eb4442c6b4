"""Entries of the audit log about gRPC calls: changes of keys by callers without a task, backups and restores.

Calls of members are not audited: they are the program's own work, and many. A caller without a task is
outside of the program, whatever token it shows.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

from dmesh_server.core.events import KvDelete, KvIncrement, KvSet, KvTransaction, RevokeLease
from dmesh_server.rpc.handlers import Context
from dmesh_server.runtime import AnsweredEvent
from dmesh_server.security.access import CALLER, caller_name
from dmesh_server.security.audit import AuditLog, Record
from dmesh_server.security.refusals import host_of


def record(
    log: AuditLog | None, context: Context, action: str, target: str
) -> AbstractAsyncContextManager[Record]:
    """Add an entry about the operation in the `with` block; see `AuditLog.record`.

    Args:
        log: The audit log; None to add nothing.
        context: Context of the call.
        action: Name of the action.
        target: Object of the action.
    """
    if log is None:
        return nullcontext(Record(target))
    return log.record(action, who=caller_name(CALLER.get()), remote=host_of(context.peer()), target=target)


def audited(event: AnsweredEvent) -> tuple[str, str] | None:
    """Return the action and target by which an event is audited; None if it is not."""
    if event.caller.task is not None:
        return None
    match event:
        case KvSet(key=key):
            action, target = "set_key", key
        case KvDelete(key=key, is_prefix=is_prefix):
            action, target = ("delete_keys", f"{key}*") if is_prefix else ("delete_key", key)
        case KvIncrement(key=key):
            action, target = "increment_key", key
        case KvTransaction(then=then, otherwise=otherwise):
            keys = [one.key for one in (*then, *otherwise) if isinstance(one, KvSet | KvDelete | KvIncrement)]
            if not keys:
                return None
            action, target = "change_keys", ", ".join(dict.fromkeys(keys))
        case RevokeLease(lease=lease):
            action, target = "revoke_lease", f"{lease:016x}"
        case _:
            return None
    return action, f"{event.caller.cluster}: {target}"

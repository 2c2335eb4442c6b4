"""Advice on a refused registration: the settings of this client that the refused fields come from.

The server names fields of the protocol, because other programs than this SDK may speak to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dmesh.config.settings import VARIABLES
from dmesh.v1 import common_pb2 as pb

_BY_FIELD: Mapping[tuple[int, str], str] = {
    (pb.ERROR_KIND_TASK_TAKEN, "caller.task.index"): (
        "Give each client its own DTENSOR_CLIENT_ID, or end that process."
    ),
    (pb.ERROR_KIND_TASK_TAKEN, "caller.task.job"): (
        "Start as many clients as DMESH_NUM_CLIENTS says, or end those processes."
    ),
    (pb.ERROR_KIND_UNKNOWN_TASK, "caller.task.job"): "Check DTENSOR_CLIENT_ID and DTENSOR_JOB_NAME.",
    (pb.ERROR_KIND_SPEC_MISMATCH, "jobs"): (
        "Give all clients the same DTENSOR_JOBS and DTENSOR_JOB_NAME, and each program its own DMESH_CLUSTER."
    ),
}
_SETTINGS: Mapping[str, str] = {
    "settings.restart_policy": VARIABLES["restart_policy"],
    "settings.heartbeat_interval_ms": VARIABLES["heartbeat_interval"],
    "settings.lease_ms": VARIABLES["lease"],
    "settings.stuck_after_ms": VARIABLES["stuck_after"],
}
"""Environment variables of a cluster's settings."""


def advise(kind: int, fields: Iterable[str]) -> str:
    """Return the advice for an error of this kind; empty if there is none.

    Args:
        kind: The server's `ErrorKind`.
        fields: Refused fields of the request, as the server names them.
    """
    known = [text for field in fields if (text := _BY_FIELD.get((kind, field)))]
    if known:
        return known[0]
    variables = " and ".join(_SETTINGS[field] for field in fields if field in _SETTINGS)
    if not variables:
        return ""
    if kind == pb.ERROR_KIND_SPEC_MISMATCH:
        return f"Leave {variables} unset, or set it alike for all clients."
    return f"Correct {variables}."

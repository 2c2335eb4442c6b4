"""Callers of RPCs: read from the request, and checked against the token of the call."""

from __future__ import annotations

from typing import Any

from dmesh_server.core.model import Caller
from dmesh_server.rpc import convert
from dmesh_server.security.access import CALLER, check_cluster


def caller_of(request: Any) -> Caller:
    """Return the caller that a request names.

    Args:
        request: A message with a field `caller`.

    Raises:
        CoreError: There is none, or the token of the call is bound to other clusters.
    """
    caller = convert.caller(request.caller, request.HasField("caller"))
    check_cluster(CALLER.get(), caller.cluster)
    return caller

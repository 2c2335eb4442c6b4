"""Roles that calls and HTTP requests need. An unlisted one needs the greatest."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dmesh.security.tokens import Role

_COORDINATION = "/dmesh.v1.CoordinationService/"
_KEY_VALUE = "/dmesh.v1.KeyValueService/"
_VIEWERS_CALLS = ("GetClusterState", "GetMember", "GetBarrier", "GetProgress", "ListClusters")
_MEMBERS_CALLS = (
    "Register",
    "KeepSession",
    "Session",
    "PresentBarriers",
    "CancelBarrier",
    "Leave",
    "ReportError",
)
_KEY_VALUE_CALLS = (
    "Set", "Get", "GetMany", "List", "Delete", "Increment", "CompareAndSet", "Transaction", "Watch",
    "GrantLease", "RenewLease", "RevokeLease",
)  # fmt: skip

RPC_ROLES: Mapping[str, Role | None] = {
    **{_COORDINATION + name: Role.VIEWER for name in _VIEWERS_CALLS},
    **{_COORDINATION + name: Role.WORKER for name in _MEMBERS_CALLS},
    # Values may be secrets of the job, so that looking at clusters does not include looking at them.
    **{_KEY_VALUE + name: Role.WORKER for name in _KEY_VALUE_CALLS},
    **{_KEY_VALUE + name: Role.ADMIN for name in ("Backup", "Restore")},
    # Probes of orchestrators cannot show a token; there is nothing to learn but whether the server is well.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": Role.VIEWER,
    "/grpc.health.v1.Health/List": Role.VIEWER,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Role.VIEWER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.VIEWER,
}
"""The role that each RPC needs; None: nobody is asked for a token."""

PROBE_PATHS = frozenset({"/livez", "/readyz"})
"""HTTP paths of probes: open, and answered however many other requests there are."""

MEMBERSHIP_CALLS = frozenset(_COORDINATION + name for name in ("Register", "Leave", "ReportError"))
"""RPCs that a quota of calls delays and never refuses."""

OPEN_PATHS = PROBE_PATHS | {"/login"}
"""HTTP paths that may be read without a token: probes, and where a browser logs in."""

_ASSET_PATH = re.compile(r"/static/(?:[a-z]+/)?[a-z_]+\.(?:css|js|svg)")
"""Files that pages are made of: the same for all callers, without data of any cluster."""

PAGE_PATHS = frozenset({"/"})
"""HTTP paths of pages for people: a login is as good as a token, to read them."""

API_PREFIX = "/api/v1/"
"""Prefix of the REST interface. A login may read whatever a viewer may."""

_VALUE_PATH = re.compile(r"/api/v1/clusters/[^/]*/value/?")
"""Values may be secrets of the job."""

_OPERATORS_PATH = re.compile(r"/api/v1/(?:tokens|audit)(?:/.*)?")
"""Tokens that were issued, and who did what."""

_LOGIN_PATHS = frozenset({"/login", "/logout"})


def role_for_rpc(method: str) -> Role | None:
    """Return the role that an RPC needs, None if it is open to all.

    Args:
        method: `/package.Service/Method`.
    """
    return RPC_ROLES.get(method, Role.ADMIN)


def role_for_http(method: str, path: str) -> Role | None:
    """Return the role that an HTTP request needs, None if it is open to all."""
    if method in ("GET", "HEAD"):
        if _VALUE_PATH.fullmatch(path) or _OPERATORS_PATH.fullmatch(path):
            return Role.ADMIN
        return None if path in OPEN_PATHS or _ASSET_PATH.fullmatch(path) else Role.VIEWER
    if method == "POST" and path in _LOGIN_PATHS:
        return None
    return Role.ADMIN

"""Keys: names and sizes for all viewers; values only for operators, who may also increment or delete one.

Keys are named in the query, never in the path: they may be anything, such as `../../etc/passwd`.
"""

from __future__ import annotations

import base64
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh.security.tokens import Role
from dmesh_server.core.effects import KvIncremented
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import DropKey, KvGet, KvIncrement
from dmesh_server.core.model import Caller, KeyValue
from dmesh_server.core.operations import RESERVED
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry import logs
from dmesh_server.web.api.answers import (
    LARGEST,
    TEXT,
    ClusterName,
    Limit,
    Operation,
    answer,
    asker,
    refusals,
)
from dmesh_server.web.api.audit import record
from dmesh_server.web.api.operations import carry_out, operate
from dmesh_server.web.gate import has_role

KeyName = Annotated[
    str, Query(min_length=1, max_length=4096, pattern=TEXT, description="the key", examples=["dmesh/x"])
]


class KeyRow(BaseModel):
    """A key without its value."""

    key: str = Field(description="its name")
    size: int = Field(description="bytes of its value")
    create_revision: int = Field(description="revision at which it came into being")
    revision: int = Field(description="revision of its latest change")


class KeyPage(BaseModel):
    """Some keys of a cluster."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "revision": 57,
                    "keys": [{"key": "checkpoint/latest", "size": 8, "create_revision": 3, "revision": 57}],
                    "next": None, "total": 12, "total_bytes": 4096,
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    revision: int = Field(description="revision of the latest change of any key")
    keys: list[KeyRow] = Field(description="sorted")
    next: str | None = Field(description="`after` of the next page; null: this is the last one")
    total: int = Field(description="keys of the cluster, whatever their prefix")
    total_bytes: int = Field(description="bytes of all its keys and values")


class Increment(BaseModel):
    """A counter after an increment."""

    key: str = Field(description="its name")
    value: int = Field(description="its value")
    revision: int = Field(description="revision of the change")


class ValueView(BaseModel):
    """A key with its value."""

    key: str = Field(description="its name")
    size: int = Field(description="bytes of its value")
    create_revision: int = Field(description="revision at which it came into being")
    revision: int = Field(description="revision of its latest change")
    base64: str = Field(description="its value")
    text: str | None = Field(description="its value, if it is UTF-8; else null")


def router(runtime: Runtime) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["keys"])

    @routes.get("/clusters/{cluster}/keys", response_model=KeyPage, responses=refusals(404))
    async def list_keys(
        cluster: ClusterName,
        prefix: Annotated[
            str, Query(max_length=4096, pattern=TEXT, description="only keys that begin with it")
        ] = "",
        limit: Limit = 100,
        after: Annotated[
            str,
            Query(max_length=4096, pattern=TEXT, description="`next` of the page before, if any"),
        ] = "",
    ) -> Response:
        """List keys with their sizes and revisions, without values."""
        views = runtime.views
        found, more = views.keys(cluster, prefix, after, limit)
        summary = views.summary(cluster)
        return answer(
            KeyPage(
                cluster=cluster,
                revision=summary.revision,
                keys=[
                    KeyRow(
                        key=key.key,
                        size=key.size,
                        create_revision=key.create_revision,
                        revision=key.mod_revision,
                    )
                    for key in found
                ],
                next=found[-1].key if more else None,
                total=summary.keys,
                total_bytes=summary.key_bytes,
            )
        )

    @routes.get("/clusters/{cluster}/value", response_model=ValueView, responses=refusals(404))
    async def show_value(request: Request, cluster: ClusterName, key: KeyName) -> Response:
        """Show a key's value. Needs the role `admin`: values may be secrets of the job."""
        # The gate has asked for it already, by the path; a value is worth asking twice.
        if not has_role(request.scope, Role.ADMIN):
            raise CoreError(ErrorKind.PERMISSION_DENIED, "reading the values of keys needs the role admin")
        logs.info("admin_read", cluster=cluster, key=key, by=asker(request))
        event = KvGet(runtime.next_number(), Caller(cluster), key, timeout=0)
        async with record(request, "read_value", f"{cluster}: {key}"):
            found = await runtime.request(event, KeyValue)
        return answer(
            ValueView(
                key=found.key,
                size=len(found.value),
                create_revision=found.create_revision,
                revision=found.mod_revision,
                base64=base64.b64encode(found.value).decode(),
                text=_text(found.value),
            )
        )

    @routes.delete("/clusters/{cluster}/keys", response_model=Operation, responses=refusals(404, 409))
    async def delete_key(
        request: Request,
        cluster: ClusterName,
        key: KeyName,
        revision: Annotated[
            int, Query(ge=1, lt=1 << 63, description="revision of its latest change, as it was seen")
        ],
    ) -> Response:
        """Delete a key, unless it was changed since. Needs the role `admin`."""
        event = DropKey(runtime.next_number(), Caller(cluster), asker(request), key, revision)
        target = f"{key} (revision {revision})"
        return answer(await operate(runtime, request, event, "delete_key", target))

    @routes.post("/clusters/{cluster}/increments", response_model=Increment, responses=refusals(404, 409))
    async def increment_key(
        request: Request,
        cluster: ClusterName,
        key: KeyName,
        request_id: Annotated[
            str,
            Query(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="unique; repeated, it is counted once"),
        ],
        amount: Annotated[int, Query(ge=-LARGEST, le=LARGEST, description="added to its value")] = 1,
    ) -> Response:
        """Add to a key whose value is an integer; a missing key counts from 0. Needs the role `admin`."""
        if key.startswith(RESERVED):
            message = f"keys that begin with {RESERVED!r} are dmesh's own"
            raise CoreError(ErrorKind.PERMISSION_DENIED, message)
        event = KvIncrement(runtime.next_number(), Caller(cluster), request_id, key, amount)
        target = f"{key} (by {amount}, request {request_id})"
        done = await carry_out(runtime, request, event, KvIncremented, "increment_key", target)
        return answer(Increment(key=key, value=done.value, revision=done.revision))

    return routes


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None

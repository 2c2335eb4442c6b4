"""Shared parts of all REST resources: pages, JSON answers and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints
from starlette.exceptions import HTTPException

from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.messages import quote
from dmesh_server.core.model import Task
from dmesh_server.security.access import caller_name
from dmesh_server.web.gate import token_of

NAME = r"^[A-Za-z0-9_.-]{1,128}$"
"""Pattern of the names of clusters and jobs."""
TEXT = r"^[^\x00]*$"
TASK = r"^/job:[A-Za-z0-9_.-]{1,128}/task:[0-9]{1,9}$"
"""Pattern of a task's name."""
HEX = r"^[0-9a-f]{16}$"
LARGEST = (1 << 53) - 1
"""Largest integer that a request may name if nothing else bounds it: all readers of JSON keep it exactly."""
MOST = 1_000
"""Items on one page."""

Name = Annotated[str, StringConstraints(pattern=NAME)]
"""Name of a cluster or job in a body."""
ClusterName = Annotated[str, Path(pattern=NAME, description="name of the cluster", examples=["train"])]
JobName = Annotated[str, Path(pattern=NAME, description="name of the job", examples=["worker"])]
TaskIndex = Annotated[int, Path(ge=0, lt=1 << 31, description="index within the job", examples=[2])]
Limit = Annotated[int, Query(ge=1, le=MOST, description="most items of the answer")]


def _as_integer(number: object) -> object:
    return int(number) if isinstance(number, float) and number.is_integer() else number


AS_INTEGER = BeforeValidator(_as_integer)
"""Accepts 3.0 for an integer of a body that is otherwise checked strictly, as JSON does."""


class Problem(BaseModel):
    """Refusal of a request."""

    status: str = Field(description="the problem, the expected value, and the remedy")
    kind: str = Field(default="", description="kind of error, as in `dmesh.v1.ErrorKind`; may be empty")


class Operation(BaseModel):
    """An operation is done; repeated, it is answered the same."""

    done: bool = Field(description="true: the request has been carried out")
    action: str = Field(description="the action", examples=["evict_member"])
    cluster: str = Field(description="the cluster")
    target: str = Field(
        description="the barrier, member or key it was done to",
        examples=["/job:worker/task:2 (incarnation 00000000000000ff)"],
    )


STATUSES = {
    ErrorKind.INVALID_ARGUMENT: 422,
    ErrorKind.NOT_REGISTERED: 404,
    ErrorKind.UNKNOWN_TASK: 404,
    ErrorKind.KEY_NOT_FOUND: 404,
    ErrorKind.KEY_EXISTS: 409,
    ErrorKind.KEY_NOT_INTEGER: 409,
    ErrorKind.BARRIER_MISMATCH: 409,
    ErrorKind.CLUSTER_ENDING: 409,
    ErrorKind.SPEC_MISMATCH: 409,
    ErrorKind.PERMISSION_DENIED: 403,
}
"""HTTP status of each kind of refusal; 503 for all others."""

_DESCRIPTIONS = {
    401: "no token, or one that is not accepted",
    403: "the token's role does not suffice, or a page of another origin asks",
    404: "there is no such thing",
    409: "it is not as the request supposes; look again",
    421: "the Host header does not name this server",
    422: "the request makes no sense",
    503: "the server cannot do it now",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a resource's refusals, beside the common ones."""
    return {
        status: {"model": Problem, "description": _DESCRIPTIONS[status]}
        for status in sorted({401, 403, 421, 422, 503, *statuses})
    }


def answer(model: BaseModel) -> Response:
    """Encode a model, once: it was made from the server's own values and need not be checked again."""
    return encoded(encode(model))


def encode(model: BaseModel) -> bytes:
    """Return a model as JSON."""
    return model.model_dump_json().encode()


def encoded(body: bytes) -> Response:
    """Answer with JSON that was made already."""
    return Response(body, media_type="application/json")


async def core_refused(request: Request, error: Exception) -> Response:
    """Answer with the core's refusal."""
    assert isinstance(error, CoreError)
    problem = Problem(status=error.message, kind=error.kind.name)
    return JSONResponse(problem.model_dump(), STATUSES.get(error.kind, 503))


async def malformed(request: Request, error: Exception) -> Response:
    """Answer a request with malformed parameters."""
    assert isinstance(error, RequestValidationError)
    found = [
        f"{'.'.join(str(part) for part in one['loc'][1:])[:100]}: {one['msg'][:300]}"
        for one in error.errors()[:5]
    ]
    problem = Problem(status="; ".join(found), kind=ErrorKind.INVALID_ARGUMENT.name)
    return JSONResponse(problem.model_dump(), 422)


async def unreadable(request: Request, error: Exception) -> Response:
    """Answer a request whose body is no text, as `malformed` does."""
    assert isinstance(error, HTTPException)
    problem = Problem(status=str(error.detail), kind=ErrorKind.INVALID_ARGUMENT.name)
    return JSONResponse(problem.model_dump(), 422)


def invalid(message: str) -> CoreError:
    """Return the refusal of a parameter."""
    return CoreError(ErrorKind.INVALID_ARGUMENT, message)


def read_task(text: str) -> Task:
    """Return the task that a text of the pattern `TASK` names."""
    job, _, index = text.removeprefix("/job:").rpartition("/task:")
    return Task(job, int(index))


async def known_parameters_only(request: Request) -> None:
    """Refuse a query with parameters that there are not: a filter with a slip must not be taken for none.

    Raises:
        CoreError: There is one.
    """
    known = set(_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise invalid(f"there is no parameter {quote(name)} here; there are: {listed}")


def _parameters(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _parameters(inner)


def hexadecimal(number: int) -> str:
    """Return an incarnation as people see it."""
    return f"{number:016x}"


def age(now: float, then: float) -> float:
    """Return the seconds since `then`."""
    return max(0.0, round(now - then, 3))


def asker(request: Request) -> str:
    """Return the caller for messages and the audit log: a fingerprint and a name, never a token."""
    return caller_name(token_of(request.scope))

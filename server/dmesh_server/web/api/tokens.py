"""Tokens: issued and revoked by operators while the server runs; only hashes are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh.security.tokens import Role
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.quotas import Quota
from dmesh_server.security.access import Access
from dmesh_server.security.issued_tokens import IssuedToken, IssuedTokens
from dmesh_server.web.api.answers import AS_INTEGER, LARGEST, Name, answer, asker, refusals
from dmesh_server.web.api.audit import record
from dmesh_server.web.gate import token_of
from dmesh_server.web.logins import LoginCodes

_LONGEST_TTL = 100 * 366 * 86400.0
_Bound = Annotated[int, Field(ge=0, le=LARGEST), AS_INTEGER]
_Rate = Annotated[int, Field(ge=1, le=LARGEST), AS_INTEGER]

TokenId = Annotated[
    str, Path(max_length=100, description="public name of the token", examples=["8c1f00a2b3d4"])
]


class Quotas(BaseModel):
    """Bounds on what a token's holder may take; null: only the server's own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    clusters: _Bound | None = Field(
        default=None, description="clusters that it forms and that run at the same time"
    )
    tasks: _Bound | None = Field(default=None, description="tasks of these clusters together")
    keys: _Bound | None = Field(default=None, description="keys in these clusters")
    bytes: _Bound | None = Field(default=None, description="bytes of these keys and their values")
    calls_per_second: _Rate | None = Field(default=None, description="calls, on average over a second")


class TokenRequest(BaseModel):
    """A token to issue."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"name": "team-a", "role": "worker", "clusters": ["train"], "ttl": 2592000,
                 "quotas": {"tasks": 64, "bytes": 67108864}}
            ]
        },
    )  # fmt: skip

    name: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,128}$", description="name for logs")
    role: Literal["viewer", "worker", "admin"] = Field("worker", description="permissions of its holder")
    clusters: list[Name] = Field(
        default_factory=list, max_length=1000, description="clusters that it is bound to; none: all"
    )
    ttl: float | None = Field(
        default=None, gt=0, le=_LONGEST_TTL, description="seconds until it expires; null: never"
    )
    quotas: Quotas = Field(default_factory=Quotas, description="bounds on its holder")


class TokenRow(BaseModel):
    """A token that was issued; never the token itself."""

    id: str = Field(description="public name, by which it is revoked")
    name: str = Field(description="name for logs; may be empty")
    role: str = Field(description="viewer, worker or admin")
    clusters: list[str] = Field(description="clusters that it is bound to; empty: all")
    quotas: Quotas = Field(description="bounds on its holder")
    fingerprint: str = Field(description="8 hexadecimal digits by which logs name it")
    created: float = Field(description="unix time")
    expires: float | None = Field(description="unix time; null: never")
    expired: bool = Field(description="whether that time has come")
    by: str = Field(description="operator who issued it")


class NewToken(TokenRow):
    """A token that has just been issued."""

    token: str = Field(description="the token; it is shown this once")
    durable: bool = Field(description="whether it outlives the server's process")


class TokenList(BaseModel):
    """The tokens that this server has issued."""

    tokens: list[TokenRow] = Field(description="the oldest first")


class Revocation(BaseModel):
    """The end of a token; repeated, it is answered with `revoked: false`."""

    id: str = Field(description="public name of the token")
    revoked: bool = Field(description="false: there is no such token, or it was revoked before")


class LoginLink(BaseModel):
    """A link that logs one browser in, once, to look only."""

    path: str = Field(description="path and query of the link, on this server")
    ttl: float = Field(description="seconds after which the link is worth nothing")


def router(access: Access | None, codes: LoginCodes) -> APIRouter:
    """Return the resource.

    Args:
        access: Accepts the tokens; None if nobody has to show one.
        codes: One-time codes of links for wall screens.
    """
    routes = APIRouter(tags=["tokens"])

    @routes.get("/tokens", response_model=TokenList, responses=refusals())
    async def list_tokens(request: Request) -> Response:
        """List the tokens that were issued. Needs the role `admin`, of all clusters."""
        issued = _checked(request, access).issued
        return answer(TokenList(tokens=[TokenRow(**_row(one, issued)) for one in issued.all()]))

    @routes.post("/tokens", response_model=NewToken, responses=refusals())
    async def issue_token(request: Request, wanted: TokenRequest) -> Response:
        """Issue a token and show it, this once. Needs the role `admin`, of all clusters."""
        issued = _checked(request, access).issued
        quota = Quota(**wanted.quotas.model_dump())
        async with record(request, "create_token", wanted.name or "-") as entry:
            value, made = await issued.issue(
                Role[wanted.role.upper()],
                name=wanted.name,
                clusters=wanted.clusters,
                quota=quota,
                ttl=wanted.ttl,
                by=asker(request),
            )
            entry.target = f"{made.id} {made.name}".rstrip()
            clusters = ",".join(sorted(made.clusters)) or "all"
            entry.detail = f"role {wanted.role}, clusters {clusters}, fingerprint {made.fingerprint}"
        return answer(NewToken(token=value, durable=issued.durable, **_row(made, issued)))

    @routes.delete("/tokens/{token_id}", response_model=Revocation, responses=refusals(404))
    async def revoke_token(request: Request, token_id: TokenId) -> Response:
        """End a token, and the streams opened with it. Needs the role `admin`, of all clusters."""
        checked = _checked(request, access)
        async with record(request, "revoke_token", token_id[:100]) as entry:
            found = await checked.issued.revoke(token_id)
            entry.outcome = "done" if found is not None else "unknown"
        checked.end_streams()
        return answer(Revocation(id=token_id, revoked=found is not None))

    @routes.post("/login-links", response_model=LoginLink, responses=refusals())
    async def issue_login_link(request: Request) -> Response:
        """Issue a link for a wall screen. Needs the role `admin`, of all clusters.

        It logs one browser in, to look only, with the token that may do the least; an earlier link is worth
        nothing any more.
        """
        token = _checked(request, access).token_to_look()
        if token is None:
            raise CoreError(
                ErrorKind.INVALID_ARGUMENT, "all tokens of the token file have expired: renew one"
            )
        async with record(request, "create_login_link", "wall screen") as entry:
            entry.detail = f"logs in with {token.label}"
            code = codes.issue(token.value)
        return answer(LoginLink(path=f"/login?code={code}", ttl=codes.lifetime))

    return routes


def _checked(request: Request, access: Access | None) -> Access:
    """Refuse operators whose token is bound to clusters: they could issue themselves another one."""
    if access is None:
        raise CoreError(
            ErrorKind.INVALID_ARGUMENT, "this server does not check tokens (--insecure), so it issues none"
        )
    token = token_of(request.scope)
    if token is None or token.role < Role.ADMIN or token.clusters:
        raise CoreError(ErrorKind.PERMISSION_DENIED, "tokens are issued by operators (admin) of all clusters")
    return access


def _row(token: IssuedToken, issued: IssuedTokens) -> dict[str, Any]:
    quota = token.quota
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role.name.lower(),
        "clusters": sorted(token.clusters),
        "quotas": Quotas(
            clusters=quota.clusters,
            tasks=quota.tasks,
            keys=quota.keys,
            bytes=quota.bytes,
            calls_per_second=quota.calls_per_second,
        ),
        "fingerprint": token.fingerprint,
        "created": token.created,
        "expires": token.expires,
        "expired": issued.is_expired(token),
        "by": token.by,
    }

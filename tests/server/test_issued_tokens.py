"""Issued tokens: kept as hashes, durable, bound to clusters, ended by time and by revocation."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dmesh.errors import ConfigurationError
from dmesh.security.tokens import Role
from dmesh_server.core.quotas import Quota
from dmesh_server.security.issued_tokens import FILE, IssuedTokens


async def test_a_token_is_accepted_after_a_restart_and_kept_as_a_hash(tmp_path: Path) -> None:
    value, issued = await IssuedTokens(tmp_path).issue(
        Role.WORKER, name="train", clusters=["a", "b"], quota=Quota(keys=3), by="token 01234567"
    )
    content = (tmp_path / FILE).read_text()
    assert value not in content
    assert value.split("_", 2)[2] not in content
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    again = IssuedTokens(tmp_path)
    token = again.identify(value)
    assert token is not None
    assert (token.role, token.name, token.id) == (Role.WORKER, "train", issued.id)
    assert (token.covers("a"), token.covers("c")) == (True, False)
    assert again.quota(issued.id) == Quota(keys=3)
    assert again.all() == [issued]
    assert value not in repr((token, issued))


async def test_what_is_almost_a_token_is_none(tmp_path: Path) -> None:
    tokens = IssuedTokens(None)
    value, issued = await tokens.issue(Role.ADMIN)
    other, _ = await tokens.issue(Role.ADMIN)
    secret = other.split("_", 2)[2]
    for wrong in ("", "dmesh", "dmesh__", f"dmesh_{issued.id}_", value[:-1], value + "x", value.swapcase(),
                  f"dmesh_{issued.id}_{secret}", f"x_{value}"):  # fmt: skip
        assert tokens.identify(wrong) is None, wrong


async def test_an_end_by_time_and_by_revocation(tmp_path: Path) -> None:
    now = [100.0]
    tokens = IssuedTokens(tmp_path, wall_clock=lambda: now[0])
    value, issued = await tokens.issue(Role.VIEWER, ttl=30)
    assert tokens.is_valid(issued.id)
    now[0] = 130.0
    assert not tokens.is_valid(issued.id)
    token = tokens.identify(value)
    assert token is not None
    assert token.expired(now[0])
    assert await tokens.revoke(issued.id) == issued
    assert tokens.identify(value) is None
    assert await tokens.revoke(issued.id) is None
    assert IssuedTokens(tmp_path).all() == []


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": 2, "tokens": []}', '{"format": 1, "tokens": [{}]}']
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigurationError, match=FILE):
        IssuedTokens(tmp_path)

"""Policy of implicit gathers: what an operation may do to a layout without being told to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from dmesh.arrays import ledger
from dmesh.arrays.spec import Spec
from dmesh.errors import ConfigurationError, ImplicitGatherError

Policy = Literal["forbid", "warn", "allow"]
_POLICIES = ("forbid", "warn", "allow")
_policy: ContextVar[str] = ContextVar("dmesh_implicit_gather", default="forbid")


class ImplicitGatherWarning(UserWarning):
    """An operation makes an array larger on each device than its layout says."""


@contextmanager
def implicit_gather(policy: Policy) -> Iterator[None]:
    """Set what happens, within the block, if an operation would have to gather an array.

    It gathers an array if it needs more of it on each device than the layout says.

    The default is `"forbid"`. Completing a partial result, reading one element, and what an operation's
    documentation lists are always allowed.

    ```python
    with dmesh.implicit_gather("allow"):
        values = np.asarray(x)
    ```

    Args:
        policy: `"forbid"` raises ImplicitGatherError, `"warn"` warns and goes on, `"allow"` goes on.

    Raises:
        ConfigurationError: There is no such policy.
    """
    if policy not in _POLICIES:
        raise ConfigurationError(f"implicit_gather is {', '.join(_POLICIES)}, not {policy!r:.200}")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def is_larger(source: Spec, target: Spec) -> bool:
    """Return whether a placement needs more of an array on each device than another."""
    if target.shards >= source.shards:
        return False
    return target.largest > source.complete().largest


def check_gather(operation: str, source: Spec, target: Spec) -> None:
    """Apply the policy to an operation that needs an operand elsewhere than it is.

    Raises:
        ImplicitGatherError: The policy forbids it.
    """
    policy = _policy.get()
    if policy == "allow" or not is_larger(source, target):
        return
    advice = (
        "x.full() for the whole array"
        if operation == "np.asarray"
        else f"dmesh.relayout(x, dmesh.Layout({target.layout.sharding_specs}, mesh)) first"
    )
    name = ledger.current_operation(operation)
    message = (
        f"{name} needs {source.describe()} as {target.describe()}: {target.largest:,} bytes on each device, "
        f"where the layout says {source.complete().largest:,}. Call {advice}, or allow it with "
        'dmesh.implicit_gather("allow")'
    )
    if policy == "forbid":
        raise ImplicitGatherError(message)
    warnings.warn(message, ImplicitGatherWarning, stacklevel=3)

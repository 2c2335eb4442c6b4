"""Policy of implicit gathers: whether operations may gather a sharded operand on their own."""

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
    """An operation gathers an array: each device gets more of it than its layout specifies."""


@contextmanager
def implicit_gather(policy: Policy) -> Iterator[None]:
    """Set the policy of implicit gathers within a `with` block.

    An operation gathers an array if it needs more of it on a device than the layout specifies.

    The default is `"forbid"`. Completing a partial result, reading one element, and gathers that an operation
    documents are always allowed.

    ```python
    with dmesh.implicit_gather("allow"):
        values = np.asarray(x)
    ```

    Args:
        policy: `"forbid"` raises ImplicitGatherError, `"warn"` gathers with a warning, `"allow"` gathers.

    Raises:
        ConfigurationError: `policy` has another value.
    """
    if policy not in _POLICIES:
        raise ConfigurationError(
            f"implicit_gather() takes one of {', '.join(_POLICIES)}, got {policy!r:.200}"
        )
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def is_larger(source: Spec, target: Spec) -> bool:
    """Return whether `target` needs more of an array on each device than `source`."""
    if target.shards >= source.shards:
        return False
    return target.largest > source.complete().largest


def check_gather(operation: str, source: Spec, target: Spec) -> None:
    """Apply the policy to an operation that needs an operand in another placement.

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

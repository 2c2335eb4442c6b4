"""Position of a thread: the strategy in whose scope it is, and the replica that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from dmesh.distribute.base import ReplicaBase, StrategyBase
from dmesh.errors import StrategyError

__all__ = [
    "Frame",
    "Scope",
    "call_in",
    "default_frame",
    "entered",
    "experimental_set_strategy",
    "frame",
    "has_strategy",
    "in_cross_replica_context",
    "require_cross_replica",
    "set_default",
]


@dataclass(slots=True, eq=False)
class Frame:
    """Strategy and replica that the code of a thread belongs to."""

    strategy: StrategyBase
    """The strategy in whose scope it is."""
    replica: ReplicaBase | None = None
    """The replica that it is; None where it is for all replicas."""
    update: int | None = None
    """Copy of a variable that it updates, by position among this client's; see `extended.update`."""


_frame: ContextVar[Frame | None] = ContextVar("dmesh_distribute_frame", default=None)
_set_globally: ContextVar[StrategyBase | None] = ContextVar("dmesh_distribute_strategy", default=None)
_make_default: Callable[[], Frame] | None = None
_default: Frame | None = None

_S = TypeVar("_S", bound=StrategyBase)
_T = TypeVar("_T")


def set_default(make: Callable[[], Frame]) -> None:
    """Set the function that returns the frame of code outside of all scopes.

    The package sets it when it is imported: the default strategy is built on this module.
    """
    global _make_default
    _make_default = make


def default_frame() -> Frame:
    """Return the frame of code outside of all scopes: the only replica of the default strategy."""
    global _default
    if _default is None:
        assert _make_default is not None
        _default = _make_default()
    return _default


def frame() -> Frame:
    """Return the frame of the calling code."""
    inner = _frame.get()
    if inner is not None:
        return inner
    strategy = _set_globally.get()
    return default_frame() if strategy is None else Frame(strategy)


def call_in(inner: Frame, function: Callable[..., _T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _T:
    """Call a function in a frame."""
    token = _frame.set(inner)
    try:
        return function(*args, **kwargs)
    finally:
        _frame.reset(token)


@contextmanager
def entered(inner: Frame) -> Iterator[None]:
    """Run a block in a frame."""
    token = _frame.set(inner)
    try:
        yield
    finally:
        _frame.reset(token)


class Scope(Generic[_S]):
    """Block for which a strategy is the current one; `Strategy.scope()` returns it.

    It may be entered again within itself.
    """

    def __init__(self, strategy: _S) -> None:
        self._strategy = strategy
        self._tokens: list[Token[Frame | None]] = []

    def __enter__(self) -> _S:
        """Enter the scope. That of the default strategy changes nothing: code in it is its only replica.

        Raises:
            StrategyError: Another strategy's scope is around, or this is a replica.
        """
        if has_strategy():
            require_cross_replica(self._strategy)
        default = self._strategy is default_frame().strategy
        self._tokens.append(_frame.set(_frame.get() if default else Frame(self._strategy)))
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it."""
        if not self._tokens:
            raise StrategyError("this scope was left more often than it was entered")
        _frame.reset(self._tokens.pop())


def has_strategy() -> bool:
    """Return whether the calling code is in a strategy's scope or in one of its replicas."""
    return frame().strategy is not default_frame().strategy


def in_cross_replica_context() -> bool:
    """Return whether the calling code is in a scope and in no replica.

    Outside of all scopes it is the only replica of the default strategy.
    """
    return frame().replica is None


def experimental_set_strategy(strategy: StrategyBase | None) -> None:
    """Make a strategy the current one of this thread from here on, as if the rest were in its scope.

    Args:
        strategy: The strategy, or None to go back to the default.

    Raises:
        StrategyError: A scope is around the call.
    """
    if _frame.get() is not None:
        raise StrategyError(
            "experimental_set_strategy must not be called inside a strategy's scope: leave the scope of "
            f"{frame().strategy!r} first"
        )
    _set_globally.set(strategy)


def require_cross_replica(strategy: StrategyBase, instead: str = "") -> None:
    """Refuse callers that are in a replica, or in another strategy's scope.

    Args:
        strategy: The strategy that they call.
        instead: Advice to callers in a replica.

    Raises:
        StrategyError: The caller is one of them.
    """
    here = frame()
    if here.strategy is strategy and here.replica is None:
        return
    if here.strategy is default_frame().strategy:
        return
    if here.strategy is not strategy:
        raise StrategyError(
            f"two strategies are mixed: {here.strategy!r} is the current one here, but {strategy!r} was "
            "called. Leave the scope of one before using the other"
        )
    assert here.replica is not None
    raise StrategyError(
        instead
        or f"replica {here.replica.replica_id_in_sync_group} called a method for code outside of replicas: "
        "use dmesh.distribute.get_replica_context().merge_call()"
    )

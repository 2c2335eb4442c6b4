"""The way of a public function into a group: through the native core's fast path, or the function's own body.

The native core looks at the arguments first. If the group has a native endpoint, and the endpoint can take
the call whole, no Python runs; everything else goes through the function's body. The decorator makes that
visible where the function is defined; without the native core it changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from dmesh import native
from dmesh.collectives.request import Request
from dmesh.collectives.validation import RequestBuilder
from dmesh.errors import CollectiveTypeError, NativeCoreError
from dmesh.runtime import context

F = TypeVar("F", bound=Callable[..., Any])

NATIVE = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "all_to_all",
    "send",
    "recv",
)
"""Functions that the native core can take."""


class ProcessGroup(ABC):
    """Group of clients, as the public functions see it; see `group.Group`."""

    requests: RequestBuilder
    """Validates the calls of this rank."""

    @property
    def part(self) -> World:
        """The group as the part of the process-wide state that functions use if they are given no group."""
        return World(self)

    @abstractmethod
    def call(self, request: Request, timeout: float | None, async_op: bool) -> Any:
        """Carry out a validated call."""


@dataclass(frozen=True, slots=True)
class World:
    """Group of all clients, as a part of the process-wide state."""

    group: ProcessGroup
    """The group."""


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group that a function was given, or the world.

    Raises:
        CollectiveTypeError: It is no group.
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    if group is None:
        return context.current().get(World).group
    if not isinstance(group, ProcessGroup):
        raise CollectiveTypeError(f"group must be a dmesh.collectives.Group, got {type(group).__name__}")
    return group


def fast_path(function: F) -> F:
    """Let the native core take the usual calls of a public function; see `fast_path.c` in `client/native`."""
    try:
        core = native.core()
    except NativeCoreError:
        return function  # whoever starts the collectives hears of it
    if core is None or function.__name__ not in NATIVE:
        return function
    return cast(F, core.FastPath(function.__name__, function, resolve))


class method(Generic[F]):
    """Method of groups: a public function with `group=` this group.

    Args:
        function: The public function.
    """

    def __new__(cls, function: F) -> method[F]:
        """Return the native core's method, if it has one."""
        native_method = getattr(function, "method", None)
        return super().__new__(cls) if native_method is None else cast("method[F]", native_method)

    def __init__(self, function: F) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __get__(self, group: object, owner: type) -> F:
        if group is None:

            def unbound(group: ProcessGroup, /, *args: Any, **kwargs: Any) -> Any:
                return self._function(*args, group=group, **kwargs)

            return cast(F, unbound)

        def bound(*args: Any, **kwargs: Any) -> Any:
            return self._function(*args, group=group, **kwargs)

        return cast(F, bound)

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from numpy.typing import NDArray

from dmesh import native
from dmesh.native import BuildInfo

abi: int
build: BuildInfo
Endpoint: type[native.Endpoint]
RegisteredMemory: Callable[[], native.RegisteredMemory]
FastPath: Callable[[str, Callable[..., Any], ContextVar[Any], type], Any]
PlannedCall: type[native.PlannedCall]

def sum_rows(rows: NDArray[Any], /) -> NDArray[Any] | None: ...

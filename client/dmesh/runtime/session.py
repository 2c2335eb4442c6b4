"""A client's membership as a `with` block, and as a decorator of a program's main function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar, overload

from dmesh.runtime import context, exits, ranks
from dmesh.runtime.context import Context
from dmesh.runtime.system import initialize_accelerator_system, shutdown_accelerator_system

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver
    from dmesh.tpu.accelerator import TpuSystem

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Session:
    """This process as a client, from the beginning of a `with` block to its end; see `dmesh.session`."""

    def __init__(self, initialize: Callable[[], str]) -> None:
        self._initialize = initialize
        self._state: Context | None = None
        self.device_type = ""
        """Type of device that the program computes on: CPU, GPU or TPU; empty before the block."""

    @property
    def rank(self) -> int:
        """This client's rank; see `dmesh.rank`."""
        return ranks.rank()

    @property
    def size(self) -> int:
        """The number of clients; see `dmesh.size`."""
        return ranks.size()

    @property
    def local_rank(self) -> int:
        """This client's index on its host; see `dmesh.local_rank`."""
        return ranks.local_rank()

    @property
    def local_size(self) -> int:
        """The number of clients on this host; see `dmesh.local_size`."""
        return ranks.local_size()

    def __enter__(self) -> Session:
        self.device_type = self._initialize()
        self._state = context.current_or_none()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        state, self._state = self._state, None
        if state is None or context.current_or_none() is not state:
            return  # the program has shut it down itself
        if error is None:
            shutdown_accelerator_system()
        else:  # the others must not wait at the shutdown for a client that does not come
            exits.fail(error)

    def __repr__(self) -> str:
        if self._state is None:
            return "<dmesh.session, not open>"
        return f"<dmesh.session: rank {self.rank} of {self.size}, {self.device_type}>"


def session(
    device_type: str | None = None,
    enable_coordination_service: bool | None = True,
    num_logical_cpu_devices: int | None = None,
    experimental_reset_context: bool | None = False,
    *,
    backend: str | None = None,
    cluster_resolver: ClusterResolver | None = None,
    tpu: str | TpuSystem | None = None,
) -> Session:
    """Make this process a client for the length of a `with` block.

    Begins with `initialize_accelerator_system` and ends with `shutdown_accelerator_system`. If the block
    raises an exception, this client leaves at once in place of the shutdown, and the others' calls fail with
    an error that names it and the exception.

    ```python
    with dmesh.session("CPU") as me:
        total = dmesh.collectives.all_reduce(np.ones(3))
        print(f"rank {me.rank} of {me.size}: {total}")
    ```

    Args:
        device_type: As for `initialize_accelerator_system`, like all others.
        enable_coordination_service: Find the other clients through a coordination server.
        num_logical_cpu_devices: Number of logical CPU devices of this client.
        experimental_reset_context: Initialize although meshes were made before.
        backend: `tcp` or `mpi`.
        cluster_resolver: Says which clients there are.
        tpu: The TPU system whose cores are devices.

    Returns:
        The session. In the block, it has `rank`, `size`, `local_rank`, `local_size` and `device_type`.

    Raises:
        DMeshError: At the beginning of the block, what `initialize_accelerator_system` raises; at its end,
            what `shutdown_accelerator_system` raises.
    """
    return Session(
        lambda: initialize_accelerator_system(
            device_type,
            enable_coordination_service,
            num_logical_cpu_devices,
            experimental_reset_context,
            backend=backend,
            cluster_resolver=cluster_resolver,
            tpu=tpu,
        )
    )


@overload
def main(function: Callable[Arguments, Result], /) -> Callable[Arguments, Result]: ...


@overload
def main(
    function: str | None = None,
    /,
    *,
    device_type: str | None = None,
    num_logical_cpu_devices: int | None = None,
    backend: str | None = None,
    cluster_resolver: ClusterResolver | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]: ...


def main(
    function: Callable[..., object] | str | None = None,
    /,
    *,
    device_type: str | None = None,
    num_logical_cpu_devices: int | None = None,
    backend: str | None = None,
    cluster_resolver: ClusterResolver | None = None,
) -> object:
    """Run a function within a `dmesh.session`, each time it is called.

    ```python
    @dmesh.main
    def train(epochs: int) -> None:
        print(f"rank {dmesh.rank()} of {dmesh.size()} trains for {epochs} epochs")


    if __name__ == "__main__":
        train(3)
    ```

    Args:
        function: The function, if the decorator stands without parentheses; or the device type:
            `@dmesh.main("CPU")`.
        device_type: As for `initialize_accelerator_system`, like all others.
        num_logical_cpu_devices: Number of logical CPU devices of this client.
        backend: `tcp` or `mpi`.
        cluster_resolver: Says which clients there are.

    Returns:
        The function, which joins the cluster when it is called and leaves it when it returns.
    """
    wanted = function if isinstance(function, str) else device_type

    def decorate(wrapped: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(wrapped)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with session(
                wanted,
                num_logical_cpu_devices=num_logical_cpu_devices,
                backend=backend,
                cluster_resolver=cluster_resolver,
            ):
                return wrapped(*args, **kwargs)

        return run

    return decorate(function) if callable(function) else decorate

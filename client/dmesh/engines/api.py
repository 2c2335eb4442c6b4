"""`dmesh.launch`: the public function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dmesh.engines import gang, local
from dmesh.engines.coordinator import settings_of
from dmesh.engines.rank import Call
from dmesh.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from distributed import Client

Result = TypeVar("Result")


def launch(
    fn: Callable[..., Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    n: int = 4,
    on: Literal["local", "ray"] | Client = "local",
    *,
    initialize: bool = True,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call a function in `n` processes, the ranks of a cluster of their own, and return what each returns.

    Each rank joins the cluster, calls the function, and leaves the cluster when it has returned. The function
    uses dmesh as a program does: `dmesh.client_id()` is its rank. The coordination server runs in the process
    that calls this; if `DMESH_COORDINATOR` names one, that is used.

    Functions of a script or of a notebook's cell are sent to the ranks by cloudpickle, and a script needs no
    `if __name__ == "__main__"`, because ranks do not run it.

    ```python
    import numpy as np
    import dmesh

    def program(scale):
        return dmesh.collectives.all_reduce(np.array([scale * dmesh.client_id()]))

    sums = dmesh.launch(program, args=(10,), n=2)
    print(sums)  # -> [array([10]), array([10])]
    ```

    Args:
        fn: The function. It, its arguments and its results are pickled.
        args: Its positional arguments, the same for all ranks.
        kwargs: Its keyword arguments.
        n: Number of ranks.
        on: Processes that the ranks run in. `"local"`: new ones on this machine, which end with this one. A
            `dask.distributed.Client`: the worker processes of its cluster, one rank each. `"ray"`: actors of
            the Ray cluster that this process is connected to, all placed before the first one starts.
        initialize: Whether to call `initialize_accelerator_system()` in each rank first. False for a function
            that does so itself.
        max_restarts: Restarts of each rank that fails. A rank that is started again takes its own place in
            the running job, as described for the restart policy `rejoin`, under which the cluster then is.
        env: Environment variables of the ranks, beside those that their processes have.

    Returns:
        The results, by rank.

    Raises:
        RankFailedError: A rank failed: its function raised an exception, or its process ended. If several
            did, it is the one with which it began; the others, which followed, are in `failures`.
        EngineError: Dask or Ray has too few workers for all ranks to run at once, or dmesh is not there.
        MissingExtraError: Ray, or cloudpickle for a function of a script, is not installed.
        ArgumentTypeError: An argument has the wrong type, or cannot be pickled.
        ConfigurationError: An argument or an environment variable is not usable.
    """
    call = _checked(fn, args, kwargs, n, initialize, max_restarts, env)
    if isinstance(on, str) and on == "local":
        return cast(list[Result], local.run(call))
    if isinstance(on, str) and on == "ray":
        from dmesh.engines.ray import RayGang

        timeout = settings_of({**os.environ, **call.variables}).init_timeout
        return cast(list[Result], gang.run(RayGang(call.ranks, timeout), call))
    if _is_dask_client(on):
        from dmesh.engines.dask import DaskGang

        return cast(list[Result], gang.run(DaskGang(on, call.ranks), call))
    kind = ConfigurationError if isinstance(on, str) else ArgumentTypeError
    raise kind(f'on must be "local", "ray" or a dask.distributed.Client, got {on!r:.200}')


def _is_dask_client(on: object) -> bool:
    # Whoever has a client has imported the package.
    package: Any = sys.modules.get("distributed")
    return package is not None and isinstance(on, package.Client)


def _checked(
    fn: object, args: object, kwargs: object, n: object, initialize: object, max_restarts: object, env: object
) -> Call:
    if not callable(fn):
        raise ArgumentTypeError(f"fn must be a function, got {fn!r:.200}")
    if not isinstance(args, list | tuple):
        raise ArgumentTypeError(f"args must be a tuple or a list of arguments, got {args!r:.200}")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise ArgumentTypeError(f"kwargs must be a dict from names to arguments, got {kwargs!r:.200}")
    for name, number, least in (("n", n, 1), ("max_restarts", max_restarts, 0)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ArgumentTypeError(f"{name} must be an integer, got {number!r:.200}")
        if number < least:
            raise ConfigurationError(f"{name} must be at least {least}, got {number}")
    variables = {} if env is None else env
    if not isinstance(variables, Mapping) or not all(
        isinstance(text, str) for item in variables.items() for text in item
    ):
        raise ArgumentTypeError("env must be a dict from names of variables to their values, all strings")
    return Call(fn, tuple(args), dict(kwargs or {}), n, bool(initialize), max_restarts, dict(variables))  # type: ignore[arg-type]

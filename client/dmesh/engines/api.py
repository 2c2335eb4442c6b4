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
    """Call a function in `n` processes, the ranks of a new cluster, and return their results.

    Each rank joins the cluster, calls the function, and leaves the cluster. The function uses dmesh like any
    program: `dmesh.client_id()` is its rank. The coordination server runs in the calling process, unless
    `DMESH_COORDINATOR` names another one.

    cloudpickle sends functions of a script or a notebook cell to the ranks. A script needs no
    `if __name__ == "__main__"`, because ranks do not run the script.

    ```python
    import numpy as np
    import dmesh

    def program(scale):
        return dmesh.collectives.all_reduce(np.array([scale * dmesh.client_id()]))

    sums = dmesh.launch(program, args=(10,), n=2)
    print(sums)  # -> [array([10]), array([10])]
    ```

    Args:
        fn: The function. dmesh pickles the function, its arguments and its results.
        args: Its positional arguments, the same for all ranks.
        kwargs: Its keyword arguments.
        n: Number of ranks.
        on: Where the ranks run. `"local"`: in new processes on this machine, which end with the calling
            process. A `dask.distributed.Client`: in the worker processes of its cluster, one rank each.
            `"ray"`: in actors of the Ray cluster to which this process is connected, all placed before the
            first rank starts.
        initialize: Whether to call `initialize_accelerator_system()` in each rank before the function. Pass
            False if the function calls it.
        max_restarts: Maximum number of restarts of each rank. If it isn't 0, the cluster has the restart
            policy `rejoin`: a restarted rank takes its own task slot in the running job.
        env: Additional environment variables of the ranks.

    Returns:
        The results, by rank.

    Raises:
        RankFailedError: A rank failed: its function raised an exception, or its process ended. The error
            describes the first failure; `failures` lists all of them, the first one included.
        EngineError: Dask or Ray has too few workers to run all ranks at once, or they cannot import dmesh.
        MissingExtraError: Ray, or cloudpickle for a function of a script, is not installed.
        ArgumentTypeError: An argument has the wrong type, or cannot be pickled.
        ConfigurationError: An argument or an environment variable has a bad value.
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
    # A caller that has a client has imported the package.
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

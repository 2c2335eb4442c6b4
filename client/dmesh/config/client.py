"""TensorFlow's configuration functions: this process's place in its job, straight from the environment.

They work before `initialize_accelerator_system`, and read the environment again at every call, each only the
variables that it needs. Where `DTENSOR_JOBS` is not set, they say what the launcher does that has started
this process, or, of an initialized system, the cluster resolver that it was initialized with.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from dmesh.config.settings import read_client_id, read_heartbeat, read_job_name, read_jobs
from dmesh.errors import ConfigurationError
from dmesh.runtime import context


@dataclass(frozen=True)
class FoundVariables:
    """`DTENSOR_*` variables that a cluster resolver or a launcher gives in place of the environment."""

    values: Mapping[str, str]
    """Their values by name."""


def jobs() -> list[str]:
    """Returns the address of every client, by client id: the entries of `DTENSOR_JOBS`.

    The list is empty in local mode, that is when the variable is unset or empty.

    Raises:
        ConfigurationError: An entry is malformed or there twice, or BNS addresses are not sorted by task
            number.
    """
    return list(read_jobs(_variables()))


def num_clients() -> int:
    """Returns the number of clients; 1 in local mode.

    Raises:
        ConfigurationError: `DTENSOR_JOBS` is malformed.
    """
    return len(jobs()) or 1


def client_id() -> int:
    """Returns this client's id, from `DTENSOR_CLIENT_ID`: its index in `jobs()`, 0 by default.

    Raises:
        ConfigurationError: It is not an integer from 0 to `num_clients() - 1`.
    """
    return read_client_id(_variables(), len(jobs()))


def job_name() -> str:
    """Returns the job name that all clients share, from `DTENSOR_JOB_NAME`.

    The default is `localhost` in local mode and `worker` otherwise.

    Raises:
        ConfigurationError: The name cannot be part of a device name.
    """
    return read_job_name(_variables(), multi_client=bool(jobs()))


def full_job_name(task_id: int | None = None) -> str:
    """Returns the job, replica and task part of a client's device names, such as `worker/replica:0/task:1`.

    Args:
        task_id: Which client; this one if None.

    Raises:
        ConfigurationError: There is no such client.
    """
    if task_id is None:
        task_id = client_id()
    check_client_id(task_id, num_clients())
    return f"{job_name()}/replica:0/task:{task_id}"


def heartbeat_enabled() -> bool:
    """Returns whether `DTENSOR_ENABLE_HEARTBEAT` is on, which is the default.

    This is for programs that ask; the coordination service detects dead clients in any case.

    Raises:
        ConfigurationError: The value is neither a yes nor a no.
    """
    return read_heartbeat(context.environment())


def check_client_id(client: int, count: int) -> None:
    """Refuses a number that is not one of `count` clients.

    Raises:
        ConfigurationError: It is not.
    """
    try:
        known = not isinstance(client, bool) and 0 <= operator.index(client) < count
    except TypeError:
        known = False
    if not known:
        among = "the only client is 0" if count == 1 else f"the {count} clients are 0 to {count - 1}"
        raise ConfigurationError(
            f"there is no client {client!r}: {among}. DTENSOR_JOBS says which clients there are"
        )


def _variables() -> Mapping[str, str]:
    """Returns the variables that say who is in the cluster, as they are or as they should be."""
    environ, state = context.environment(), context.current_or_none()
    if state is not None:
        found = state.find(FoundVariables)
        instead = {} if found is None else found.values
    elif environ.get("DTENSOR_JOBS", "").strip():
        return environ
    else:
        # It knows resolvers, which know devices, which know this module.
        cluster = importlib.import_module("dmesh.config.launchers").detect()
        instead = {} if cluster is None else cluster.variables(environ)
    if not instead:
        return environ
    names = ("DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_JOB_NAME")
    return {name: instead.get(name, environ.get(name, "")) for name in names}

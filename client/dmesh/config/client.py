"""TensorFlow's configuration functions: this process's place in its job, straight from the environment.

They work before `initialize_accelerator_system`. Each call reads the variables it needs from the environment.
If `DTENSOR_JOBS` is not set, their values come from the cluster resolver with which the system was
initialized, or else from the launcher of this process.
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
    """`DTENSOR_*` variables from a cluster resolver or a launcher, which override the environment."""

    values: Mapping[str, str]
    """Their values by name."""


def jobs() -> list[str]:
    """Return the address of every client, by client id: the entries of `DTENSOR_JOBS`.

    The list is empty in local mode, that is when the variable is unset or empty.

    Raises:
        ConfigurationError: An entry is malformed or a duplicate, or BNS addresses are not sorted by task
            number.
    """
    return list(read_jobs(_variables()))


def num_clients() -> int:
    """Return the number of clients; 1 in local mode.

    Raises:
        ConfigurationError: `DTENSOR_JOBS` is malformed.
    """
    return len(jobs()) or 1


def client_id() -> int:
    """Return this client's id, from `DTENSOR_CLIENT_ID`: its index in `jobs()`, 0 by default.

    Raises:
        ConfigurationError: The variable is not an integer from 0 to `num_clients() - 1`.
    """
    return read_client_id(_variables(), len(jobs()))


def job_name() -> str:
    """Return the job name that all clients share, from `DTENSOR_JOB_NAME`.

    The default is `localhost` in local mode and `worker` otherwise.

    Raises:
        ConfigurationError: The name is not valid in a device name.
    """
    return read_job_name(_variables(), multi_client=bool(jobs()))


def full_job_name(task_id: int | None = None) -> str:
    """Return the job, replica and task part of a client's device names, such as `worker/replica:0/task:1`.

    Args:
        task_id: Id of the client; this one if None.

    Raises:
        ConfigurationError: The client does not exist.
    """
    if task_id is None:
        task_id = client_id()
    check_client_id(task_id, num_clients())
    return f"{job_name()}/replica:0/task:{task_id}"


def heartbeat_enabled() -> bool:
    """Return whether `DTENSOR_ENABLE_HEARTBEAT` is on, which is the default.

    dmesh itself ignores the variable: the coordination service always detects dead clients.

    Raises:
        ConfigurationError: The value is not a truth value.
    """
    return read_heartbeat(context.environment())


def check_client_id(client: int, count: int) -> None:
    """Raise an error unless a number is the id of one of `count` clients.

    Raises:
        ConfigurationError: There is no such client.
    """
    try:
        known = not isinstance(client, bool) and 0 <= operator.index(client) < count
    except TypeError:
        known = False
    if not known:
        among = "the only client is 0" if count == 1 else f"the {count} clients are 0 to {count - 1}"
        raise ConfigurationError(f"there is no client {client!r}: {among}. DTENSOR_JOBS lists the clients")


def _variables() -> Mapping[str, str]:
    """Return the environment with the `DTENSOR_*` variables of the found cluster."""
    environ, state = context.environment(), context.current_or_none()
    if state is not None:
        found = state.find(FoundVariables)
        instead = {} if found is None else found.values
    elif environ.get("DTENSOR_JOBS", "").strip():
        return environ
    else:
        # Imported here, because launchers import resolvers, which import devices, which import this module.
        cluster = importlib.import_module("dmesh.config.launchers").detect()
        instead = {} if cluster is None else cluster.variables(environ)
    if not instead:
        return environ
    names = ("DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_JOB_NAME")
    return {name: instead.get(name, environ.get(name, "")) for name in names}

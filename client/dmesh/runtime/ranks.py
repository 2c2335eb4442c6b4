"""Rank of this process and number of clients, in the world and on its host."""

from __future__ import annotations

from dmesh import config
from dmesh.config.settings import Settings, split_address
from dmesh.devices.device import known_members, this_client
from dmesh.runtime import context


def rank() -> int:
    """Return this client's rank in the world: its client id, from 0 to `size() - 1`.

    Works before `initialize_accelerator_system`, too, from the environment.

    ```python
    if dmesh.rank() == 0:
        print("one line for all of us")
    ```

    Raises:
        ConfigurationError: `DTENSOR_CLIENT_ID` or `DTENSOR_JOBS` is malformed.
    """
    return this_client().client_id


def size() -> int:
    """Return the number of clients; 1 for a process that runs alone.

    ```python
    mine = np.array_split(np.arange(12.0), dmesh.size())[dmesh.rank()]
    ```

    Raises:
        ConfigurationError: `DTENSOR_JOBS` is malformed.
    """
    return this_client().num_clients


def local_rank() -> int:
    """Return this client's position among the clients of its host, from 0 to `local_size() - 1`.

    Two containers with host names of their own are two hosts. Before `initialize_accelerator_system`, clients
    are on one host if their addresses name the same one.

    ```python
    scratch = f"/tmp/worker-{dmesh.local_rank()}"
    ```

    Raises:
        ConfigurationError: `DTENSOR_CLIENT_ID` or `DTENSOR_JOBS` is malformed.
    """
    return _of_this_host().index(rank())


def local_size() -> int:
    """Return the number of clients on this client's host.

    ```python
    threads = max(1, (os.cpu_count() or 1) // dmesh.local_size())
    ```

    Raises:
        ConfigurationError: `DTENSOR_CLIENT_ID` or `DTENSOR_JOBS` is malformed.
    """
    return len(_of_this_host())


def _of_this_host() -> list[int]:
    """Return the ranks on this client's host, in order."""
    own = rank()
    hosts: dict[int, object] = {
        member.rank: (member.process.boot_id, member.process.host) for member in known_members()
    }
    if not hosts:
        settings = context.find(Settings)
        addresses = config.jobs() if settings is None else settings.jobs
        hosts = {number: split_address(entry, "DTENSOR_JOBS")[0] for number, entry in enumerate(addresses)}
    return [number for number, host in sorted(hosts.items()) if host == hosts[own]] if hosts else [0]

"""Configuration of this process: environment variables, launchers, and TensorFlow's configuration functions.

The functions are in `client`. Importing this package does not import its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from dmesh.config.client import (
        client_id,
        full_job_name,
        heartbeat_enabled,
        job_name,
        jobs,
        num_clients,
    )
    from dmesh.runtime.connecting import experimental_connect_to_cluster

__all__ = [
    "client_id",
    "experimental_connect_to_cluster",
    "full_job_name",
    "heartbeat_enabled",
    "job_name",
    "jobs",
    "num_clients",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "config.client": (
            "client_id",
            "full_job_name",
            "heartbeat_enabled",
            "job_name",
            "jobs",
            "num_clients",
        ),
        "runtime.connecting": ("experimental_connect_to_cluster",),
    },
    "dmesh",
)

"""Capability table of docs/choosing-a-backend.md; `python -m tests.repo.capabilities` prints it."""

from __future__ import annotations

from dataclasses import fields

from dmesh.collectives.backends.base import Backend, Capabilities
from dmesh.collectives.backends.endpoints import SharedMemoryBackend, TcpBackend
from dmesh.collectives.backends.hierarchical import HierarchicalBackend
from dmesh.collectives.backends.loopback import LoopbackBackend
from dmesh.collectives.backends.mpi import MpiBackend
from dmesh.collectives.backends.nccl.backend import NcclBackend
from dmesh.collectives.backends.tcp.messages import MessageBackend

BACKENDS: tuple[type[Backend], ...] = (
    NcclBackend, SharedMemoryBackend, MpiBackend, HierarchicalBackend, TcpBackend, MessageBackend,
    LoopbackBackend,
)  # fmt: skip
"""In the order in which a group prefers them."""


def table() -> str:
    """Return the table as Markdown: one row for each backend."""
    names = [field.name for field in fields(Capabilities)]
    rows = [["backend", *names], ["---"] * (1 + len(names))]
    for backend in BACKENDS:
        rows.append([f"`{backend.name}`", *(getattr(backend.capabilities, name) for name in names)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())

"""Declarations of clusters: jobs and settings that an operator fixes before the first client registers.

A declaration applies to all generations of its cluster: the first client of each gets the declared settings,
and is refused if it asks for other jobs or settings. The clients choose the addresses of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dmesh_server.core import cluster_settings, records, validation
from dmesh_server.core.effects import Record
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Register
from dmesh_server.core.messages import quote
from dmesh_server.core.model import ClusterSettings, Limits
from dmesh_server.core.transaction import Transaction

RECORD = "declaration"
"""Key of a declaration's record, beside those of the cluster's generation."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declared cluster."""

    tasks: tuple[tuple[str, int], ...]
    """Number of tasks of each job, sorted by job."""
    settings: ClusterSettings
    """Declared settings. The first client decides the others."""


class Declarations:
    """The declared clusters of one server, by name.

    Args:
        limits: Bounds of the server.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._declared: dict[str, Declaration] = {}

    def names(self) -> list[str]:
        """Return the names of all declared clusters, sorted."""
        return sorted(self._declared)

    def find(self, name: str) -> Declaration | None:
        """Return the declaration of a cluster."""
        return self._declared.get(name)

    def declare(self, name: str, declaration: Declaration, transaction: Transaction) -> bool:
        """Declare a cluster; return whether that changes anything.

        Raises:
            CoreError: The declaration makes no sense, or there are too many.
        """
        validation.cluster_name(name)
        validation.job_sizes(declaration.tasks, self._limits)
        cluster_settings.decide(
            declaration.settings, self._limits, sum(count for _, count in declaration.tasks)
        )
        if self._declared.get(name) == declaration:
            return False
        if name not in self._declared and len(self._declared) >= self._limits.max_clusters:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"{len(self._declared)} clusters are declared, which is the server's limit",
            )
        self._declared[name] = declaration
        value = records.encode_declaration(declaration.tasks, declaration.settings)
        transaction.persist(name, records.CLUSTER, RECORD, value)
        return True

    def withdraw(self, name: str, transaction: Transaction) -> bool:
        """Forget a declaration; return whether there was one. A cluster that runs goes on."""
        if self._declared.pop(name, None) is None:
            return False
        transaction.persist(name, records.CLUSTER, RECORD, None)
        return True

    def restore(self, kept: Iterable[Record]) -> None:
        """Take up the declarations that a store has kept."""
        for record in kept:
            self._declared[record.cluster] = Declaration(*records.decode_declaration(record))

    def applied(self, event: Register) -> Register:
        """Return the registration that begins a generation, with the settings that are declared.

        Raises:
            CoreError: SPEC_MISMATCH: the client has other jobs, or other wishes.
        """
        name = event.caller.cluster
        declaration = self._declared.get(name)
        if declaration is None:
            return event
        tasks = tuple(sorted((job.name, len(job.addresses)) for job in event.jobs))
        if tasks != declaration.tasks:
            raise CoreError(
                ErrorKind.SPEC_MISMATCH,
                f"cluster {quote(name)} is declared with {_listed(declaration.tasks)}, but the client has "
                f"{_listed(tasks)}",
                fields=("jobs",),
            )
        return replace(event, settings=_merged(event.settings, declaration.settings, name))


def _listed(tasks: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{count} tasks of job {quote(job)}" for job, count in tasks)


def _merged(wish: ClusterSettings, declared: ClusterSettings, name: str) -> ClusterSettings:
    """Return the declared settings, with the client's values for undeclared ones."""
    merged = {}
    for field, unit in (
        ("restart_policy", ""), ("heartbeat_interval", "_ms"), ("lease", "_ms"), ("stuck_after", "_ms"),
    ):  # fmt: skip
        wished, fixed = getattr(wish, field), getattr(declared, field)
        if wished and fixed and wished != fixed and not (field == "stuck_after" and wished < 0 and fixed < 0):
            raise CoreError(
                ErrorKind.SPEC_MISMATCH,
                f"cluster {quote(name)} is declared with another {field.replace('_', ' ')} than the "
                "client requests",
                fields=(f"settings.{field}{unit}",),
            )
        merged[field] = fixed or wished
    return ClusterSettings(**merged)

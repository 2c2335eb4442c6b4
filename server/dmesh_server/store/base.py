"""What a store is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dmesh_server.core.effects import Record


class StoreError(OSError):
    """A store cannot be opened, read or written. The message says which, why, and what to do."""


class Store(Protocol):
    """Keeps records, each addressed by (cluster, kind, key).

    `load`, `commit` and `close` are called one at a time, from any thread.
    """

    @property
    def blocking(self) -> bool:
        """Whether calls may take long, as a disk does: then they do not belong on an event loop's thread."""

    def load(self) -> Sequence[Record]:
        """Returns all records that are kept, in the order in which each was last written.

        Raises:
            StoreError: They cannot be read.
        """

    def commit(self, records: Sequence[Record]) -> None:
        """Keeps these records, and forgets those without a value: all of them or none, durably on return.

        If one address occurs several times, the last counts. Forgetting what is not kept is no error.

        Raises:
            StoreError: They could not be made durable. The same records may be committed again.
        """

    def close(self) -> None:
        """Lets go of the store. Idempotent."""

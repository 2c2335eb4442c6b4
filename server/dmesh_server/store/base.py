"""The `Store` protocol and the errors of stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dmesh_server.core.effects import Record


class StoreError(OSError):
    """A store cannot be opened, read or written. The message says which, why, and what to do."""


class StoreRefusedError(StoreError):
    """The stored data cannot be used, and was not changed. A retry does not help."""


class StoreDamagedError(StoreRefusedError):
    """Acknowledged data is missing or altered. The message names the file and the offset."""


class StoreFormatError(StoreRefusedError):
    """The data was written by another program, or by another version of dmesh."""


class Store(Protocol):
    """Keeps records, each addressed by (cluster, kind, key).

    Its methods are called one at a time, from any thread.
    """

    @property
    def blocking(self) -> bool:
        """True if calls may wait for a disk, so that they must not run on an event loop's thread."""

    @property
    def untidy(self) -> bool:
        """True if `maintain` has something to do. Cheap; callable from any thread at any time."""

    def load(self) -> Sequence[Record]:
        """Return all records that are kept, in the order in which each was last written.

        Raises:
            StoreError: They cannot be read.
        """

    def commit(self, records: Sequence[Record]) -> None:
        """Keep these records, and forget those without a value: all of them or none, durably on return.

        If one address occurs several times, the last counts. Forgetting what is not kept is no error.

        Raises:
            StoreError: They could not be made durable. The same records may be committed again.
        """

    def maintain(self) -> None:
        """Do pending maintenance, such as copying a long log into a database.

        Called when no answer waits for it. A failure shows at the next commit.
        """

    def close(self) -> None:
        """Release the store. Idempotent."""

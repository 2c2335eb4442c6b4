"""Store in memory, which ends with its process."""

from __future__ import annotations

from collections.abc import Sequence

from dmesh_server.core.effects import Record


class MemoryStore:
    """Records in memory, for a server whose state need not outlive its process."""

    blocking = False
    """Calls return at once."""
    untidy = False
    """Maintenance is never pending."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str, str], Record] = {}

    def load(self) -> Sequence[Record]:
        """Return all records, in the order in which each was last written."""
        return list(self._records.values())

    def commit(self, records: Sequence[Record]) -> None:
        """Keep these records, and forget those without a value."""
        for record in records:
            address = (record.cluster, record.kind, record.key)
            # Removed first, so that an overwritten record moves to the end of the order.
            self._records.pop(address, None)
            if record.value is not None:
                self._records[address] = record

    def maintain(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the records can still be loaded, as a file's could."""

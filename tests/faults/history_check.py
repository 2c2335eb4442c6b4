"""Checks the histories of one run: `python -m tests.faults.history_check DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults.history import Violation, check_keys, check_revisions, check_watch, load, rate

MINIMUM_RATE = 50.0
"""Operations a second below which a run says nothing: it is invalid, not good."""


def check_directory(directory: Path) -> dict[str, float]:
    """Checks the histories in a directory; returns how much there was of what.

    Raises:
        Violation: They cannot be true, or there is too little of them to say.
    """
    operations, watchings = load(sorted(directory.glob("client-*.jsonl")))
    (journal,) = [watching for watching in watchings if watching.name.endswith("/journal")]
    last = journal.events[-1].revision if journal.events else 0
    if (per_second := rate(operations)) < MINIMUM_RATE:
        raise Violation(f"invalid run: {per_second:.0f} operations a second, fewer than {MINIMUM_RATE:.0f}")
    check_watch(journal, last)
    check_keys(operations)
    check_revisions(operations, journal.events)
    seen = {(event.revision, event.key): event for event in journal.events}
    for watching in watchings:
        if watching.events:
            check_watch(watching, watching.events[-1].revision)
        for event in watching.events:
            if seen.get((event.revision, event.key)) != event:
                raise Violation(f"watcher {watching.name} saw what the journal does not have", [event])
    return {
        "operations": len(operations),
        "operations of unknown outcome": sum(not operation.known for operation in operations),
        "operations per second": per_second,
        "revisions": last,
        "watches": len(watchings),
        "watched changes": sum(len(watching.events) for watching in watchings),
    }


if __name__ == "__main__":
    try:
        for name, number in check_directory(Path(sys.argv[1])).items():
            print(f"{name}: {number:.0f}")
    except Violation as violation:
        print(violation)
        sys.exit(1)

"""One rank that runs mpi4py's tests with the adapter; started by `__main__` under `dmesh run`.

Each test has groups of its own. Where it fails on a rank, that rank fails them, so that the others do not
wait; all meet before the next one. A test that takes too long ends the process, which names it first. A test
that lacks tags is repeated with larger ones.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import traceback
import unittest
from pathlib import Path
from typing import Any

from tests.mpi4py_suite import comm, module
from tests.mpi4py_suite.buffers import Absent

import dmesh
from dmesh.collectives.failure import Cause, Failure

ENDED = "its test has ended"
"""Part of the errors of ranks whose test has failed elsewhere."""


class Result(unittest.TestResult):
    """Outcome of one test; the first trouble counts."""

    def __init__(self) -> None:
        super().__init__()
        self.failfast = True
        self.outcome: dict[str, Any] = {"outcome": "passed"}

    def _trouble(self, error: Any) -> None:
        kind, value, trace = error
        if self.outcome["outcome"] == "passed":
            where = traceback.extract_tb(trace)[-1]
            text = f"{kind.__name__}: {value} ({Path(where.filename).name}:{where.lineno})"
            outcome = "absent" if kind is Absent else "ended" if ENDED in str(value) else "failed"
            self.outcome = {"outcome": outcome, "reason": str(value) if kind is Absent else text}
            self.outcome["trace"] = "".join(traceback.format_exception(*error))
        for group in comm.made:
            group.fail(Failure(Cause.BROKEN, f"{ENDED} on rank {group.communicator.rank}"))

    def addError(self, test: Any, error: Any) -> None:
        self._trouble(error)

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            self._trouble(error)

    def addSkip(self, test: Any, reason: str) -> None:
        self.outcome = {"outcome": "skipped", "reason": reason}


def cases(suite: Any) -> list[Any]:
    """Return the tests of a suite, in order."""
    if isinstance(suite, unittest.TestCase):
        return [suite]
    return [case for part in suite for case in cases(part)]


def main() -> None:
    directory, names, log_name = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
    first, limit = int(sys.argv[4]), float(sys.argv[5])
    dmesh.initialize_accelerator_system("CPU")
    world = dmesh.collectives.world()
    mpi = module.install()
    sys.path.insert(0, directory)
    tests = cases(unittest.TestLoader().loadTestsFromNames(names))
    with open(f"{log_name}.{world.rank}", "a") as log:

        def write(number: int, found: dict[str, Any]) -> None:
            print(
                json.dumps({"number": number, "of": len(tests), "test": tests[number].id()} | found),
                file=log,
                flush=True,
            )

        def give_up(number: int) -> None:
            write(number, {"outcome": "failed", "reason": f"hung: took more than {limit:.0f} s"})
            faulthandler.dump_traceback()
            os._exit(1)

        def run(number: int, first_tag: int) -> dict[str, Any]:
            module.begin(mpi, f"test {number}, tags from {first_tag}", first_tag)
            watch = threading.Timer(limit, give_up, (number,))
            watch.daemon = True
            watch.start()
            faulthandler.dump_traceback_later(limit + 10, exit=True)  # also where the interpreter is held
            tests[number].run(result := Result())
            watch.cancel()
            faulthandler.cancel_dump_traceback_later()
            return result.outcome | {"without": sorted(comm.substitutes)}

        for number in range(first, len(tests)):
            found = run(number, 0)
            lacks_tags = found.get("reason") == comm.NO_TAG
            if world.all_reduce(lacks_tags, "any", timeout=2 * limit):
                found = run(number, 1)
            world.barrier(timeout=2 * limit)
            write(number, found)
    dmesh.shutdown_accelerator_system()


if __name__ == "__main__":
    main()

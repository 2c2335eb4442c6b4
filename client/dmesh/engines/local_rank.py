"""Process of one rank, started as `python -m dmesh.engines.local_rank PAYLOAD REPORT`.

Both arguments are descriptors of files without a name, which this process inherits from the one that launched
it: the pickled call, behind a line of JSON that says how to import what it needs, and room for the report.
"""

from __future__ import annotations

import json
import os
import sys

from dmesh.engines.rank import Failure, Report, failure_of, run_rank
from dmesh.engines.serialization import dumps, loads


def main(argv: list[str]) -> int:
    """Run the rank; return the process's exit code."""
    payload, place = int(argv[1]), int(argv[2])
    os.ftruncate(place, 0)  # of an earlier start, which shares the position with this one
    os.lseek(place, 0, os.SEEK_SET)
    header, _, body = os.pread(payload, os.fstat(payload).st_size, 0).partition(b"\n")
    setup = json.loads(header)
    sys.path[:], sys.argv[:] = setup["path"], setup["argv"]
    function = None
    try:
        function, args, kwargs = loads(body)
    except Exception as error:  # noqa: BLE001 - whatever the user's modules raise when they are imported
        report = Report(failure=failure_of(error))
    else:
        report = run_rank({}, function, args, kwargs, setup["initialize"], setup["file"])
    try:
        data = dumps((os.getpid(), report), function)
    except Exception as error:  # noqa: BLE001 - likewise, when its result is pickled
        report = Report(
            failure=Failure(f"{type(error).__name__}: its result cannot be sent back: {error}", ())
        )
        data = dumps((os.getpid(), report), None)
    with open(place, "wb") as file:
        file.write(data)
    return 0 if report.failure is None else report.failure.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv))

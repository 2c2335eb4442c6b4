"""Process of one rank, started as `python -m dmesh.engines.local_rank PAYLOAD REPORT`.

Both arguments are file descriptors that this process inherits from the launching process. PAYLOAD has a
line of JSON (`sys.path` and the like) and then the pickled call. REPORT is an empty file for the report.
"""

from __future__ import annotations

import json
import os
import sys

from dmesh.engines.rank import Failure, Report, failure_of, run_rank
from dmesh.engines.serialization import dumps, loads


def main(argv: list[str]) -> int:
    """Run the rank; return the process's exit code."""
    payload, output = int(argv[1]), int(argv[2])
    os.ftruncate(output, 0)  # an earlier start may have written here; the file position is shared
    os.lseek(output, 0, os.SEEK_SET)
    header, _, body = os.pread(payload, os.fstat(payload).st_size, 0).partition(b"\n")
    setup = json.loads(header)
    sys.path[:], sys.argv[:] = setup["path"], setup["argv"]
    function = None
    try:
        function, args, kwargs = loads(body)
    except Exception as error:  # noqa: BLE001 - the user's modules may raise anything on import
        report = Report(failure=failure_of(error))
    else:
        report = run_rank({}, function, args, kwargs, setup["initialize"], setup["file"])
    try:
        data = dumps((os.getpid(), report), function)
    except Exception as error:  # noqa: BLE001 - so may pickling the result
        report = Report(failure=Failure(f"{type(error).__name__}: its result cannot be pickled: {error}", ()))
        data = dumps((os.getpid(), report), None)
    with open(output, "wb") as file:
        file.write(data)
    return 0 if report.failure is None else report.failure.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Stand-in for ssh: runs the command here, and passes bytes between it and its own input and output.

The names `host1`, `host2` and so on are hosts with the addresses 127.0.0.2, 127.0.0.3 and so on; no other
name can be reached. As with the real one, a shell runs the command in a fresh environment, with pipes alone.
Arguments NAME=VALUE before the host stand for the profile of the user there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading


def copy(source: int, destination: int) -> None:
    try:
        while data := os.read(source, 1 << 16):
            while data:
                data = data[os.write(destination, data) :]
    except OSError:
        pass  # the reader is gone, and the writer will notice
    os.close(destination)


def main(argv: list[str]) -> int:
    *options, host, command = argv
    number = re.fullmatch(r"(?:[a-z]+@)?host([0-9]+)", host)
    if number is None:
        sys.stderr.write(f"ssh: Could not resolve hostname {host}: Name or service not known\n")
        return 255
    environment = {
        name: os.environ[name] for name in ("HOME", "PATH", "USER", "STARTED_BY_TESTS") if name in os.environ
    }
    environment["SSH_CONNECTION"] = f"127.0.0.1 50000 127.0.0.{int(number[1]) + 1} 22"
    environment.update(option.split("=", 1) for option in options if "=" in option)
    os.write(1, b"Welcome to this host!\n")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(["sh", "-c", command], env=environment, cwd="/", bufsize=0, **pipes)
    ways = ((0, process.stdin), (process.stdout, 1), (process.stderr, 2))
    threads = [
        threading.Thread(
            target=copy, args=[end if isinstance(end, int) else os.dup(end.fileno()) for end in way]
        )
        for way in ways
    ]
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    for thread in threads:
        thread.daemon = thread is threads[0]
        thread.start()
    for thread in threads[1:]:
        thread.join()
    return process.wait()


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))

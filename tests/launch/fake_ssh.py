"""Stand-in for ssh: runs the command here, as a host that the name stands for.

A name of the form `hostN` is host 127.0.0.(N+1) of this machine, reached from 127.0.0.1. Other names cannot be
reached. As with the real one, the command goes through a shell in a fresh environment and in the home directory,
and is gone with its connection: it has pipes alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys


def main(argv: list[str]) -> int:
    host, command = argv[-2:]
    number = re.fullmatch(r"(?:[a-z]+@)?host([0-9]+)", host)
    if number is None:
        sys.stderr.write(f"ssh: Could not resolve hostname {host}: Name or service not known\n")
        return 255
    environment = {name: os.environ[name] for name in ("HOME", "PATH", "USER") if name in os.environ}
    environment["SSH_CONNECTION"] = f"127.0.0.1 50000 127.0.0.{int(number[1]) + 1} 22"
    environment.update(entry.split("=", 1) for entry in argv[:-2] if "=" in entry)  # of this host's profile
    sys.stdout.write("Welcome to this host!\n")
    sys.stdout.flush()
    process = subprocess.Popen(["sh", "-c", command], env=environment, cwd="/")
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tests on other versions of Python than the one that dmesh is developed on: `make pythons`.

| interpreter | condition |
|---|---|
| this machine's `python3.X`, on the path or in pyenv | it has its header files |
| Debian's, in a root file system that debootstrap makes in `build/pythons` | root on Linux |

The root file system is entered in mount and process namespaces of its own: they end with the command, and
everything that was mounted or started in them ends, too. A version without an interpreter is skipped, with a
message. Each environment has the versions in constraints.txt, and a wheel that its own compiler has built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.packaging.environments import (
    CONSTRAINTS,
    EXTRAS,
    ROOT,
    TEST_PACKAGES,
    IndexUnreachableError,
    Interpreter,
    cache_of_uv,
    make,
    run_tests,
)

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
"""Releases of Debian that have these versions; none has 3.12."""
FOLDER = ROOT / "build" / "pythons"
PART = (
    "tests/cli/test_local_verbs.py", "tests/cli/test_loops.py", "tests/collectives/test_consensus.py",
    "tests/collectives/test_envelopes.py", "tests/collectives/test_fork.py",
    "tests/collectives/test_interrupts.py", "tests/collectives/transport/test_transport_dedicated.py",
    "tests/coordination", "tests/data/test_prefetching.py", "tests/distribute/test_checkpoints.py",
    "tests/distribute/test_replica_threads.py", "tests/e2e/test_endings.py", "tests/e2e/test_initialize.py",
    "tests/launch/test_diagnosis.py", "tests/launch/test_escalation.py", "tests/launch/test_labels.py",
    "tests/launch/test_run.py", "tests/native/test_core.py", "tests/native/test_fast_path.py",
    "tests/native/test_native_loading.py", "tests/notebook/test_command.py",
    "tests/notebook/test_failures.py", "tests/notebook/test_kept_clients.py", "tests/runtime",
    "tests/server/store/test_directory.py", "tests/server/store/test_stores.py",
    "tests/testing/test_clock.py", "tests/testing/test_fake_cluster.py",
    *(f"--ignore=tests/coordination/test_coordination_{name}.py"
      for name in ("carriers", "large_names", "outages", "values")),
)  # fmt: skip
"""Tests of what differs between interpreters: signals, processes, forks, endings, threads, annotations, the
native core, and coordination. The checks run them on every change, so long files are not among them."""
_ARCHIVE = "http://deb.debian.org/debian"
_LONGEST = 300
"""Seconds after which a root file system is given up: the archive is too slow, or does not answer."""
_SCRIPTS = Path("/usr/share/debootstrap/scripts")
_NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
_FITS = """
import pathlib, sys, sysconfig
version = f"{sys.version_info[0]}.{sys.version_info[1]}"
headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(version != sys.argv[1] or not headers.exists() or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
"""
_ENTER = """
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm" # numbers of processes are others here than in segments of this machine
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --bind "$1" "$root$1"; shift; done
shift
set +e
chroot "$root" env -C "$PWD" "$@"
exit $? # the shell stays, for orphans need a parent
"""


class NoInterpreterError(Exception):
    """A version of Python cannot be had here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the versions that the command line names, and return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description="Tests dmesh on other versions of Python.")
    parser.add_argument("--version", action="append", choices=VERSIONS, help="default: all but this one")
    parser.add_argument("--debian", action="store_true", help="even if this machine has the interpreter")
    parser.add_argument("tests", nargs="*", help="pytest's arguments; default: a part of the default tests")
    options = parser.parse_args(arguments)
    own = ".".join(map(str, sys.version_info[:2]))
    failed = 0
    for version in options.version or (version for version in VERSIONS if version != own):
        try:
            python = find(version, options.debian)
            origin = f" of Debian {SUITES[version]}" if python.within else ""
            print(f"Python {version}: {python.path}{origin}", flush=True)
            place = FOLDER / version
            pinned = (f"--constraint={CONSTRAINTS}", *TEST_PACKAGES)
            make(place, pinned, python, f"[{','.join(EXTRAS)}]")
        except (NoInterpreterError, IndexUnreachableError) as error:
            print(f"SKIPPED: Python {version}: {error}", flush=True)
            continue
        code = run_tests(place, options.tests or [*PART], python)
        failed = failed or code
    return failed


def find(version: str, debian: bool = False) -> Interpreter:
    """Return an interpreter of this machine, or else Debian's.

    Raises:
        NoInterpreterError: There is none.
    """
    if not debian:
        for path in _local(version):
            command = [path, "-c", _FITS, version]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return Interpreter(path)
    suite = SUITES.get(version)
    if suite is None:
        raise NoInterpreterError("this machine has none with header files, and no release of Debian has it")
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoInterpreterError(
            f"this machine has none with header files; Debian {suite}'s takes root on Linux"
        )
    if shutil.which("debootstrap") is None:
        raise NoInterpreterError(f"Debian {suite}'s takes debootstrap: apt-get install debootstrap")
    root = _debian(version, suite)
    shared = [str(path) for path in (ROOT, cache_of_uv(), Path("/etc/ssl")) if path.exists()]
    enter = (*_NAMESPACES, "sh", "-euc", _ENTER, "sh", str(root), *shared, "--")
    return Interpreter(Path(f"/usr/bin/python{version}"), enter)


def _local(version: str) -> Iterator[Path]:
    """Yield what may be an interpreter of a version."""
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))


def _debian(version: str, suite: str) -> Path:
    """Make a root file system of a release with its Python and a compiler, unless it is there."""
    root = FOLDER / suite
    if root.exists():
        return root
    try:
        urllib.request.urlopen(f"{_ARCHIVE}/dists/{suite}/Release", timeout=30).close()
    except OSError as error:
        raise NoInterpreterError(f"Debian's archive does not answer: {error}") from error
    partial = FOLDER / f"{suite}.new"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    script = suite if (_SCRIPTS / suite).exists() else "sid"  # releases later than this machine's debootstrap
    try:
        subprocess.run(
            [*_NAMESPACES, "--mount-proc", "debootstrap", "--variant=minbase",
             f"--include=python{version}-dev,gcc,libc6-dev", suite, partial, _ARCHIVE, script],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LONGEST,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise NoInterpreterError(
            f"debootstrap failed: {' / '.join(error.stdout.splitlines()[-2:])}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoInterpreterError(f"debootstrap took longer than {_LONGEST} s") from error
    shutil.copy("/etc/hosts", partial / "etc" / "hosts")
    partial.rename(root)
    return root


if __name__ == "__main__":
    sys.exit(main())

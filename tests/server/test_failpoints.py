"""Failpoints do what the variable says, when it says so, and nothing otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dmesh_server import failpoints


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    failpoints.configure("")


def test_nothing_happens_by_default() -> None:
    assert failpoints.enabled() == ()
    for point in failpoints.POINTS:
        failpoints.hit(point)


def test_an_error_after_some_passages_and_a_number_of_times() -> None:
    failpoints.configure("store.before_write=error:ENOSPC:after=2:times=1; runtime.before_apply=sleep:0")
    assert failpoints.enabled() == ("store.before_write", "runtime.before_apply")
    failpoints.hit("store.before_write")
    failpoints.hit("store.before_write")
    with pytest.raises(OSError, match=r"failpoint store\.before_write") as caught:
        failpoints.hit("store.before_write")
    assert caught.value.errno == errno.ENOSPC
    failpoints.hit("store.before_write")
    failpoints.hit("store.before_commit")


def test_a_pause() -> None:
    failpoints.configure("store.before_write=sleep:0.05")
    before = time.monotonic()
    failpoints.hit("store.before_write")
    assert time.monotonic() - before >= 0.05


def test_a_kill() -> None:
    program = (
        "from dmesh_server import failpoints as f\n"
        "f.configure('store.after_commit=kill:after=1')\n"
        "f.hit('store.after_commit'); print('once', flush=True); f.hit('store.after_commit')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "once\n")


@pytest.mark.parametrize(
    "text",
    [
        "store.nowhere=kill",
        "store.before_write",
        "store.before_write=",
        "store.before_write=explode",
        "store.before_write=error",
        "store.before_write=error:ENOSUCHERROR",
        "store.before_write=error:errorcode",
        "store.before_write=sleep:long",
        "store.before_write=sleep:nan",
        "store.before_write=sleep:-1",
        "store.before_write=kill:after=x",
        "store.before_write=kill:after=-1",
        "store.before_write=kill:verb=1",
        "=kill",
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    failpoints.configure("store.before_commit=sleep:0")
    with pytest.raises(ValueError, match=r"DMESH_FAILPOINTS .*; ") as caught:
        failpoints.configure(text)
    if "nowhere" in text:
        assert all(point in str(caught.value) for point in failpoints.POINTS)
    assert failpoints.enabled() == ("store.before_commit",), "what was enabled is unchanged"


def test_the_server_refuses_to_start_with_an_unknown_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--no-http"],
        env={**os.environ, failpoints.VARIABLE: "store.nowhere=kill"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "'store.nowhere'; the points are runtime.before_apply, " in done.stderr
    assert "Traceback" not in done.stderr

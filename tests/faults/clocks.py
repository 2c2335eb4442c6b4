"""Processes whose clocks are wrong.

The wall clock: a small library, put in front of libc with LD_PRELOAD, that adds an offset which it reads from
a file at every call, so that a test can set a running process's clock. (Python, SQLite and gRPC ask libc for
the time.) The monotonic clocks: a time namespace of the kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>

/* Seconds to add, from the file named by WALL_CLOCK_OFFSET_FILE; 0 if there is none. */
static long long offset(void) {
    const char *path = getenv("WALL_CLOCK_OFFSET_FILE");
    char text[32];
    if (!path) return 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    if (got <= 0) return 0;
    text[got] = 0;
    return atoll(text);
}

int clock_gettime(clockid_t clock, struct timespec *when) {
    int answer = (int)syscall(SYS_clock_gettime, clock, when);
    if (!answer && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) when->tv_sec += offset();
    return answer;
}

int gettimeofday(struct timeval *restrict when, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    when->tv_sec = now.tv_sec;
    when->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *when) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (when) *when = now.tv_sec;
    return now.tv_sec;
}
"""


def missing() -> str:
    """Why the wall clock cannot be shifted here; empty if it can."""
    return "" if shutil.which("gcc") else "shifting the wall clock needs gcc (Debian: apt-get install gcc)"


class WallClock:
    """A wall clock that can be set: start processes with `environ`, then call `shift`."""

    def __init__(self, directory: Path, name: str = "clock") -> None:
        source, self._library = directory / "wallclock.c", directory / "wallclock.so"
        self._offset = directory / f"{name}.offset"
        if not self._library.exists():
            source.write_text(SHIM)
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source)], check=True
            )
        self.shift(0)

    @property
    def environ(self) -> dict[str, str]:
        """Variables for the processes that go by this clock."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET_FILE": str(self._offset)}

    def shift(self, seconds: int) -> None:
        """Sets the clock to the true time plus this, at once, for the running processes too."""
        new = self._offset.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._offset)  # never seen half-written


def time_namespace_missing() -> str:
    """Why time namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "time namespaces need root (run `sudo make faults`)"
    if not os.path.exists("/proc/self/ns/time") or shutil.which("unshare") is None:
        return "time namespaces need Linux 5.19 or newer and util-linux's unshare"
    return ""


def time_namespace(seconds: int) -> list[str]:
    """What runs a command with its monotonic clock and boot time shifted when put in front of it."""
    return ["unshare", "--time", "--monotonic", str(seconds), "--boottime", str(seconds)]

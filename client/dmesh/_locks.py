"""Locks that Ctrl-C leaves unlocked once `with lock:` is over, in every release of CPython.

A signal handler that raises in the main thread must find a lock either not taken yet, or in a block that
releases it. CPython 3.14 also runs handlers between the call of `__enter__` and the block
(https://github.com/python/cpython/issues/148874, mended in 3.15): the lock stays locked for ever.
"""

from __future__ import annotations

import sys
import threading

if sys.version_info[:2] == (3, 14):

    class _Guard:
        """Lock whose `__enter__` ends without a call, after which CPython would look for signals.

        `for` takes the lock and looks for none, and neither does the return to the `with` statement.
        """

        __slots__ = ("__exit__", "_taking", "acquire", "locked", "release")

        def __init__(self, lock: threading.Lock | threading.RLock) -> None:
            self.acquire = lock.acquire
            self.release = lock.release
            self.locked = lock.locked
            self.__exit__ = lock.__exit__
            self._taking = iter(lock.acquire, None)

        def __enter__(self) -> bool:
            for taken in self._taking:
                return taken
            raise AssertionError("a lock's acquire returns a bool")

    def Lock() -> _Guard:
        """Return an unlocked lock, a `threading.Lock`."""
        return _Guard(threading.Lock())

    def RLock() -> _Guard:
        """Return an unlocked lock that its thread may take again, a `threading.RLock`."""
        return _Guard(threading.RLock())

else:
    Lock, RLock = threading.Lock, threading.RLock

"""The end of a process that is a client: its exit code, its traceback, and the news for the other clients."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from dmesh.collectives.communicator import Communicator
from dmesh.coordination.agent_source import AgentSource
from dmesh.errors import (
    BarrierError,
    CoordinationError,
    CoordinatorUnavailableError,
    DMeshError,
    FencedError,
    PeerLostError,
)
from dmesh.runtime import context
from dmesh.runtime.context import Context
from dmesh.runtime.membership import Client

EXIT_LOST_PEER = 75
"""A client's exit code after an uncaught error that says that another client, or the server, is lost."""
EXIT_FENCED = 76
"""A client's exit code after an uncaught error that is due to its having been declared lost or failed."""

_previous_excepthook = sys.excepthook
_previous_exit: Callable[..., NoReturn] = sys.exit
_exit_reason = ""
_owner_pid = 0
_fenced = False
"""True if the client that `fail` ended had been declared lost or failed."""

os.register_at_fork(after_in_child=context.disown_after_fork)


def install() -> None:
    """Watch how this process ends, which is a client from now on."""
    global _previous_excepthook, _previous_exit, _exit_reason, _owner_pid, _fenced
    uninstall()  # still there after `fail`
    _previous_excepthook, _previous_exit = sys.excepthook, sys.exit
    _exit_reason, _owner_pid, _fenced = "", os.getpid(), False
    sys.excepthook = _on_exception
    sys.exit = _exit
    atexit.register(_leave_at_exit)


def uninstall() -> None:
    """End what `install` began: the client leaves by a shutdown."""
    if sys.excepthook is _on_exception:
        sys.excepthook = _previous_excepthook
    if sys.exit is _exit:
        sys.exit = _previous_exit
    atexit.unregister(_leave_at_exit)


def fail(error: BaseException) -> None:
    """End this client's membership because of an error, before the process ends, if it does.

    The others hear of it at once. If nothing catches the error, the process has the exit code that it would
    have without this. `SystemExit` of code 0 is the normal end of a program.
    """
    global _fenced
    client = context.find(Client)
    if client is None:
        if context.fake_process() is None:
            end_alone(context.current())
        return
    _fenced = client.fenced
    leave_after(error)


def end_alone(state: Context) -> None:
    """Shut down a single process's system, and return to the uninitialized state."""
    try:
        state.get(AgentSource).close()
        state.get(Communicator).close(linger=0.0)
    finally:
        context.clear()


class _Exit(SystemExit):
    """A `SystemExit` that takes note of its exit code if nothing catches it."""

    def __del__(self) -> None:
        # The interpreter drops an exception that nothing has caught when no Python code runs any more; one
        # that was caught ends earlier, within some frame.
        if threading.current_thread() is threading.main_thread() and not _has_caller():
            _note_exit_code(self.code)


def _has_caller() -> bool:
    try:
        sys._getframe(2)
    except ValueError:
        return False
    return True


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising `SystemExit(status)`: a `sys.exit` that remembers the status.

    An exit code can be known in no other way: it is no exception for `sys.excepthook`, and no argument for
    `atexit`.
    """
    raise _Exit(status)


def _note_exit_code(code: object) -> None:
    if code is None or code == 0:
        return
    _note(f"exited with code {code & 0xFF if isinstance(code, int) else 1}")


def _note(reason: str) -> None:
    global _exit_reason
    _exit_reason = reason


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:1000]


def _on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print the traceback, then notify the others at once: they may be waiting for this client."""
    _previous_excepthook(kind, error, traceback)
    code = leave_after(error)
    if code is not None and not (sys.flags.interactive or hasattr(sys, "ps1")):
        # The only way for a hook to have a say in it; Python ends with 1 after any other exception.
        raise SystemExit(code)


def leave_after(error: BaseException | None) -> int | None:
    """End this client's membership: its program, or the function that it ran, has ended.

    Args:
        error: The exception that ended it; None for a normal end.

    Returns:
        The exit code that follows from the exception; None for Python's own.
    """
    code = None
    if isinstance(error, SystemExit):
        _note_exit_code(error.code)
    elif error is not None:
        client = context.find(Client)
        code = _exit_code(error, _fenced if client is None else client.fenced)
        _note(_reason(error))
    _leave_at_exit()
    return code


def _exit_code(error: BaseException, fenced: bool) -> int | None:
    """Return the exit code that follows from an uncaught error; None for Python's own."""
    if isinstance(error, FencedError) or (isinstance(error, DMeshError) and fenced):
        return EXIT_FENCED
    # Barrier errors that a departure causes, not a disagreement or a timeout.
    if isinstance(error, PeerLostError | CoordinatorUnavailableError) or type(error) is BarrierError:
        return EXIT_LOST_PEER
    return None


def _leave_at_exit() -> None:
    """End this client's membership when the interpreter ends without a shutdown."""
    client = context.find(Client)
    if client is None or os.getpid() != _owner_pid:
        return  # shut down already, or a forked child, which is not the client
    context.clear()
    try:
        if not _exit_reason:
            client.finish()
            return
    except KeyboardInterrupt:  # while it waited for the others: it has left all the same
        return
    with contextlib.suppress(CoordinationError):  # the server is gone
        client.leave(_exit_reason)

"""Tracebacks of many processes on one terminal: each stack once, and a consequence as one line. No IO."""

from __future__ import annotations

from dmesh.consequences import LOST_SOMEBODY

_HEADER = b"Traceback (most recent call last):"
_OWN_ERROR = b"dmesh.errors."
_LONGEST = 400
"""Lines of a traceback that are held back at most."""
_PAUSE = 0.15
"""Seconds without another line after which a traceback is complete."""


class ShownTracebacks:
    """The tracebacks that are on the terminal already, of all processes of a job."""

    def __init__(self) -> None:
        self._stacks: set[tuple[bytes, ...]] = set()
        self._messages: set[tuple[bytes, ...]] = set()

    def fold(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines to show of a complete traceback.

        The stack is left out if it has been shown, if the error only says that another process has failed, or
        if it is an error of dmesh's that another rank has reported in the same words; of a message of several
        lines that has been shown, the first line remains.
        """
        end = _end_of_stack(lines)
        stack, message = tuple(lines[:end]), tuple(lines[end:])
        if not message:
            return lines
        repeated = message in self._messages
        self._messages.add(message)
        if repeated:
            message = message[:1]
        same_failure = repeated and message[0].startswith(_OWN_ERROR)
        if stack in self._stacks or same_failure or _type_name(message[0]) in LOST_SOMEBODY:
            return list(message)
        self._stacks.add(stack)
        return [*stack, *message]


class TracebackFolder:
    """Holds back the tracebacks in one process's output until they are complete, and folds them.

    Args:
        shown: Shared by all processes of the job.
    """

    def __init__(self, shown: ShownTracebacks) -> None:
        self._shown = shown
        self._held: list[bytes] = []
        self.due: float | None = None
        """Time from which the lines held back count as complete; None if there are none."""

    def feed(self, lines: list[bytes], now: float) -> list[bytes]:
        """Add lines; return the lines that can be shown now."""
        ready: list[bytes] = []
        for line in lines:
            if not self._held and not line.startswith(_HEADER):
                ready.append(line)
                continue
            self._held.append(line)
            self.due = now + _PAUSE
            if len(self._held) > _LONGEST:
                ready += self.release()
        return ready

    def release(self) -> list[bytes]:
        """Return the lines to show of those held back."""
        held, self._held, self.due = self._held, [], None
        return self._shown.fold(held) if held else []


def _end_of_stack(lines: list[bytes]) -> int:
    """Return the index of the line with the uncaught exception."""
    end = len(lines)
    in_frames = False
    for index, line in enumerate(lines):
        if line.startswith(_HEADER):
            in_frames = True
        elif in_frames and line and not line[:1].isspace():
            in_frames, end = False, index
    return end


def _type_name(line: bytes) -> str:
    return line.partition(b":")[0].rpartition(b".")[2].strip().decode("utf-8", "replace")

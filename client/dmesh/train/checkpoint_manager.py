"""Numbered checkpoints in a directory, under the names of `tf.train`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import SupportsInt

from dmesh._files import names_in
from dmesh.errors import ArgumentTypeError, CheckpointError
from dmesh.train.checkpoints import NUMBERED, Array, Checkpoint, CheckpointPath, write_values

__all__ = ["CheckpointManager", "latest_checkpoint"]


def latest_checkpoint(checkpoint_dir: CheckpointPath) -> str | None:
    """Return the path of the checkpoint with the highest number in a directory; None if there is none."""
    found = _numbered(Path(checkpoint_dir), None)
    return found[-1][1] if found else None


def _numbered(directory: Path, wanted: str | None) -> list[tuple[int, str]]:
    """Return the numbers and paths of the checkpoints in a directory, in the order of their numbers."""
    found = map(NUMBERED.fullmatch, names_in(directory))
    matches = [match for match in found if match and not match[0].startswith(".")]
    return sorted(
        (int(match[2]), str(directory / match[0])) for match in matches if wanted in (None, match[1])
    )


class CheckpointManager:
    """Numbered checkpoints in a directory, of which the latest ones are kept.

    Args:
        checkpoint: What is saved.
        directory: Directory of the files, which is created if it is missing.
        max_to_keep: Number of checkpoints to keep; None for all.
        keep_checkpoint_every_n_hours: If given, the oldest of the others is kept, too, and each that is so
            many hours younger than the last one that was kept.
        checkpoint_name: First part of the files' names.
        step_counter: Number of the program's steps, such as a variable.
        checkpoint_interval: Number of steps between checkpoints; None to save whenever `save` is called.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        last_checkpoint_step: The step from which the first interval counts; None to save at once.

    Raises:
        ArgumentTypeError: `checkpoint` is no `Checkpoint`.
        CheckpointError: `max_to_keep` is less than 1, the name has a slash, or an interval has no counter.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: CheckpointPath,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: SupportsInt | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        last_checkpoint_step: int | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise ArgumentTypeError(
                f"checkpoint must be a dmesh.train.Checkpoint, got {type(checkpoint).__name__}"
            )
        if max_to_keep is not None and max_to_keep < 1:
            raise CheckpointError(f"max_to_keep must be at least 1, or None for all; got {max_to_keep!r}")
        if not checkpoint_name or "/" in checkpoint_name or checkpoint_name.startswith("."):
            raise CheckpointError(
                f"checkpoint_name must be the beginning of a file's name, got {checkpoint_name!r:.80}"
            )
        if checkpoint_interval is not None and step_counter is None:
            raise CheckpointError("checkpoint_interval needs step_counter, which says how many steps passed")
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._hours = keep_checkpoint_every_n_hours
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._set_due(last_checkpoint_step)

    @property
    def checkpoint(self) -> Checkpoint:
        """The saved object."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where."""
        return str(self._directory)

    @property
    def checkpoint_interval(self) -> int | None:
        """Number of steps between checkpoints."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are there, oldest first."""
        return [path for _, path in _numbered(self._directory, self._name)]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the latest one; None if there is none."""
        return next(reversed(self.checkpoints), None)

    def save(
        self,
        checkpoint_number: SupportsInt | None = None,
        check_interval: bool = True,
        options: object = None,
    ) -> str | None:
        """Write a checkpoint, and delete those that are not to be kept.

        Args:
            checkpoint_number: Its number; None for the one after the latest.
            check_interval: False to write it even if fewer steps than `checkpoint_interval` have passed.
            options: Without effect: for programs written for TensorFlow.

        Returns:
            Its path; None if too few steps have passed.
        """
        del options
        step = self._step()
        if check_interval and step is not None and step < self._due:
            return None
        path = self.save_values(self._checkpoint.values(), checkpoint_number)
        self._set_due(step)
        return path

    def _step(self) -> int | None:
        return None if self._step_counter is None else int(self._step_counter)

    def _set_due(self, last: int | None) -> None:
        """Set the step at which the next checkpoint is due, after that of the last one."""
        if last is None or self._interval is None:
            self._due = float("-inf")
        else:
            self._due = last + self._interval

    def save_values(self, values: Mapping[str, Array], checkpoint_number: SupportsInt | None = None) -> str:
        """Write values that `Checkpoint.values` has returned; see `save`."""
        there = _numbered(self._directory, self._name)
        number = (there[-1][0] if there else 0) + 1 if checkpoint_number is None else int(checkpoint_number)
        path = write_values(self._directory / f"{self._name}-{number}.npz", values)
        if self._max_to_keep is not None:
            self._delete_old(self.checkpoints[: -self._max_to_keep], path)
        return path

    def _delete_old(self, paths: Sequence[str], new: str) -> None:
        kept = float("-inf")  # when the last one was written that is kept
        for path in paths:
            if path == new:
                continue
            with suppress(FileNotFoundError):
                written = os.path.getmtime(path)
                if self._hours is not None and written >= kept + 3600 * self._hours:
                    kept = written
                else:
                    os.unlink(path)

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint; call `init_fn` if there is none.

        Returns:
            Its path; None if there is none.

        Raises:
            CheckpointError: It is damaged, or does not fit.
        """
        path = self.latest_checkpoint
        if path is not None:
            self._checkpoint.read(path)
            self._set_due(self._step())
        elif self._init_fn is not None:
            self._init_fn()
        return path

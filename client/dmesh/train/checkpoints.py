"""Checkpoints: the values of variables and arrays in a file, under the names of `tf.train`.

```python
import numpy as np
import dmesh

weights = dmesh.Variable(np.zeros(3))
manager = dmesh.train.CheckpointManager(dmesh.train.Checkpoint(weights=weights), "checkpoints", max_to_keep=2)
manager.restore_or_initialize()
weights.assign_add(np.ones(3))
manager.save()  # -> 'checkpoints/ckpt-1.npz'
```

A file is a `.npz` archive of NumPy's; nothing in it is executed. It is complete or not there: it gets its
name once it is on disk. A program of several clients calls these functions on one of them, or leaves that
to `dmesh.distribute.experimental.PreemptionCheckpointHandler`.
"""

from __future__ import annotations

import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsInt, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmesh._files import names_in
from dmesh.errors import ArgumentTypeError, CheckpointError, RestoreMismatchError

__all__ = ["Checkpoint", "CheckpointManager", "RestoreStatus", "latest_checkpoint"]

Array: TypeAlias = NDArray[Any]
_NUMBERED = re.compile(r"(.+)-(\d{1,18})\.npz")
_CHECKPOINT_PATH = str | os.PathLike[str]


class RestoreStatus:
    """What `Checkpoint.restore` has restored; its methods return it.

    Args:
        path: The file; None if none was given.
        restored: Names of the values that were restored.
        unused: Names of the file's other values.
    """

    def __init__(self, path: str | None, restored: Sequence[str] = (), unused: Sequence[str] = ()) -> None:
        self._path, self._restored, self._unused = path, restored, unused

    def assert_consumed(self) -> RestoreStatus:
        """Require that all values of the file were restored.

        Raises:
            RestoreMismatchError: They were not, or no checkpoint was given.
        """
        self.assert_existing_objects_matched()
        if self._unused:
            raise RestoreMismatchError(
                f"nothing was given the value of {', '.join(self._unused)} in {self._path}; "
                "expect_partial() allows it"
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Require that all items got a value, as those of a checkpoint that was given always do.

        Raises:
            RestoreMismatchError: No checkpoint was given.
        """
        if self._path is None:
            raise RestoreMismatchError("nothing was restored: no checkpoint was given, but None")
        return self

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Require that anything was restored.

        Raises:
            RestoreMismatchError: Nothing was.
        """
        self.assert_existing_objects_matched()
        if not self._restored:
            raise RestoreMismatchError(f"nothing was given a value of {self._path}: the Checkpoint is empty")
        return self

    def expect_partial(self) -> RestoreStatus:
        """Expect that values of the file are left over, which is no error in any case."""
        return self


class Checkpoint:
    """Variables and arrays whose values are saved together, by name.

    Args:
        **items: What is saved: a `dmesh.Variable`, an array (restored in place), another `Checkpoint`, or a
            dict, list or tuple of these. They are attributes of the checkpoint; more may be set later.

    Raises:
        ArgumentTypeError: On saving or restoring: an item has another type.
    """

    def __init__(self, **items: Any) -> None:
        self._optional: set[str] = set()
        self._counter = 0
        for name, item in items.items():
            setattr(self, name, item)

    def values(self) -> dict[str, Array]:
        """Return the values by name, such as `model/0`.

        Reading a variable that replicas combine on read is a collective; then all clients must call it.
        """
        return {name: _value(item) for name, item in self._leaves()}

    def assign_values(self, values: Mapping[str, Array]) -> list[str]:
        """Assign each item the value of its name; values of other names are ignored.

        Returns:
            Names of those that were assigned.

        Raises:
            CheckpointError: A value is missing, or has another shape or dtype; nothing was changed.
        """
        leaves, found = dict(self._leaves()), {}
        missing = [name for name in leaves if name not in values and name not in self._optional]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no value of {', '.join(missing)}; it has "
                f"{', '.join(sorted(values)) or 'none'}"
            )
        for name, item in leaves.items():
            if name in values:
                found[name] = _fitting(name, item, values[name])
        for name, value in found.items():
            item = leaves[name]
            if isinstance(item, np.ndarray):
                item[...] = value
            else:
                item.assign(value)
        return list(found)

    def write(self, file_prefix: _CHECKPOINT_PATH, options: object = None) -> str:
        """Write the values to a file of exactly that name; an existing file is replaced.

        Args:
            file_prefix: The name.
            options: Without effect, here and below: for programs written for TensorFlow.

        Returns:
            The path.

        Raises:
            OSError: The file cannot be written; an existing file is unchanged.
        """
        del options
        return write_values(file_prefix, self.values())

    def save(self, file_prefix: _CHECKPOINT_PATH, options: object = None) -> str:
        """Write the values to `PREFIX-1.npz`, the next time to `PREFIX-2.npz`, and so on; return the path."""
        self._counter += 1
        return self.write(f"{os.fspath(file_prefix)}-{self._counter}.npz", options)

    def read(self, save_path: _CHECKPOINT_PATH | None, options: object = None) -> RestoreStatus:
        """Read the values from a file; None changes nothing.

        Returns:
            What was restored, with methods that assert it.

        Raises:
            CheckpointError: There is no such file, it is damaged, or it does not fit; nothing was changed.
        """
        del options
        if save_path is None:
            return RestoreStatus(None)
        path, values = os.fspath(save_path), read_values(save_path)
        try:
            restored = self.assign_values(values)
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be restored: {error}") from None
        if numbered := _NUMBERED.fullmatch(Path(path).name):
            self._counter = int(numbered[2])
        return RestoreStatus(path, restored, sorted(values.keys() - set(restored)))

    restore = read

    def track_optional(self, name: str, item: Any) -> None:
        """Save another item, which a file may lack when it is restored."""
        setattr(self, name, item)
        self._optional.add(name)

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        items = {name: item for name, item in vars(self).items() if name not in ("_optional", "_counter")}
        return _walk("", items, set())


def _walk(prefix: str, item: Any, within: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Checkpoint):
        children: Any = {name: part for name, part in vars(item).items() if not name.startswith("_")}
    elif isinstance(item, Mapping):
        children = item
    elif isinstance(item, list | tuple):
        children = dict(enumerate(item))
    elif isinstance(item, np.ndarray) or (hasattr(item, "assign") and hasattr(item, "read_value")):
        yield prefix, item
        return
    else:
        raise ArgumentTypeError(
            f"{prefix} of a checkpoint is a {type(item).__name__}; expected a dmesh.Variable, a NumPy array, "
            "a dmesh.train.Checkpoint, or a dict, list or tuple of these. Keep numbers in variables"
        )
    if id(item) in within:
        raise ArgumentTypeError(f"{prefix} of a checkpoint contains itself")
    for name, child in children.items():
        if "/" in str(name):
            raise ArgumentTypeError(f"the name {name!r:.80} of a checkpoint has a slash, which joins names")
        yield from _walk(f"{prefix}/{name}" if prefix else str(name), child, within | {id(item)})


def _value(item: Any) -> Array:
    return np.array(item) if isinstance(item, np.ndarray) else np.asarray(item.read_value())


def _fitting(name: str, item: Any, value: Array) -> Array:
    """Return a value in the dtype of its target; NumPy's format saves ml_dtypes only as raw bits."""
    if value.dtype.kind == "V" and value.dtype.itemsize == item.dtype.itemsize and value.dtype.names is None:
        value = value.view(item.dtype)
    if value.shape != tuple(item.shape) or value.dtype != item.dtype:
        raise CheckpointError(
            f"{name} is {item.dtype} of shape {tuple(item.shape)}, but its value in the checkpoint is "
            f"{value.dtype} of shape {value.shape}"
        )
    if isinstance(item, np.ndarray) and not item.flags.writeable:
        raise CheckpointError(f"{name} is an array that cannot be written to")
    return value


def write_values(path: _CHECKPOINT_PATH, values: Mapping[str, Array]) -> str:
    """Write arrays to a `.npz` file that is complete or not there; return the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in values.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return str(target)


def read_values(path: _CHECKPOINT_PATH) -> dict[str, Array]:
    """Read the arrays of a file that `write_values` has written.

    Raises:
        CheckpointError: There is no such file, or it is damaged.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {name!r:.500}") from None
    except (ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"the checkpoint {name!r:.500} cannot be read: {error}") from error


def latest_checkpoint(checkpoint_dir: _CHECKPOINT_PATH) -> str | None:
    """Return the path of the checkpoint with the highest number in a directory; None if there is none."""
    found = _numbered(Path(checkpoint_dir), None)
    return found[-1][1] if found else None


def _numbered(directory: Path, wanted: str | None) -> list[tuple[int, str]]:
    """Return the numbers and paths of the checkpoints in a directory, in the order of their numbers."""
    found = map(_NUMBERED.fullmatch, names_in(directory))
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
        directory: _CHECKPOINT_PATH,
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

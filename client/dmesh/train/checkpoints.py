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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmesh.errors import ArgumentTypeError, CheckpointError, RestoreMismatchError

__all__ = ["Checkpoint", "RestoreStatus"]

Array: TypeAlias = NDArray[Any]
NUMBERED = re.compile(r"(.+)-(\d{1,18})\.npz")
"""Pattern of the name of a numbered checkpoint: its prefix and its number."""
CheckpointPath: TypeAlias = str | os.PathLike[str]


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

    def write(self, file_prefix: CheckpointPath, options: object = None) -> str:
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

    def save(self, file_prefix: CheckpointPath, options: object = None) -> str:
        """Write the values to `PREFIX-1.npz`, the next time to `PREFIX-2.npz`, and so on; return the path."""
        self._counter += 1
        return self.write(f"{os.fspath(file_prefix)}-{self._counter}.npz", options)

    def read(self, save_path: CheckpointPath | None, options: object = None) -> RestoreStatus:
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
        if numbered := NUMBERED.fullmatch(Path(path).name):
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


def write_values(path: CheckpointPath, values: Mapping[str, Array]) -> str:
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


def read_values(path: CheckpointPath) -> dict[str, Array]:
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

"""Manifest of a checkpoint: the saved tree as JSON, with shape, dtype and layout of each array.

It is an attribute of the root group, in that group's `zarr.json`. It has no paths: the directory of an array
is derived from its keys in the tree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import ml_dtypes
import numpy as np

from dmesh.arrays.dtensor import DTensor
from dmesh.errors import ArgumentTypeError, CheckpointError

FILE = "zarr.json"
"""Name of the file of a group or an array."""
LIMIT = 64 << 20
"""Maximum size of a manifest, bytes."""
VERSION = 1
_DEPTH = 64
_INTEGER_BITS = 1024
_LARGEST = 1 << 62
"""Sizes of arrays from here on are considered damaged, bytes."""
_BLOCKS = 1 << 20
"""Maximum number of blocks of an array; larger numbers are considered damaged."""
_PLAIN = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
)  # fmt: skip
"""dtypes that Zarr supports."""
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _PLAIN},
    **{
        name: np.dtype(kind)
        for name, kind in vars(ml_dtypes).items()
        if isinstance(kind, type) and issubclass(kind, np.generic)
    },
}
"""dtypes that a checkpoint supports, by name. Those of ml_dtypes are stored as integers of their bits."""
Keys = tuple[str | int, ...]
"""Path to a part of a tree: keys of dicts and positions in lists."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An array of a checkpoint."""

    keys: Keys
    """Its keys in the tree."""
    directories: tuple[str, ...]
    """Names of the directories on the path to it, below the checkpoint's directory."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    """Shape of its stored blocks."""
    layout: tuple[str, ...] | None
    """Its sharding specs; None for a NumPy array."""

    @property
    def name(self) -> str:
        """Its keys, joined by slashes."""
        return "/".join(map(str, self.keys))

    @property
    def stored(self) -> np.dtype[Any]:
        """Type of the elements in files."""
        return self.dtype if self.dtype.name in _PLAIN else np.dtype(f"uint{8 * self.dtype.itemsize}")


def walk(tree: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of a tree with their keys.

    Raises:
        ArgumentTypeError: The tree is too deep, or contains itself.
    """
    if len(keys) > _DEPTH:
        raise ArgumentTypeError(f"the tree has more than {_DEPTH} levels; does it contain itself?")
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from walk(part, (*keys, key))
    elif isinstance(tree, (list, tuple)):
        for at, part in enumerate(tree):
            yield from walk(part, (*keys, at))
    else:
        yield keys, tree


def encode(tree: Any) -> tuple[dict[str, Any], list[tuple[Saved, Any]]]:
    """Return the manifest of a tree, and its arrays.

    Raises:
        ArgumentTypeError: A part of it cannot be saved.
    """
    arrays: list[tuple[Saved, Any]] = []

    def node(part: Any, keys: Keys, directories: tuple[str, ...]) -> dict[str, Any]:
        if isinstance(part, Mapping):
            if not all(isinstance(key, str) for key in part):
                raise ArgumentTypeError(
                    f"keys of a saved dict must be strings; those of {_named(keys)} are {list(part)!r:.200}"
                )
            names = _directories(list(part))
            return {
                "dict": {
                    key: node(child, (*keys, key), (*directories, name))
                    for (key, child), name in zip(part.items(), names, strict=True)
                }
            }
        if isinstance(part, (list, tuple)):
            return {
                "list" if isinstance(part, list) else "tuple": [
                    node(child, (*keys, at), (*directories, str(at))) for at, child in enumerate(part)
                ]
            }
        if isinstance(part, (DTensor, np.ndarray, np.generic)) and not isinstance(part, np.ma.MaskedArray):
            value = part if isinstance(part, DTensor) else np.asarray(part)
            saved = _described(value, keys, directories)
            arrays.append((saved, value))
            layout = None if saved.layout is None else list(saved.layout)
            return {
                "array": {
                    "shape": saved.shape, "dtype": saved.dtype.name, "chunk": saved.chunk, "layout": layout
                }
            }  # fmt: skip
        if isinstance(part, float) and not math.isfinite(part):
            return {"float": repr(part)}
        if isinstance(part, int) and part.bit_length() > _INTEGER_BITS:
            raise ArgumentTypeError(f"{_named(keys)} is an integer of more than {_INTEGER_BITS} bits")
        if part is None or type(part) in (bool, int, float, str):
            return {"value": part}
        raise ArgumentTypeError(
            f"{_named(keys)} is a {type(part).__name__}, which cannot be saved. A tree can have dicts, "
            "lists, tuples, sharded arrays, NumPy arrays, numbers, strings and None"
        )

    for _ in walk(tree):  # raises if the tree is too deep for `node`
        pass
    return {"version": VERSION, "tree": node(tree, (), ())}, arrays


def _described(value: Any, keys: Keys, directories: tuple[str, ...]) -> Saved:
    if value.dtype.name not in DTYPES:
        raise ArgumentTypeError(
            f"{_named(keys)} has dtype {value.dtype}, which cannot be saved. Convert it, or view it as "
            "numbers with x.view(...)"
        )
    sharded = isinstance(value, DTensor)
    longest = [
        value.spec.cuts(dim)[0][1] if sharded else value.shape[dim] for dim in range(value.ndim)
    ]  # fmt: skip
    return Saved(
        keys, directories, tuple(value.shape), DTYPES[value.dtype.name], tuple(max(1, n) for n in longest),
        tuple(value.layout.sharding_specs) if sharded else None,
    )  # fmt: skip


def decode(text: bytes, where: str) -> Any:
    """Return the tree of the root group's file, with a `Saved` for each array.

    Raises:
        CheckpointError: The manifest is damaged, of a later version, or has an impossible value.
    """
    try:
        found = json.loads(text)["attributes"]["dmesh"]
        version = found["version"]
        if version != VERSION:
            raise CheckpointError(
                f"{where} has a manifest of version {version!r:.40}, but this dmesh reads version {VERSION}"
            )
        return _part(found["tree"], (), ())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where} has no valid manifest of a checkpoint: {error!r:.300}") from error


def _part(node: Any, keys: Keys, directories: tuple[str, ...]) -> Any:
    if len(keys) > _DEPTH:
        raise ValueError(f"more than {_DEPTH} levels")
    ((kind, what),) = node.items()
    if kind == "dict":
        names = _directories(list(what))
        return {
            key: _part(child, (*keys, key), (*directories, name))
            for (key, child), name in zip(what.items(), names, strict=True)
        }
    if kind in ("list", "tuple"):
        _check(isinstance(what, list), f"a {kind} that is not a JSON array", keys)
        made = [_part(child, (*keys, at), (*directories, str(at))) for at, child in enumerate(what)]
        return made if kind == "list" else tuple(made)
    if kind == "array":
        return _array(what, keys, directories)
    if kind == "float":
        _check(what in ("nan", "inf", "-inf"), "an invalid number", keys)
        return float(what)
    _check(kind == "value" and type(what) in (bool, int, float, str, type(None)), "an unknown part", keys)
    return what


def _array(what: Mapping[str, Any], keys: Keys, directories: tuple[str, ...]) -> Saved:
    shape, chunk, layout = what["shape"], what["chunk"], what["layout"]
    _check(what["dtype"] in DTYPES, f"an unknown dtype, {what['dtype']!r:.40}", keys)
    dtype = DTYPES[what["dtype"]]
    _check(_lengths(shape, 0) and _lengths(chunk, 1) and len(shape) == len(chunk), "an invalid shape", keys)
    sizes = (math.prod(max(1, n) for n in lengths) * dtype.itemsize for lengths in (shape, chunk))
    blocks = math.prod(-(-n // size) for n, size in zip(shape, chunk, strict=True))
    _check(len(shape) <= 32 and max(sizes) < _LARGEST and blocks <= _BLOCKS, "an invalid size", keys)
    if layout is not None:
        fits = isinstance(layout, list) and len(layout) == len(shape)
        _check(fits and all(isinstance(name, str) for name in layout), "an invalid layout", keys)
    return Saved(
        keys, directories, tuple(shape), dtype, tuple(chunk), None if layout is None else tuple(layout)
    )


def _lengths(found: Any, least: int) -> bool:
    return isinstance(found, list) and all(type(n) is int and n >= least for n in found)


def _check(holds: bool, what: str, keys: Keys) -> None:
    if not holds:
        raise ValueError(f"{_named(keys)} has {what}")


def _named(keys: Keys) -> str:
    return "/".join(map(str, keys)) or "the tree"


def _directories(keys: Sequence[str]) -> list[str]:
    """Return a directory name for each key of a dict: safe, and unique also if case is ignored."""
    taken: set[str] = set()
    names = []
    for number, key in enumerate(keys):
        name = quote(key, safe="", errors="replace")
        reserved = not name.strip(".") or name.startswith("__") or name.casefold().endswith(".json")
        if reserved or len(name) > 200 or name.casefold() in taken:
            name = f"{name[:200]}+{number}"  # quoted names have no plus
        taken.add(name.casefold())
        names.append(name)
    return names

"""Arrays of a checkpoint in the Zarr v3 format: metadata, and one file for each chunk."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.checkpoint.manifest import FILE, Saved
from dmesh.arrays.spec import Bounds
from dmesh.errors import CheckpointError, MissingExtraError

Index = tuple[int, ...]
"""Position of a chunk along each dimension."""
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_CHECKSUM = 4
"""Bytes of the checksum after the elements."""


def require() -> Any:
    """Import zarr and return it.

    Raises:
        MissingExtraError: zarr is not installed.
    """
    try:
        import zarr
    except ImportError as error:
        raise MissingExtraError(
            f"dmesh.checkpoint needs zarr ({error}): pip install 'dmesh[checkpoint]'"
        ) from error
    return zarr


def metadata(saved: Saved) -> dict[str, Any]:
    """Return the content of an array's `zarr.json`."""
    zero: Any = 0
    if saved.stored.kind in "bc":
        zero = False if saved.stored.kind == "b" else [0.0, 0.0]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(saved.shape),
        "data_type": saved.stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(saved.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "attributes": {} if saved.stored == saved.dtype else {"dtype": saved.dtype.name},
    }


def write_metadata(root: Path, arrays: Iterable[Saved], manifest: dict[str, Any]) -> list[Path]:
    """Create the directories of arrays, and write the metadata of arrays and groups; return the files."""
    files: dict[tuple[str, ...], dict[str, Any]] = {(): _GROUP}
    for saved in arrays:
        for depth in range(len(saved.directories)):
            files[saved.directories[:depth]] = _GROUP
        files[saved.directories] = metadata(saved)
    files[()] = {**files[()], "attributes": {**files[()]["attributes"], "dmesh": manifest}}
    written = []
    for directories, content in files.items():
        path = root.joinpath(*directories, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        written.append(path)
    return written


def opened(root: Path, saved: Saved) -> Any:
    """Return the `zarr.Array` of a saved array, whether or not its files exist."""
    zarr = require()
    place = zarr.storage.StorePath(zarr.storage.LocalStore(root), "/".join(saved.directories))
    # By default zarr does not write chunks of zeros, which could not be told from lost ones.
    return zarr.Array.from_dict(place, metadata(saved)).with_config({"write_empty_chunks": True})


def chunk_file(root: Path, saved: Saved, index: Index) -> Path:
    """Return the file of a chunk."""
    return root.joinpath(*saved.directories, "c", *map(str, index))


def chunk_region(saved: Saved, index: Index) -> Bounds:
    """Return begin and end of a chunk along each dimension."""
    return tuple(
        (at * size, min((at + 1) * size, n))
        for at, size, n in zip(index, saved.chunk, saved.shape, strict=True)
    )


def chunks_within(saved: Saved, region: Bounds) -> Iterator[Index]:
    """Yield the indices of the chunks that overlap a region."""
    if any(start >= stop for start, stop in region):
        return
    yield from itertools.product(
        *(
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(region, saved.chunk, strict=True)
        )
    )


def write_chunk(root: Path, saved: Saved, index: Index, block: NDArray[Any]) -> Path:
    """Write a block as a chunk of an array; return its file."""
    values = np.asarray(block, saved.dtype).view(saved.stored)  # converted to native byte order
    opened(root, saved)[_slices(chunk_region(saved, index))] = values
    return chunk_file(root, saved, index)


def check_chunk(root: Path, saved: Saved, index: Index) -> None:
    """Raise CheckpointError if a chunk's file is missing or has the wrong length."""
    path = chunk_file(root, saved, index)
    expected = math.prod(saved.chunk) * saved.stored.itemsize + _CHECKSUM
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}, a block of {saved.name!r:.200}, cannot be read: {error}") from error
    if found != expected:
        raise CheckpointError(
            f"{path}, a block of {saved.name!r:.200}, has {found:,} bytes instead of {expected:,}: it is "
            "damaged"
        )


def read_chunk(root: Path, saved: Saved, index: Index) -> NDArray[Any]:
    """Return the elements of a chunk.

    Raises:
        CheckpointError: The chunk's file cannot be read, or is damaged.
    """
    try:
        values = np.asarray(opened(root, saved)[_slices(chunk_region(saved, index))])
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{chunk_file(root, saved, index)}, a block of {saved.name!r:.200}, is damaged: {error}"
        ) from error
    check_chunk(root, saved, index)  # zarr returns zeros for a missing file
    return values.view(saved.dtype)


def _slices(region: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)

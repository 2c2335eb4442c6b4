"""Files in the safetensors format: each client reads only the slices that its devices need."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.checkpoint.agreement import Participants
from dmesh.arrays.checkpoint.manifest import DTYPES, LIMIT, Saved
from dmesh.arrays.checkpoint.read import PATH, Placement, fingerprint
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.spec import Bounds, Spec
from dmesh.errors import CheckpointError
from dmesh.layout import UNSHARDED
from dmesh.mesh import Mesh

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""dtypes by their names in the format."""


def load_safetensors(
    files: PATH | Iterable[PATH], layouts: Any = None, *, mesh: Mesh | None = None
) -> dict[str, DTensor]:
    """Read arrays of safetensors files onto a mesh; all clients call it together.

    Each client reads only the slices that its devices need.

    ```python
    def rows(name, shape, dtype):
        return dmesh.Layout(["x"] + ["unsharded"] * (len(shape) - 1), mesh) if shape else None

    weights = dmesh.checkpoint.load_safetensors("model.safetensors.index.json", rows, mesh=mesh)
    ```

    Args:
        files: A file; several files; or the index (`.json`) of a model in several files, in their directory.
        layouts: A dict of layouts by name, which may lack names; or a function of an array's name, shape and
            dtype that returns a layout or None.
        mesh: Mesh on which arrays without a layout are replicated; None for the default mesh.

    Returns:
        The arrays by name.

    Raises:
        CheckpointError: A file is missing or damaged, or two files have the same name of an array.
        LayoutError: A layout does not fit, is for none of the arrays, or there is no mesh.
    """
    known = Placement(mesh, layouts)
    clients = Participants(known.grids(), "dmesh.checkpoint.load_safetensors")
    homes: dict[str, tuple[Path, int]] = {}
    targets: list[tuple[Saved, Spec | None]] = []
    made: dict[str, DTensor] = {}

    def plan() -> str:
        found: dict[str, Saved] = {}
        for path in _paths(files):
            for saved, offset in _contents(path):
                if saved.name in homes:
                    raise CheckpointError(f"{homes[saved.name][0]} and {path} both have {saved.name!r:.200}")
                homes[saved.name], found[saved.name] = (path, offset), saved
        targets.extend(known.targets(found.values()))
        clients.check(spec.grid for _, spec in targets if spec is not None)
        return fingerprint(repr(list(found)).encode(), targets)

    def read() -> str:
        for saved, spec in targets:
            assert spec is not None  # all of them have a layout
            made[saved.name] = DTensor(spec, tuple(_parts(*homes[saved.name], saved, spec.regions)))
        return ""

    clients.same(clients.step(plan), "files, mesh and layouts")
    clients.step(read)
    return made


def _paths(files: PATH | Iterable[PATH]) -> list[Path]:
    """Return the files, with an index replaced by its files."""
    if not isinstance(files, Iterable) or isinstance(files, str):
        files = [files]
    found: dict[Path, None] = {}
    for path in map(Path, files):
        found.update(dict.fromkeys(_of_index(path) if path.suffix == ".json" else [path]))
    return list(found)


def _of_index(path: Path) -> list[Path]:
    try:
        with open(path, "rb") as file:
            names = json.loads(file.read(LIMIT))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not the index of safetensors files: {error!r:.300}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{path} names {name!r:.200}, which is not a file in the same directory")
    return [path.parent / name for name in sorted(set(names))]


def _contents(path: Path) -> Iterator[tuple[Saved, int]]:
    """Yield the arrays of a file, with the offsets of their elements."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if length > min(LIMIT, size):
                raise ValueError(f"its header of {length:,} bytes is too long")
            header = json.loads(file.read(length))
        for name, what in header.items():
            if name != "__metadata__":
                yield _described(name, what, 8 + length, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error!r:.500}") from error


def _described(name: str, what: Any, start: int, size: int) -> tuple[Saved, int]:
    shape, (first, last) = tuple(what["shape"]), what["data_offsets"]
    if what["dtype"] not in _NAMES:
        raise ValueError(f"{name!r:.200} has dtype {what['dtype']!r:.40}, which NumPy does not have")
    dtype = DTYPES[_NAMES[what["dtype"]]]
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)) or len(shape) > 32:
        raise ValueError(f"{name!r:.200} has an invalid shape or data_offsets")
    if last - first != math.prod(shape) * dtype.itemsize or start + last > size:
        raise ValueError(f"{name!r:.200} has data_offsets that do not match its shape or the file")
    return Saved((name,), (), shape, dtype, shape, (UNSHARDED,) * len(shape)), start + first


def _parts(path: Path, offset: int, saved: Saved, regions: Iterable[Bounds]) -> Iterator[NDArray[Any]]:
    """Yield regions of an array; only their pages of the file are read."""
    if 0 in saved.shape:
        mapped = np.empty(saved.shape, saved.dtype)  # an empty file region cannot be mapped
    else:
        mapped = np.memmap(path, np.uint8, "r", offset, (math.prod(saved.shape) * saved.dtype.itemsize,))
        mapped = mapped.view(saved.dtype).reshape(saved.shape)
    for region in regions:
        yield np.array(mapped[tuple(slice(start, stop) for start, stop in region)], saved.dtype, subok=False)

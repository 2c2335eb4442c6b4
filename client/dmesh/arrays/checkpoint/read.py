"""Loading of a checkpoint onto any mesh: each client reads the blocks that its devices need."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmesh import structure
from dmesh._files import names_in, status
from dmesh.arrays.checkpoint import manifest, zarr
from dmesh.arrays.checkpoint.agreement import Participants
from dmesh.arrays.checkpoint.manifest import Keys, Saved
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.grid import grid_of
from dmesh.arrays.spec import Bounds, Spec, spec_for
from dmesh.errors import CheckpointError, LayoutError
from dmesh.layout import UNSHARDED, Layout
from dmesh.mesh import Mesh, get_default_mesh

PATH: TypeAlias = str | PathLike[str]
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")


def directory_of(root: Path, step: int) -> Path:
    """Return the directory of a step."""
    return root / f"step-{step}"


def steps(directory: PATH) -> list[int]:
    """Return the numbers of the steps saved in a directory, in ascending order.

    Args:
        directory: The `directory` of `save`. It need not exist.
    """
    root = Path(directory)
    found = (int(match[1]) for match in map(_STEP.fullmatch, names_in(root)) if match)
    return sorted(step for step in found if status(directory_of(root, step) / manifest.FILE))


def load(
    directory: PATH,
    step: int | None = None,
    *,
    mesh: Mesh | None = None,
    layouts: Any = None,
) -> Any:
    """Read a checkpoint onto a mesh; all clients call it together.

    The mesh may differ from the one from which the arrays were saved. Each client reads only the blocks that
    its devices need.

    ```python
    tree = dmesh.checkpoint.load("checkpoints", mesh=mesh)
    rows = dmesh.checkpoint.load("checkpoints", layouts={"weights": dmesh.Layout(["x", "unsharded"], mesh)})
    ```

    Args:
        directory: The `directory` of `save`.
        step: Number of the step; None for the latest.
        mesh: Mesh for the arrays that have no layout in `layouts`; None for the default mesh. They keep their
            sharding along the dimensions of this mesh.
        layouts: A tree like the saved one with layouts in place of arrays, which may lack parts; or a
            function of an array's name (its keys, joined by slashes), shape and dtype that returns a layout
            or None.

    Returns:
        The saved tree. Saved NumPy arrays are NumPy arrays again, unless `layouts` has a layout for them.

    Raises:
        CheckpointError: The step does not exist or is damaged; the message names the file.
        LayoutError: A layout does not fit, is for an array that was not saved, or there is no mesh.
        MissingExtraError: zarr is not installed.
    """
    root, known = Path(directory), Placement(mesh, layouts)
    clients = Participants(known.grids(), "dmesh.checkpoint.load")
    place, tree = root, None
    targets: list[tuple[Saved, Spec | None]] = []

    def plan() -> str:
        nonlocal place, tree
        zarr.require()
        place, content = _found(root, step)
        tree = manifest.decode(content, str(place / manifest.FILE))
        saved = [leaf for leaf in structure.flatten(tree) if isinstance(leaf, Saved)]
        targets.extend(known.targets(saved))
        clients.check(spec.grid for _, spec in targets if spec is not None)
        for one, spec in targets:
            for region in _regions(one, spec):
                for index in zarr.chunks_within(one, region):
                    zarr.check_chunk(place, one, index)
        return fingerprint(content, targets)

    clients.same(clients.step(plan), "step, mesh and layouts")
    made: list[Any] = []

    def read() -> str:
        for one, spec in targets:
            blocks = _read(place, one, _regions(one, spec))
            made.append(blocks[0] if spec is None else DTensor(spec, tuple(blocks)))
        return ""

    clients.step(read)
    arrays = iter(made)
    leaves = [next(arrays) if isinstance(leaf, Saved) else leaf for leaf in structure.flatten(tree)]
    return structure.rebuild(tree, leaves)


def _found(root: Path, step: int | None) -> tuple[Path, bytes]:
    """Return the directory of a step, and its manifest."""
    if step is None:
        there = steps(root)
        if not there:
            raise CheckpointError(f"no checkpoint in {str(root)!r:.500}")
        step = there[-1]
    place = directory_of(root, step)
    try:
        with open(place / manifest.FILE, "rb") as file:
            content = file.read(manifest.LIMIT + 1)
    except OSError as error:
        raise CheckpointError(
            f"step {step!r:.40} of {str(root)!r:.500} cannot be read: {error}. Existing steps: {steps(root)}"
        ) from error
    if len(content) > manifest.LIMIT:
        raise CheckpointError(f"{place / manifest.FILE} is larger than the limit of {manifest.LIMIT:,} bytes")
    return place, content


def _regions(saved: Saved, spec: Spec | None) -> tuple[Bounds, ...]:
    """Return the regions of an array that this client needs."""
    return (tuple((0, n) for n in saved.shape),) if spec is None else spec.regions


def _read(root: Path, saved: Saved, regions: tuple[Bounds, ...]) -> list[NDArray[Any]]:
    """Return regions of an array; reads each chunk once."""
    readers: dict[zarr.Index, list[int]] = {}
    for at, region in enumerate(regions):
        for index in zarr.chunks_within(saved, region):
            readers.setdefault(index, []).append(at)
    blocks: list[NDArray[Any] | None] = [None] * len(regions)
    for index, wanted in readers.items():
        values, origin = zarr.read_chunk(root, saved, index), zarr.chunk_region(saved, index)
        for at in wanted:
            if origin == regions[at]:
                blocks[at] = values
                continue
            block = blocks[at]
            if block is None:
                block = blocks[at] = np.empty(_shape(regions[at]), saved.dtype)
            take, put = [], []
            for (begin, end), (start, stop) in zip(origin, regions[at], strict=True):
                first, last = max(begin, start), min(end, stop)
                take.append(slice(first - begin, last - begin))
                put.append(slice(first - start, last - start))
            block[tuple(put)] = values[tuple(take)]
    return [
        np.empty(_shape(region), saved.dtype) if block is None else block
        for block, region in zip(blocks, regions, strict=True)
    ]


def _shape(region: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def fingerprint(content: bytes, targets: Iterable[tuple[Saved, Spec | None]]) -> str:
    """Return a digest of a load's source and targets, which must be the same on all clients."""
    digest = hashlib.sha256(content)
    for _, spec in targets:
        described = "" if spec is None else f"{spec.describe()} {spec.grid.mesh.fingerprint}"
        digest.update(f"{described}\n".encode())
    return digest.hexdigest()


class Placement:
    """Meshes and layouts of a load.

    Args:
        mesh: Mesh of arrays without a layout; None for the default mesh.
        layouts: Layouts by name, as a tree or a function.
    """

    def __init__(self, mesh: Mesh | None, layouts: Any) -> None:
        self._mesh = get_default_mesh() if mesh is None else mesh
        self._choose: Callable[..., Any] | None = layouts if callable(layouts) else None
        self._tree: dict[Keys, Any] = {}
        if layouts is not None and self._choose is None:
            self._tree = dict(manifest.walk(layouts))

    def grids(self) -> list[Any]:
        """Return the meshes that are known before the manifest is read."""
        meshes = [layout.mesh for layout in self._tree.values() if isinstance(layout, Layout)]
        return [grid_of(mesh) for mesh in meshes or ([] if self._mesh is None else [self._mesh])]

    def targets(self, arrays: Iterable[Saved]) -> list[tuple[Saved, Spec | None]]:
        """Return the placement of each array; None for a NumPy array.

        Raises:
            LayoutError: A layout does not fit, is for none of the arrays, or there is no mesh.
        """
        left, found = dict(self._tree), []
        for saved in arrays:
            layout = left.pop(saved.keys, None)
            if self._choose is not None:
                layout = self._choose(saved.name, saved.shape, saved.dtype)
            if layout is None and saved.layout is not None:
                layout = self._default(saved, saved.layout)
            found.append((saved, None if layout is None else _placed(saved, layout)))
        unknown = ["/".join(map(str, keys)) for keys, layout in left.items() if layout is not None]
        if unknown:
            raise LayoutError(f"layouts has entries for {', '.join(unknown)}, but no such arrays were saved")
        return found

    def _default(self, saved: Saved, specs: tuple[str, ...]) -> Layout:
        if self._mesh is None:
            raise LayoutError(
                f"{saved.name!r:.200} is a sharded array, so loading it needs a mesh. Pass mesh=, or a "
                "layout in layouts=; dmesh.create_mesh() makes a mesh of one device"
            )
        names = self._mesh.dim_names
        return Layout([name if name in names else UNSHARDED for name in specs], self._mesh)


def _placed(saved: Saved, layout: Layout) -> Spec:
    try:
        return spec_for(layout, saved.shape, saved.dtype)
    except LayoutError as error:
        raise LayoutError(f"{saved.name!r:.200} cannot be loaded: {error}") from error

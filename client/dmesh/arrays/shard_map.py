"""`shard_map`: a NumPy function on the blocks of sharded arrays, one call for each device."""

from __future__ import annotations

import contextvars
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays import ledger
from dmesh.arrays.axes import Team, device
from dmesh.arrays.dispatch.operands import grid_among
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.grid import Grid, grid_of
from dmesh.arrays.spec import WHOLE, Spec, spec_for
from dmesh.arrays.transfer.execute import gather_counts
from dmesh.arrays.transfer.mapping import Dim, Run, Side, plan_exchange, side
from dmesh.errors import LayoutError, MeshMismatchError, UnshardableError
from dmesh.layout import Layout

Array = NDArray[Any]
Layouts = Layout | Sequence[Layout | None]
Widths = Sequence[int] | None


def shard_map(
    fn: Callable[..., Any],
    *,
    in_layouts: Layouts,
    out_layouts: Layouts,
    halo: Sequence[Widths] | None = None,
    boundary: Literal["clip", "wrap"] = "clip",
) -> Callable[..., Any]:
    """Return a function of sharded arrays that runs a NumPy function on their blocks, once for each device.

    In the function, `dmesh.axes` has collectives along the mesh's dimensions. On a client with several
    devices, each call has its own thread.

    ```python
    centered = dmesh.shard_map(
        lambda block: block - dmesh.axes.psum(block.sum(), "x"), in_layouts=layout, out_layouts=layout
    )
    y = centered(x)
    ```

    Args:
        fn: Function of the blocks; returns a block for each of `out_layouts`. Must not write to its
            arguments.
        in_layouts: Layout of each argument, to which it is moved first; None for an argument that is passed
            unchanged. A single layout applies to all arguments.
        out_layouts: Layout of each result; a sequence if there are several. The blocks must have the
            lengths of the layout: ceil(length / shards), the last ones shorter or empty.
        halo: For each argument, the number of elements that a block gets from its neighbors, at both ends of
            each dimension; None for an argument without a halo.
        boundary: Halo at the ends of the array: `"clip"` for none, `"wrap"` for periodic boundaries.

    Returns:
        The function of sharded arrays.

    Raises:
        LayoutError: An argument or a result does not fit its layout, or devices returned different blocks
            where the layout has copies of one.
        MeshMismatchError: The layouts or arrays are of different meshes.
    """
    if boundary not in ("clip", "wrap"):
        raise UnshardableError(f'boundary must be "clip" or "wrap", got {boundary!r:.100}')

    @wraps(fn)
    def mapped(*args: Any) -> Any:
        with ledger.operation(f"shard_map({getattr(fn, '__name__', 'function')})"):
            layouts = [in_layouts] * len(args) if isinstance(in_layouts, Layout) else list(in_layouts)
            if len(layouts) != len(args):
                raise LayoutError(
                    f"{len(args)} arguments were passed, but in_layouts has {len(layouts)} layouts"
                )
            outs = [out_layouts] if isinstance(out_layouts, Layout) else list(out_layouts)
            grid = _grid([*layouts, *outs])
            widths = [None] * len(args) if halo is None else list(halo)
            columns = [
                _blocks(x, layout, width, boundary, grid)
                for x, layout, width in zip(args, layouts, widths, strict=True)
            ]
            results = _run(
                fn, grid, list(zip(*columns, strict=True)) if columns else [()] * len(grid.positions)
            )
            if isinstance(out_layouts, Layout):
                return _assemble(grid, [np.asarray(result) for result in results], out_layouts)
            made = []
            for at, layout in enumerate(outs):
                if layout is None:
                    raise LayoutError("out_layouts must have a layout for each result")
                made.append(_assemble(grid, [np.asarray(result[at]) for result in results], layout))
            return tuple(made)

    return mapped


def _grid(layouts: Sequence[Layout | None]) -> Grid:
    grids = [grid_of(layout.mesh) for layout in layouts if layout is not None]
    if any(grid is not grids[0] for grid in grids):
        raise MeshMismatchError("all layouts of a shard_map must be on one mesh")
    return grids[0]


def _blocks(x: Any, layout: Layout | None, width: Widths, boundary: str, grid: Grid) -> list[Any]:
    """Return an argument's block for each of this client's devices."""
    if layout is None:
        if isinstance(x, DTensor):
            raise LayoutError("in_layouts has None for a sharded array. Pass its layout")
        return [x] * len(grid.positions)
    if not isinstance(x, DTensor):
        raise UnshardableError(
            f"in_layouts has a layout for an argument of shard_map that is not sharded: {type(x).__name__}"
        )
    grid_among([x], "shard_map")
    if x.spec.grid is not grid:
        raise MeshMismatchError("an argument of shard_map is on another mesh than the layouts")
    spec = spec_for(layout, x.shape, x.dtype, x.spec)
    there = move(x, spec)
    blocks: Sequence[Array] = there.blocks
    if width is not None:
        blocks = _with_halo(there, [int(n) for n in width], boundary)
    views = []
    for block in blocks:
        view = block.view()
        view.flags.writeable = False
        views.append(view)
    return [views[slot] for slot in spec.slot_of]


def _with_halo(x: DTensor, widths: list[int], boundary: str) -> Sequence[Array]:
    spec = x.spec
    if len(widths) != spec.ndim or any(n < 0 for n in widths):
        raise LayoutError(
            f"halo= must have a width of 0 or more for each of the {spec.ndim} dimensions, got {widths}"
        )
    dims = []
    for d, (n, width) in enumerate(zip(spec.shape, widths, strict=True)):
        cuts = spec.cuts(d)
        if boundary == "wrap" and width and n:
            around = np.arange(-width, n + width, dtype=np.intp) % n
            wider = tuple((low, high + 2 * width) if high > low else (low, low) for low, high in cuts)
            dims.append(Dim(n + 2 * width, side(spec, d, around), Side(spec.axes[d], wider)))
        else:
            wider = tuple(
                (max(0, low - width), min(n, high + width)) if high > low else (low, low)
                for low, high in cuts
            )
            dims.append(Dim(n, side(spec, d), Side(spec.axes[d], wider, Run())))
    return exchange(x, plan_exchange(spec, dims, spec.used), spec).blocks


def _run(fn: Callable[..., Any], grid: Grid, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function for each device, in threads if there are several."""
    count = len(arguments)
    team = Team(grid, threading.Barrier(count), [None] * count)
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count

    def work(at: int) -> None:
        device.set((team, at))
        try:
            results[at] = fn(*arguments[at])
        except BaseException as error:  # noqa: BLE001 -- raised in the caller's thread
            errors[at] = error
            team.barrier.abort()

    threads = []
    for at in range(1, count):
        own = contextvars.copy_context()
        thread = threading.Thread(target=own.run, args=(work, at), name=f"dmesh-shard-map-{at}", daemon=True)
        thread.start()
        threads.append(thread)
    contextvars.copy_context().run(work, 0)
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    first = next((error for error in raised if not isinstance(error, threading.BrokenBarrierError)), None)
    if first is not None or raised:
        raise first or UnshardableError(
            "the devices of a shard_map made different numbers of collective calls"
        )
    return results


def _assemble(grid: Grid, blocks: list[Array], layout: Layout) -> DTensor:
    """Return the array made of the devices' results; exchange the blocks' lengths to find its shape."""
    ndim, dtype = layout.rank, blocks[0].dtype
    for block in blocks:
        if block.ndim != ndim:
            raise LayoutError(
                f"a result of shard_map is {block.dtype}{list(block.shape)}, of {block.ndim} dimensions; its "
                f"layout is for {ndim}"
            )
        if block.dtype != dtype:
            raise LayoutError(
                f"a result of shard_map is {block.dtype}{list(block.shape)} on one device and "
                f"{dtype}{list(blocks[0].shape)} on another"
            )
    # One row for each device: the lengths of its block, and a summary of its elements.
    rows = np.zeros((grid.mesh.size, ndim + 2), np.int64)
    used = {grid.names.index(name) for name in layout.sharding_specs if name in grid.names}
    compared = any(n > 1 for axis, n in enumerate(grid.sizes) if axis not in used)
    for position, block in zip(grid.positions, blocks, strict=True):
        rows[position, :ndim] = block.shape
        if compared:
            rows[position, ndim:] = _summary(block)
    if len(grid.clients) > 1:
        rows = gather_counts(grid.group(), rows).sum(axis=0)  # each row is zero but for its client's
    lengths = rows[:, :ndim]
    if compared:
        _check_copies(grid, sorted(used), rows, ndim, dtype)
    names, shape = grid.names, []
    for d, name in enumerate(layout.sharding_specs):
        axis = names.index(name) if name in names else WHOLE
        along = (
            {}
            if axis == WHOLE
            else {coords[axis]: int(lengths[at, d]) for at, coords in enumerate(grid.coords)}
        )
        shape.append(int(lengths[0, d]) if axis == WHOLE else sum(along.values()))
    spec = spec_for(layout, shape, dtype)
    _check_lengths(spec, lengths)
    return DTensor(
        spec, tuple(np.ascontiguousarray(blocks[at]).reshape(blocks[at].shape) for at in spec.devices)
    )


def _summary(block: Array) -> Array:
    """Return two numbers that differ for blocks with different elements, as int64.

    Of inexact dtypes: the bits of a weighted sum of the finite elements, and of the sum of their sizes.
    """
    if block.dtype.kind not in "fc":
        return np.array([zlib.crc32(block.tobytes()), 0], np.int64)
    size = np.abs(block.ravel()).astype(np.float64)
    size[~np.isfinite(size)] = 0
    weights = 1.0 + np.arange(block.size) % 7
    signs = np.where(np.real(block.ravel()) < 0, -1, 1)
    return np.array([np.dot(size * signs, weights), size.sum()]).view(np.int64)


def _check_copies(grid: Grid, used: list[int], rows: Array, ndim: int, dtype: np.dtype[Any]) -> None:
    """Refuse blocks that differ on devices for which the layout has copies of one block.

    Those of inexact dtypes may differ by rounding, as on machines with different CPUs.
    """
    values = rows[:, ndim:].copy()
    first: dict[tuple[int, ...], int] = {}
    for position, coords in enumerate(grid.coords):
        other = first.setdefault(tuple(coords[axis] for axis in used), position)
        if dtype.kind in "fc":
            (mine, size), (theirs, _) = values[position].view(np.float64), values[other].view(np.float64)
            same = abs(mine - theirs) <= 1e-3 * size + np.finfo(np.float64).tiny
        else:
            same = bool(values[position, 0] == values[other, 0])
        if not same and tuple(rows[position, :ndim]) == tuple(rows[other, :ndim]):
            raise LayoutError(
                f"devices {other} and {position} of the mesh returned different blocks from a shard_map, but "
                "its layout replicates them: shard the result along the mesh dimension, or combine it with "
                "dmesh.axes.psum, all_gather or the like"
            )


def _check_lengths(spec: Spec, lengths: Array) -> None:
    for position, coords in enumerate(spec.grid.coords):
        for d, axis in enumerate(spec.axes):
            low, high = spec.cuts(d)[0 if axis == WHOLE else coords[axis]]
            if lengths[position, d] != high - low:
                raise LayoutError(
                    f"the result of shard_map on device {position} has length {lengths[position, d]} "
                    f"along dimension {d}, but the layout needs {high - low} of {spec.shape[d]}"
                )

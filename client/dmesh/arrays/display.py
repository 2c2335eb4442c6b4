"""Display of sharded arrays: `repr`, HTML, a drawing of the devices' blocks. Nothing here communicates."""

from __future__ import annotations

import html

import numpy as np

from dmesh.arrays.dispatch.registry import hook
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.spec import Spec
from dmesh.errors import UnshardableError

_FEW = 1000
"""Maximum number of elements of a block that is shown."""


@hook("repr")
def describe(x: DTensor) -> str:
    """Return shape, dtype and placement, and this client's blocks if they are small."""
    spec = x.spec
    mesh = ", ".join(f"{n}={s}" for n, s in zip(spec.grid.names, spec.grid.sizes, strict=True))
    head = f"DTensor({spec.describe()}, mesh {mesh})"
    if x._shards is None:
        return head
    lines = []
    for slot, region, block in zip(spec.slots, spec.regions, x._shards, strict=True):
        place = ", ".join(f"{start}:{stop}" for start, stop in region)
        where = f"[{place}]" if region else ""
        what = "contribution" if spec.partial else "block"
        text = (
            np.array2string(block, prefix="  ", threshold=20, edgeitems=2)
            if block.size <= _FEW
            else f"{block.shape}"
        )
        lines.append(f"  {what} {slot or ''}{where}: {text}")
        if len(lines) == 4 and len(spec.slots) > 4:
            lines.append(f"  ... {len(spec.slots)} blocks on this client")
            break
    return "\n".join([head, *lines])


@hook("html")
def describe_html(x: DTensor) -> str:
    """Return the description and, for one and two dimensions, the drawing, as HTML."""
    text = x.spec.describe()
    if 1 <= x.ndim <= 2:
        text += "\n" + visualize_sharding(x)
    return f"<pre>{html.escape(text)}</pre>"


def visualize_sharding(x: DTensor) -> str:
    """Return a drawing of the devices that hold each block of an array of one or two dimensions.

    ```python
    print(dmesh.visualize_sharding(x))
    ```

    Args:
        x: The array.

    Raises:
        UnshardableError: The array has no dimensions, or more than two.
    """
    if not isinstance(x, DTensor) or not 1 <= x.ndim <= 2:
        raise UnshardableError("visualize_sharding draws sharded arrays of one or two dimensions")
    spec = x.spec
    rows = _cells(spec)
    width = max(len(cell) for row in rows for cell in row) + 2
    line = "+" + ("-" * width + "+") * len(rows[0])
    drawn = [line]
    for row in rows:
        drawn.append("|" + "|".join(cell.center(width) for cell in row) + "|")
        drawn.append(line)
    return "\n".join(drawn)


def _cells(spec: Spec) -> list[list[str]]:
    names = {block: _named(spec, positions) for block, positions in spec.holders.items()}
    if spec.ndim == 1:
        return [[names[(column,)] for column in range(len(spec.cuts(0)))]]
    return [[names[(row, column)] for column in range(len(spec.cuts(1)))] for row in range(len(spec.cuts(0)))]


def _named(spec: Spec, positions: tuple[int, ...]) -> str:
    first = spec.grid.mesh.min_global_device_id()
    numbers = ",".join(str(first + position) for position in positions)
    return f"{spec.grid.mesh.device_type()} {numbers}"

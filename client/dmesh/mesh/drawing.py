"""Drawing of a mesh's devices as an HTML table, for notebooks; layouts are drawn with it, too.

Colors are the page's own, so that it can be read on light and on dark ones. Everything is escaped.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Sequence

from dmesh.mesh.fields import MeshFields

_SMALL = 64
"""Size up to which a mesh is drawn whole."""
_MOST_ROWS, _MOST_COLUMNS, _MOST_GRIDS = 8, 8, 2
"""Rows, columns and grids of a larger one that are drawn at most: the first ones and the last ones."""
_LONGEST = 200
"""Characters of a name that are shown at most."""
_CELL = "border:1px solid currentColor;padding:2px 6px;text-align:left;background:none;color:inherit"
_LOCAL = f"{_CELL};font-weight:bold"
_GAP = "…"


def draw_mesh(fields: MeshFields, headline: str = "", note: Callable[[int], str] | None = None) -> str:
    """Return the devices of a mesh as HTML: a grid of the last two dimensions for each place in the others.

    Args:
        fields: The mesh.
        headline: What is said above it; the mesh's name and dimensions if empty.
        note: Returns a line below a device's name, by the device's position; None for none.
    """
    if fields.single_device is not None:
        title = headline or "Mesh of one device"
        return _framed(title, [_table([], [], [[_cell(fields, 0, note)]])])
    if fields.empty:
        return _framed(headline or "Empty mesh", [])
    title = headline or (
        f"Mesh {fields.name!r}, ".replace("Mesh '', ", "Mesh, ")
        + " x ".join(f"{dim.name} {dim.size}" for dim in fields.dims)
        + f": {fields.size} device{'' if fields.size == 1 else 's'}"
    )
    return _framed(title, list(_grids(fields, note)))


def _grids(fields: MeshFields, note: Callable[[int], str] | None) -> Iterator[str]:
    *outer, last = fields.dims
    rows = outer.pop() if outer else None
    area = last.size * (rows.size if rows is not None else 1)
    small = fields.size <= _SMALL
    for number in _some(fields.size // area, _SMALL if small else _MOST_GRIDS):
        if number is None:
            yield f"<div>{_GAP}</div>"
            continue
        where: list[str] = []
        left = number
        for dim in reversed(outer):
            where.insert(0, f"{dim.name} {left % dim.size}")
            left //= dim.size
        if where:
            yield f"<div>{_escaped(', '.join(where))}</div>"
        columns = list(_some(last.size, _SMALL if small else _MOST_COLUMNS))
        lines = list(_some(rows.size if rows is not None else 1, _SMALL if small else _MOST_ROWS))
        yield _table(
            [_GAP if column is None else f"{last.name} {column}" for column in columns],
            [] if rows is None else [_GAP if line is None else f"{rows.name} {line}" for line in lines],
            [
                [
                    _td(_GAP)
                    if line is None or column is None
                    else _cell(fields, number * area + line * last.size + column, note)
                    for column in columns
                ]
                for line in lines
            ],
        )


def _cell(fields: MeshFields, position: int, note: Callable[[int], str] | None) -> str:
    device = fields.first_id + position
    local = device in fields.local_ids
    if fields.single_device is not None:
        name = fields.single_device.to_string()
    elif fields.global_devices:
        name = fields.global_devices[position].to_string()
    elif local:
        name = fields.local_devices[fields.local_ids.index(device)].to_string()
    else:
        name = f"device {device}"
    lines = [_escaped(name), *([] if note is None else [_escaped(note(position))])]
    return _td("<br>".join(lines), _LOCAL if local else _CELL)


def _table(columns: Sequence[str], lines: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    corner = _th("") if lines else ""
    head = f"<tr>{corner}{''.join(_th(_escaped(column)) for column in columns)}</tr>" if columns else ""
    body = "".join(
        f"<tr>{'' if line is None else _th(_escaped(line))}{''.join(row)}</tr>"
        for line, row in itertools.zip_longest(lines, cells)
    )
    return f'<table style="border-collapse:collapse;margin:4px 0">{head}{body}</table>'


def _framed(title: str, parts: Sequence[str]) -> str:
    return f'<div style="overflow-x:auto"><div>{_escaped(title)}</div>{"".join(parts)}</div>'


def _th(text: str) -> str:
    return f'<th style="{_CELL}">{text}</th>'


def _td(text: str, style: str = _CELL) -> str:
    return f'<td style="{style}">{text}</td>'


def _some(count: int, most: int) -> Iterator[int | None]:
    """Yield the numbers below `count`; of too many the first and the last, with None between them."""
    if count <= most:
        yield from range(count)
        return
    yield from range(most // 2)
    yield None
    yield from range(count - most // 2, count)


def _escaped(text: str) -> str:
    return html.escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}{_GAP}")

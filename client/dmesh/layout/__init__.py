"""Layouts: which dimension of an array is cut into shards along which dimension of a mesh.

- `layout`: the `Layout` value and what it can be asked.
- `kinds`: the words of a layout.
- `text`: a layout as a string, and back.
- `proto`: a layout as a protocol buffer, and back.
"""

from __future__ import annotations

from dmesh.layout.kinds import MATCH, UNSHARDED, LayoutType
from dmesh.layout.layout import Layout

__all__ = ["Layout", "LayoutType", "MATCH", "UNSHARDED"]

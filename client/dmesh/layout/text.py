"""A layout as a string, and back, in TensorFlow's form.

    sharding_specs:SPEC,SPEC,... mesh:MESH

Each spec has a comma after it. `parted:` in place of `sharding_specs:` says that the layout is parted, and
`maximal:true, mesh:DEVICE` is the layout of a single device.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmesh.errors import LayoutError
from dmesh.layout.kinds import LayoutType
from dmesh.mesh import Mesh

_PREFIXES = {
    LayoutType.STATIC: "sharding_specs:",
    LayoutType.PARTED: "parted:",
    LayoutType.SINGLE_DEVICE: "maximal:true,",
}
_MESH_PREFIX = " mesh:"


def format_layout(specs: Sequence[str], mesh: Mesh, kind: LayoutType) -> str:
    """Writes a layout as a string."""
    return f"{_PREFIXES[kind]}{''.join(f'{spec},' for spec in specs)}{_MESH_PREFIX}{mesh.to_string()}"


def parse_layout(text: str) -> tuple[list[str], Mesh, LayoutType]:
    """Reads the parts of a layout from a string.

    Raises:
        LayoutError: The string is malformed.
        MeshError: Its mesh is.
    """
    head, found, mesh_text = text.partition(_MESH_PREFIX)
    if not found:
        raise LayoutError(
            "expected sharding specs, a space and mesh:, as in 'sharding_specs:x,unsharded, mesh:...'"
        )
    kind = next((kind for kind, prefix in _PREFIXES.items() if head.startswith(prefix)), None)
    if kind is None:
        static, parted, single = _PREFIXES.values()
        raise LayoutError(f"it starts with {head!r:.200}; expected {static}, {parted} or {single}")
    *specs, rest = head.removeprefix(_PREFIXES[kind]).split(",")
    if rest:
        raise LayoutError(
            f"there is no comma after the sharding spec {rest!r:.200}; every spec has one after it"
        )
    return specs, Mesh.from_string(mesh_text), kind

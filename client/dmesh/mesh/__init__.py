"""Meshes: the devices of all clients in a grid with named dimensions.

- `mesh`: the `Mesh` value and what it can be asked.
- `fields`: what a mesh consists of, and what makes it valid.
- `text`: a mesh as a string, and back.
- `proto`: a mesh as a protocol buffer, and back.
- `ownership`: which client holds which device, and the groups of clients along a dimension.
- `creation`: meshes over the devices that there are.
- `default`: the mesh that is used where none is named.
"""

from __future__ import annotations

from dmesh.mesh.creation import create_distributed_mesh, create_mesh
from dmesh.mesh.default import default_mesh, get_default_mesh
from dmesh.mesh.fields import MeshDimension
from dmesh.mesh.mesh import Mesh

__all__ = [
    "create_distributed_mesh",
    "create_mesh",
    "default_mesh",
    "get_default_mesh",
    "Mesh",
    "MeshDimension",
]

"""The mesh that functions use when they are given none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from dmesh.errors import MeshError
from dmesh.mesh.mesh import Mesh

_default_mesh: ContextVar[Mesh | None] = ContextVar("dmesh_default_mesh", default=None)


def default_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Mesh]:
    """Makes a mesh the default one inside a `with` block, in this thread or asynchronous task.

    The block before it gets its default back, also if the block ends with an exception.

    Args:
        mesh: The mesh.

    Raises:
        MeshError: It is not a mesh.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"default_mesh() needs a Mesh, got {type(mesh).__name__}: {mesh!r:.200}")
    return _default(mesh)


@contextlib.contextmanager
def _default(mesh: Mesh) -> Iterator[Mesh]:
    token = _default_mesh.set(mesh)
    try:
        yield mesh
    finally:
        _default_mesh.reset(token)


def get_default_mesh() -> Mesh | None:
    """Returns the mesh of the innermost `default_mesh` block, None outside of any."""
    return _default_mesh.get()

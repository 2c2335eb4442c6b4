"""Clusters of fake clients, and random arrays on their meshes, with NumPy's own beside each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import dmesh
from dmesh.testing import FakeCluster

NAMES = "xyz"


class World(NamedTuple):
    """Clients, their devices, and the shape of a mesh over all of them."""

    clients: int
    devices: int
    shape: tuple[int, ...]


WORLDS = (
    World(1, 1, (1,)),
    World(1, 4, (4,)),
    World(1, 4, (2, 2)),
    World(2, 1, (2,)),
    World(2, 2, (4,)),
    World(2, 2, (2, 2)),
    World(2, 3, (3, 2)),  # lines along x cut the clients unequally
    World(3, 1, (3,)),
    World(4, 2, (2, 2, 2)),
    World(4, 1, (2, 2)),
    World(2, 4, (4, 1, 2)),
    World(4, 4, (4, 4)),
)


@functools.cache
def cluster(clients: int, devices: int) -> FakeCluster:
    """Return the cluster of so many clients, which all tests share."""
    return FakeCluster(clients, num_cpu_devices=devices)


def mesh_of(world: World) -> dmesh.Mesh:
    return dmesh.create_distributed_mesh(list(zip(NAMES, world.shape, strict=False)))


def run(world: World, program: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `program(mesh, *args)` as every client, and return what each returned."""
    found = cluster(world.clients, world.devices)

    def work() -> Any:
        return program(mesh_of(world), *args)

    try:
        return found.run(work)
    except BaseException:
        cluster.cache_clear()  # its clients have died of the error
        raise


class Made(NamedTuple):
    """An array to be put on a mesh."""

    values: np.ndarray
    specs: tuple[str, ...]
    partial: str = ""
    """Mesh dimension along which it is a sum of contributions; empty for none."""

    def on(self, mesh: dmesh.Mesh) -> dmesh.DTensor:
        layout = dmesh.Layout(list(self.specs), mesh)
        if not self.partial:
            return dmesh.copy_to_mesh(self.values, layout, uneven=True)
        n = mesh.dim_size(self.partial)
        if self.values.dtype.kind == "b":
            parts = np.zeros((n, *self.values.shape), bool)
            parts[-1] = self.values
            wide = dmesh.Layout([self.partial, *self.specs], mesh)
            return np.any(dmesh.copy_to_mesh(parts, wide, uneven=True), axis=0)
        parts = np.stack(
            [np.full_like(self.values, k) for k in range(n - 1)] + [self.values - sum(range(n - 1))]
        )
        parts = parts.astype(self.values.dtype)
        wide = dmesh.Layout([self.partial, *self.specs], mesh)
        return np.add.reduce(dmesh.copy_to_mesh(parts, wide, uneven=True), axis=0, dtype=self.values.dtype)


def specs(world: World, ndim: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Layouts of arrays of some dimensions."""
    names = NAMES[: len(world.shape)]

    @st.composite
    def draw(pick: Any) -> tuple[str, ...]:
        left = list(names)
        found = []
        for _ in range(ndim):
            name = pick(st.sampled_from(["unsharded", *left]))
            if name in left:
                left.remove(name)
            found.append(name)
        return tuple(found)

    return draw()


lengths = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8])
DTYPES = ("float64", "float32", "int64", "int32", "uint8", "complex128", "bool")


@st.composite
def arrays(
    pick: Any, world: World, shape: Sequence[int], dtypes: Sequence[str] = DTYPES, partial: bool = True
) -> Made:
    """Arrays of small integers, which all dtypes can hold and add without rounding."""
    dtype = np.dtype(pick(st.sampled_from(list(dtypes))))
    seed = pick(st.integers(0, 1 << 20))
    values = np.random.default_rng(seed).integers(
        0 if dtype.kind in "bu" else -3, 2 if dtype.kind == "b" else 6, tuple(shape)
    )
    if dtype.kind == "c":
        values = values + 1j * values[::-1] if values.ndim else values + 2j
    layout = pick(specs(world, len(shape)))
    over = [n for n, size in zip(NAMES, world.shape, strict=False) if n not in layout and size > 1]
    cut = pick(st.sampled_from(["", *over])) if partial and dtype.kind not in "b" else ""
    return Made(values.astype(dtype), layout, cut)


def whole(x: Any) -> Any:
    """Return NumPy's value of a result: of arrays, tuples of them, or numbers."""
    if isinstance(x, dmesh.DTensor):
        return x.full()
    if isinstance(x, (tuple, list)):
        return [whole(one) for one in x]
    return x


def assert_same(mine: Any, theirs: Any, what: str = "") -> None:
    """Compare a result with NumPy's: dtype, shape and elements, exactly but for floats."""
    if isinstance(theirs, (tuple, list)):
        assert len(mine) == len(theirs), what
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b, what)
        return
    expected = np.asarray(theirs)
    found = np.asarray(mine)
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: {found.shape} is not {expected.shape}"
    if expected.dtype.kind in "fc":
        loose = 1e-5 if expected.dtype.itemsize // (2 if expected.dtype.kind == "c" else 1) <= 4 else 1e-11
        np.testing.assert_allclose(found, expected, rtol=loose, atol=loose * 10, err_msg=what)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=what)

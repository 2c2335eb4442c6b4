"""Meshes whose neighbours are next to each other on the TPU system."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dmesh.devices.device import DeviceSpec, this_client
from dmesh.errors import MeshError, NotInitializedError
from dmesh.mesh.mesh import Mesh
from dmesh.runtime import context
from dmesh.tpu.rings import core_ring
from dmesh.tpu.topology import RANK, Topology

_AXES = ("x", "y", "z", "core")


def create_tpu_mesh(
    mesh_dim_names: Sequence[str],
    mesh_shape: Sequence[int],
    mesh_name: str,
    ring_dims: int | None = None,
    ring_axes: Sequence[str] | None = None,
    ring_bounds: Sequence[int] | None = None,
    can_split_host_across_rings: bool = True,
    build_ring_across_rings: bool = False,
    rotate_ring_across_rings: bool = False,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Creates a mesh over all TPU devices of all clients; every client must call it with equal arguments.

    Consecutive devices of the mesh form rings of neighbours on the TPU system: `create_distributed_mesh`
    takes the devices client by client instead.

    Args:
        mesh_dim_names: Name of each dimension, outermost first.
        mesh_shape: Size of each dimension; their product is the number of all TPU devices.
        mesh_name: A name that no other TPU mesh has, or an empty one.
        ring_dims: How many leading (positive) or trailing (negative) dimensions a ring has. Default: all but
            the first.
        ring_axes: In which order the axes `x`, `y`, `z` and `core` of the TPU system are filled with rings.
            Default: core, x, y, z.
        ring_bounds: How far a ring may reach along x, y, z and core. Default: as far as the system does.
        can_split_host_across_rings: Whether devices of one client may belong to different rings.
        build_ring_across_rings: Whether the rings themselves are ordered as a ring, too.
        rotate_ring_across_rings: Whether that ring goes column by column.
        use_xla_spmd: Kept; without effect here.

    Raises:
        MeshError: The arguments are invalid, or do not fit each other or the TPU system; or there is a TPU
            mesh of that name already.
        NotInitializedError: There is no TPU system.
    """
    shape = _integers("mesh_shape", mesh_shape)
    ring_dims = _checked_ring_dims(ring_dims, len(shape))
    axes = _checked_axes(ring_axes)
    topology = context.find(Topology)
    if topology is None:
        raise NotInitializedError(
            "there is no TPU system: call dmesh.tpu.experimental.initialize_tpu_system(), or "
            "dmesh.initialize_accelerator_system('TPU'), before create_tpu_mesh()"
        )
    bounds = _checked_bounds(ring_bounds, topology)
    ring_size = math.prod(shape[:ring_dims] if ring_dims > 0 else shape[ring_dims:]) if ring_dims else 1
    blocks = (1,) * RANK if can_split_host_across_rings else _host_bounds(topology)
    _check_rings(topology, bounds, blocks, ring_size)
    if math.prod(shape) != math.prod(topology.mesh_shape.tolist()) or len(topology.missing_devices):
        present = topology.num_tasks * topology.num_tpus_per_task
        raise MeshError(
            f"a mesh of shape {shape} has {math.prod(shape)} devices, but the TPU system of shape "
            f"{topology.mesh_shape.tolist()} has {present}; a TPU mesh is over all of them"
        )
    rings = _enumerate(topology, bounds, blocks, axes).reshape(-1, ring_size, RANK)
    rings = rings[:, core_ring(rings[0])]
    if build_ring_across_rings:
        rings = rings[core_ring(rings[:, 0], rotate=rotate_ring_across_rings)]
    mesh = _mesh(topology, rings.reshape(-1, RANK), mesh_dim_names, shape, mesh_name, use_xla_spmd)
    _claim_name(mesh, topology)
    mesh._announce()
    return mesh


@dataclass(frozen=True)
class _TpuMeshes:
    """The TPU meshes of an initialized system."""

    topology: Topology
    """The TPU system that they are meshes of."""
    names: set[str] = field(default_factory=set)
    """Their names."""


def _claim_name(mesh: Mesh, topology: Topology) -> None:
    """Notes the name of a mesh, if it has one.

    Raises:
        MeshError: Another mesh of this TPU system has the name.
    """
    state = context.current()
    meshes = state.find(_TpuMeshes)
    if meshes is None or meshes.topology is not topology:
        meshes = _TpuMeshes(topology)
        state.put(meshes)
    if mesh.name in meshes.names:
        raise MeshError(
            f"there is a TPU mesh {mesh.name!r:.200} already; give this one another name, or an empty one"
        )
    if mesh.name:
        meshes.names.add(mesh.name)


def _mesh(
    topology: Topology,
    cores: NDArray[np.intp],
    names: Sequence[str],
    shape: list[int],
    mesh_name: str,
    use_xla_spmd: bool,
) -> Mesh:
    """Returns the mesh that has the TPU devices at these cores in this order."""
    job, client, _ = this_client()
    devices = [
        DeviceSpec(
            job,
            0,
            topology.task_ordinal_at_coordinates(core),
            "TPU",
            topology.tpu_device_ordinal_at_coordinates(core),
        )
        for core in cores.tolist()
    ]
    own = sorted(
        (index for index, device in enumerate(devices) if device.task == client),
        key=lambda index: devices[index].device_index or 0,
    )
    return Mesh(
        list(names),
        np.arange(len(devices)).reshape(shape),
        own,
        [devices[index] for index in own],
        mesh_name,
        global_devices=devices,
        use_xla_spmd=use_xla_spmd,
    )


def _enumerate(
    topology: Topology, bounds: Sequence[int], blocks: Sequence[int], axes: Sequence[int]
) -> NDArray[np.intp]:
    """Returns the coordinates of all cores, `[cores, 4]`: ring by ring, in those host by host.

    Args:
        topology: The TPU system.
        bounds: How far a ring reaches along x, y, z and core.
        blocks: How far a host reaches, likewise.
        axes: The axes from the one that varies fastest to the one that varies slowest.
    """
    slow_to_fast = list(reversed(axes))
    sizes = topology.mesh_shape.tolist()
    # Each axis in three steps: over the rings, over the hosts in a ring, over the cores of a host.
    steps = [
        step
        for axis in slow_to_fast
        for step in (sizes[axis] // bounds[axis], bounds[axis] // blocks[axis], blocks[axis])
    ]
    grid = np.stack(np.meshgrid(*(np.arange(sizes[axis]) for axis in slow_to_fast), indexing="ij"), axis=-1)
    order = [3 * axis + level for level in range(3) for axis in range(RANK)]
    cores = grid.reshape(*steps, RANK).transpose(*order, len(order)).reshape(-1, RANK)
    return cores[:, [slow_to_fast.index(axis) for axis in range(RANK)]]


def _host_bounds(topology: Topology) -> list[int]:
    """Returns how far the devices of one client reach along x, y, z and core.

    Raises:
        MeshError: They are not a block that all clients have.
    """
    corners = topology.device_coordinates.min(axis=1)
    blocks = topology.device_coordinates.max(axis=1) - corners + 1
    block: list[int] = blocks[0].tolist()
    if (
        (blocks != blocks[0]).any()
        or math.prod(block) != topology.num_tpus_per_task
        or (corners % blocks[0]).any()
    ):
        raise MeshError(
            "can_split_host_across_rings=False needs clients whose devices are blocks of equal shape of the "
            "TPU system, but they are not; start one client for each of its hosts"
        )
    return block


def _check_rings(topology: Topology, bounds: Sequence[int], blocks: Sequence[int], ring_size: int) -> None:
    sizes = topology.mesh_shape.tolist()
    if sizes[-1] not in (1, 2):
        raise MeshError(f"a TPU system of shape {sizes} is not supported: a chip has 1 or 2 cores")
    if ring_size < math.prod(blocks):
        raise MeshError(
            f"a ring of {ring_size} devices is too small for can_split_host_across_rings=False: a client has "
            f"{math.prod(blocks)} devices. Enlarge the dimensions that ring_dims counts"
        )
    if any(bound < block for bound, block in zip(bounds, blocks, strict=True)):
        raise MeshError(
            f"ring_bounds {list(bounds)} is less than the block {list(blocks)} of devices that a client has, "
            "which can_split_host_across_rings=False keeps together"
        )
    if any(bound % block for bound, block in zip(bounds, blocks, strict=True)):
        raise MeshError(
            f"ring_bounds {list(bounds)} is not a multiple of the block {list(blocks)} of devices that a "
            "client has, which can_split_host_across_rings=False keeps together"
        )


def _checked_ring_dims(ring_dims: object, rank: int) -> int:
    if ring_dims is None:
        return 1 - rank
    number = _index(ring_dims)
    if number is None or not -rank <= number <= rank:
        raise MeshError(
            f"ring_dims is {ring_dims!r:.200}; a mesh of {rank} dimensions has rings over {-rank} to "
            f"{rank} of them"
        )
    return number


def _checked_axes(ring_axes: Sequence[str] | None) -> list[int]:
    axes = ["core", "x", "y", "z"] if ring_axes is None else list(ring_axes)
    if len(axes) != RANK:
        raise MeshError(f"ring_axes has {len(axes)} entries, {axes!r:.200}; expected 4: core, x, y and z")
    if sorted(map(str, axes)) != sorted(_AXES):
        raise MeshError(f"ring_axes is {axes!r:.200}; expected core, x, y and z, each once")
    return [_AXES.index(axis) for axis in axes]


def _checked_bounds(ring_bounds: Sequence[int] | None, topology: Topology) -> list[int]:
    sizes: list[int] = topology.mesh_shape.tolist()
    if ring_bounds is None:
        return sizes
    bounds = _integers("ring_bounds", ring_bounds)
    if len(bounds) != RANK:
        raise MeshError(f"ring_bounds has {len(bounds)} entries, {bounds}; expected 4, for x, y, z and core")
    if any(bound > size for bound, size in zip(bounds, sizes, strict=True)):
        raise MeshError(
            f"ring_bounds is {bounds}, more than the TPU system's shape {sizes}; expected at most that"
        )
    if min(bounds) < 1 or any(size % bound for size, bound in zip(sizes, bounds, strict=True)):
        raise MeshError(
            f"ring_bounds is {bounds}, which does not divide the TPU system's shape {sizes} into equal parts"
        )
    return bounds


def _integers(name: str, values: object) -> list[int]:
    numbers = [_index(value) for value in values] if isinstance(values, Sequence | np.ndarray) else [None]
    if not numbers or None in numbers or isinstance(values, str):
        raise MeshError(f"{name} is {values!r:.200}; expected integers")
    return [number for number in numbers if number is not None]


def _index(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None

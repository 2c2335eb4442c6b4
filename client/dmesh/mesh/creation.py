"""Meshes over the devices that there are: of this client, or of all clients."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from dmesh._log import logger
from dmesh.devices.device import (
    DEVICE_TYPES,
    DeviceSpec,
    num_devices_of_client,
    num_local_devices,
    this_client,
)
from dmesh.devices.device import (
    local_devices as devices_of_client,
)
from dmesh.errors import DeviceError, MeshError, NotInitializedError
from dmesh.mesh.fields import MeshDimension, check_dimensions
from dmesh.mesh.mesh import Mesh
from dmesh.runtime import context


def create_mesh(
    mesh_dims: Sequence[tuple[str, int]] | Mapping[str, int] | None = None,
    mesh_name: str = "",
    devices: Sequence[DeviceSpec | str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Creates a mesh over devices of this client alone.

    ```python
    mesh = dmesh.create_mesh([("x", 1)], devices=["CPU:0"])
    assert mesh.shape() == [1]
    ```

    Args:
        mesh_dims: Name and size of each dimension, outermost first: pairs, or a dict. Default: one dimension
            `x` over all devices. A single dimension of size -1 is over all devices, too.
        mesh_name: A name for people.
        devices: Which devices, in the order in which they fill the mesh row by row: specs or names, such as
            `CPU:0`. Default: all of `device_type`.
        device_type: CPU, GPU or TPU, in any case. Default: the type of `devices`, or else CPU.
        use_xla_spmd: For TPU meshes only; without effect here.

    Raises:
        MeshError: The dimensions are not valid, or their sizes do not match the number of devices.
        DeviceError: This client has no such devices.
    """
    specs = _devices(devices, device_type, "devices")
    if mesh_dims is None:
        mesh_dims = [("x", len(specs))]
    dims = _dimensions(mesh_dims)
    if len(dims) == 1 and dims[0].size == -1:
        dims = [MeshDimension(dims[0].name, len(specs))]
    check_dimensions(dims)
    size = math.prod(dim.size for dim in dims)
    if size != len(specs):
        raise MeshError(
            f"a mesh of shape {_shape(dims)} needs {size} devices, but {len(specs)} are available: "
            f"{_first(specs)}. Change the sizes, or list the devices to use; "
            f"initialize_accelerator_system(num_logical_cpu_devices={size}) makes more CPU devices"
        )
    mesh = _build(dims, size, 0, specs, mesh_name, use_xla_spmd)
    if context.current_or_none() is None:
        context.mark_devices_in_use()  # from now on their number must not change under the mesh
    return mesh


def create_distributed_mesh(
    mesh_dims: Sequence[tuple[str, int]] | Mapping[str, int],
    mesh_name: str = "",
    local_devices: Sequence[DeviceSpec | str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Creates a mesh over the devices of all clients; every client must call it with equal dimensions.

    The devices fill the mesh row by row: those of client 0 by index, then those of client 1, and so on.

    ```python
    with dmesh.session():
        mesh = dmesh.create_distributed_mesh([("batch", dmesh.num_global_devices("CPU")), ("model", 1)])
        assert mesh.dim_names == ["batch", "model"]
    ```

    Args:
        mesh_dims: Name and size of each dimension, outermost first: pairs, or a dict.
        mesh_name: A name for people.
        local_devices: Which of this client's devices: specs or names, such as `CPU:0`. Every client must use
            equally many. Default: all of `device_type`.
        device_type: CPU, GPU or TPU, in any case. Default: the type of `local_devices`, or else CPU.
        use_xla_spmd: For TPU meshes only; without effect here.

    Raises:
        MeshError: The dimensions are not valid, their sizes do not fit the number of devices, or the clients
            have different numbers of devices; the message says which client has how many.
        NotInitializedError: `initialize_accelerator_system` was not called.
        DeviceError: This client has no such devices.
    """
    dims = _dimensions(mesh_dims)
    check_dimensions(dims)
    if context.current_or_none() is None:
        raise NotInitializedError(
            "dmesh is not initialized in this process: call dmesh.initialize_accelerator_system() before "
            "create_distributed_mesh()"
        )
    if isinstance(device_type, str) and device_type.upper() == "TPU" and local_devices is not None:
        raise MeshError("local_devices must be left out for TPU meshes, which always have all TPU devices")
    specs = _devices(local_devices, device_type, "local_devices")
    kind = str(specs[0].device_type)
    _, client_id, num_clients = this_client()
    _check_other_clients(kind, specs, num_clients, everything=local_devices is None)
    size, available = math.prod(dim.size for dim in dims), len(specs) * num_clients
    if size != available:
        advice = f"choose sizes whose product is {available}"
        if kind == "CPU" and local_devices is None and size % num_clients == 0:
            advice += f", or initialize every client with num_logical_cpu_devices={size // num_clients}"
        raise MeshError(
            f"a mesh of shape {_shape(dims)} has {size} devices, but {available} {kind} devices are "
            f"available ({len(specs)} per client * {num_clients} clients = {available}); {advice}"
        )
    mesh = _build(dims, size, client_id * len(specs), specs, mesh_name, use_xla_spmd)
    logger.debug("client %d of %d created %r", client_id, num_clients, mesh)
    mesh._announce()
    return mesh


def _build(
    dims: Sequence[MeshDimension],
    size: int,
    first_local_id: int,
    specs: list[DeviceSpec],
    mesh_name: str,
    use_xla_spmd: bool,
) -> Mesh:
    return Mesh(
        [dim.name for dim in dims],
        np.arange(size).reshape([dim.size for dim in dims]),
        list(range(first_local_id, first_local_id + len(specs))),
        specs,
        mesh_name,
        use_xla_spmd=use_xla_spmd,
    )


def _dimensions(mesh_dims: object) -> list[MeshDimension]:
    """Reads the dimensions that a user gave; their sizes are integers, but may still be out of range."""
    advice = 'write them as [("batch", 4), ("model", 2)] or {"batch": 4, "model": 2}'
    if isinstance(mesh_dims, Mapping):
        pairs: list[object] = list(mesh_dims.items())
    elif isinstance(mesh_dims, Sequence) and not isinstance(mesh_dims, str | bytes):
        pairs = list(mesh_dims)
    else:
        raise MeshError(f"mesh_dims must be pairs of name and size, got {mesh_dims!r:.200}; {advice}")
    if not pairs:
        raise MeshError(f"mesh_dims is empty; a mesh needs a dimension: {advice}")
    dims: list[MeshDimension] = []
    for pair in pairs:
        match pair:
            case (str(name), size):
                dims.append(MeshDimension(name, _size(name, size)))
            case _:
                raise MeshError(f"{pair!r:.200} in mesh_dims is not a pair of name and size; {advice}")
    return dims


def _size(name: str, size: object) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        return operator.index(size)  # type: ignore[arg-type]  # whether it is an index is the question
    except TypeError:
        raise MeshError(
            f"the mesh dimension {name!r:.200} has size {size!r:.200}; expected an integer"
        ) from None


def _devices(devices: object, device_type: str | None, what: str) -> list[DeviceSpec]:
    """Returns the full names of the devices that a user chose among this client's, or of all of a type."""
    if device_type is not None and (
        not isinstance(device_type, str) or device_type.upper() not in DEVICE_TYPES
    ):
        raise DeviceError(
            f"device type {device_type!r:.200} is not known; expected one of {', '.join(DEVICE_TYPES)}"
        )
    if devices is None:
        kind = (device_type or "CPU").upper()
        found = devices_of_client(kind)
        if not found:
            raise DeviceError(
                f"this client has no {kind} devices; use device_type='CPU', which every client has"
            )
        return found
    if not isinstance(devices, list | tuple) or not devices:
        raise MeshError(f"{what} must be a list of devices, such as ['CPU:0', 'CPU:1'], got {devices!r:.200}")
    return [_own_device(device, device_type, what) for device in devices]


def _own_device(device: object, device_type: str | None, what: str) -> DeviceSpec:
    """Completes the name of a device of this client, which must exist."""
    if isinstance(device, str):
        device = DeviceSpec.from_string(device)
    if not isinstance(device, DeviceSpec):
        raise MeshError(f"{what} must be a list of DeviceSpec or device names, got {device!r:.200} in it")
    kind, index = device.device_type, device.device_index
    if kind is None or index is None:
        raise MeshError(f"{str(device)!r} in {what} does not name one device; write it as in CPU:0")
    if device_type is not None and kind != device_type.upper():
        raise MeshError(
            f"{device} in {what} is not a {device_type.upper()}, but device_type requires one; remove it "
            "or change device_type"
        )
    job, client_id, _ = this_client()
    here = DeviceSpec(job, 0, client_id)
    full = here.make_merged_spec(device)
    if full.replace(device_type=None, device_index=None) != here:
        raise MeshError(
            f"{device} in {what} is not a device of this client, which is {here}; leave out that part"
        )
    count = num_local_devices(kind)
    if index >= count:
        have = f"{kind}:0 to {kind}:{count - 1}" if count else f"no {kind} devices"
        advice = (
            f"; initialize it with num_logical_cpu_devices={index + 1} to have that one"
            if kind == "CPU"
            else ""
        )
        raise DeviceError(f"{device} in {what} does not exist: this client has {have}{advice}")
    return full


def _check_other_clients(kind: str, specs: list[DeviceSpec], num_clients: int, *, everything: bool) -> None:
    """Refuses clients whose devices cannot be put into an even grid, by name."""
    counts = [num_devices_of_client(kind, client) for client in range(num_clients)]
    if everything:
        odd = [count for count in counts if count != len(specs)]
    else:
        odd = [count for count in counts if count < len(specs)]
    if not odd:
        return
    job = this_client().job
    runs = [list(run) for _, run in groupby(range(num_clients), key=counts.__getitem__)]
    named = "; ".join(f"{_tasks(job, run)} {counts[run[0]]}" for run in runs[:8]) + (
        "; ..." if len(runs) > 8 else ""
    )
    fewest = min(counts)
    if kind == "CPU":
        advice = f"initialize every client with the same num_logical_cpu_devices, such as {max(counts)}"
    else:
        advice = "start clients on equal machines"
    if everything and fewest:
        advice += f", or use the first {fewest} of each with local_devices={_names(kind, fewest)}"
    raise MeshError(
        f"the clients have different numbers of {kind} devices ({named}), but a mesh needs equally many of "
        f"each; {advice}"
    )


def _tasks(job: str, run: list[int]) -> str:
    first = f"/job:{job}/task:{run[0]}"
    return f"{first} has" if len(run) == 1 else f"{first} to task:{run[-1]} have"


def _names(kind: str, count: int) -> str:
    return (
        str([f"{kind}:{i}" for i in range(count)]) if count <= 4 else f"[{kind}:0, ..., {kind}:{count - 1}]"
    )


def _shape(dims: Sequence[MeshDimension]) -> str:
    return "(" + ", ".join(f"{dim.name}={dim.size}" for dim in dims) + ")"


def _first(specs: Sequence[DeviceSpec]) -> str:
    text = ", ".join(spec.to_string() for spec in specs[:4])
    return f"{text}, ..." if len(specs) > 4 else text

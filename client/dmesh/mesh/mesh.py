"""`Mesh`: an immutable grid of the devices of all clients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dmesh.devices.device import DeviceSpec, ThisClient, this_client
from dmesh.errors import DeviceError, MeshError
from dmesh.mesh.description import describe
from dmesh.mesh.drawing import draw_mesh
from dmesh.mesh.fields import MeshDimension, MeshFields
from dmesh.mesh.ownership import client_ranks, fingerprint, group_along
from dmesh.mesh.proto import Serializable, read_mesh, write_mesh
from dmesh.mesh.text import format_mesh, parse_mesh
from dmesh.runtime import context

if TYPE_CHECKING:
    from dmesh.collectives.group import Group
    from dmesh.v1 import layout_pb2


_MOST_IDS = 10**18
"""Ids stay below this, so that arithmetic with them stays within 64 bits."""


class Mesh:
    """Devices of one or many clients in a grid with named dimensions.

    `dmesh.create_mesh` and `dmesh.create_distributed_mesh` create meshes over the existing devices. This
    constructor takes a mesh's parts one by one and does not check that the devices exist.

    Every client of a mesh has the same grid, and its own local part: the devices that it owns. Meshes are
    immutable values. Two meshes are equal if all their parts are, including the local part and the name.

    ```python
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    mesh = dmesh.Mesh(["x"], np.arange(1), [0], [device], mesh_name="one")
    assert (mesh.size, mesh.dim_size("x")) == (1, 1)
    ```

    Args:
        dim_names: A name for each dimension, outermost first.
        global_device_ids: An array of the mesh's shape with the ids of all devices, counting up row by row.
        local_device_ids: A list of the ids that are this client's.
        local_devices: A list of this client's devices in the order of `local_device_ids`: specs or full
            names.
        mesh_name: A name for people.
        global_devices: A list of all devices by id. Needed if the clients do not own equal blocks of ids in
            the order of their own ids, which is what `create_distributed_mesh` gives them.
        use_xla_spmd: Kept, for TPU meshes only; without effect here.

    Raises:
        MeshError: The parts do not make a mesh; the message says why.
    """

    __slots__ = ("_fields", "_groups")
    _fields: MeshFields
    _groups: dict[tuple[str, ThisClient], tuple[int, ...]]  # found once: a program asks again at every step

    def __init__(
        self,
        dim_names: Sequence[str],
        global_device_ids: NDArray[Any],
        local_device_ids: list[int],
        local_devices: Sequence[DeviceSpec | str],
        mesh_name: str = "",
        global_devices: Sequence[DeviceSpec | str] | None = None,
        use_xla_spmd: bool = False,
    ) -> None:
        first_id = _first_of(global_device_ids)
        if not isinstance(dim_names, Sequence):
            raise MeshError(f"dim_names must be a list of names, got {_kind(dim_names)}")
        names = [dim_names] if isinstance(dim_names, str) else list(dim_names)
        shape = global_device_ids.shape
        if len(names) != len(shape):
            raise MeshError(
                f"there are {len(names)} dimension names, {names}, for the {len(shape)} dimensions of "
                "global_device_ids; give one for each"
            )
        if not isinstance(local_device_ids, list):
            raise MeshError(f"local_device_ids must be a list of integers, got {_kind(local_device_ids)}")
        local_ids = tuple(_integer(i, "a local device id") for i in local_device_ids)
        self._fields = MeshFields(
            name=mesh_name,
            dims=tuple(MeshDimension(name, size) for name, size in zip(names, shape, strict=True)),
            first_id=first_id,
            local_ids=local_ids,
            local_devices=_specs(local_devices, "local_devices"),
            global_devices=_specs([] if global_devices is None else global_devices, "global_devices"),
            use_xla_spmd=bool(use_xla_spmd),
        ).check()
        self._groups = {}

    # Other ways to make one ---------------------------------------------------------------------------------

    @classmethod
    def from_string(cls, mesh_str: str) -> Mesh:
        """Reads what `to_string` wrote, or what TensorFlow did.

        Raises:
            MeshError: The string is malformed, or what it says is not a valid mesh.
        """
        return cls._of(parse_mesh(mesh_str))

    @classmethod
    def from_proto(cls, proto: Serializable) -> Mesh:
        """Reads what `as_proto` wrote.

        Args:
            proto: A `MeshProto`, of `dmesh.v1.layout_pb2` or of TensorFlow.

        Raises:
            MeshError: It is not such a message, or what it says is not a valid mesh.
        """
        return cls._of(read_mesh(proto))

    @classmethod
    def from_device(cls, device: str) -> Mesh:
        """Makes a mesh without dimensions of one device.

        Args:
            device: The device's full name, such as `/job:localhost/replica:0/task:0/device:CPU:0`.

        Raises:
            MeshError: It is not a device's full name.
        """
        (spec,) = _specs([device], "device")
        return cls._of(MeshFields(single_device=spec).check())

    @classmethod
    def _of(cls, fields: MeshFields) -> Mesh:
        mesh = object.__new__(cls)
        mesh._fields = fields
        mesh._groups = {}
        return mesh

    # The grid -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The mesh's name, for people."""
        return self._fields.name

    @property
    def dim_names(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return [dim.name for dim in self._fields.dims]

    @property
    def size(self) -> int:
        """Number of devices in the mesh."""
        return self._fields.size

    @property
    def strides(self) -> list[int]:
        """Distance of neighbors along each dimension in the order of ids: `[4, 1]` for a 2x4 mesh."""
        strides: list[int] = []
        step = 1
        for size in reversed(self._fields.shape):
            strides.insert(0, step)
            step *= size
        return strides

    @property
    def single_device(self) -> str:
        """The device of a mesh without dimensions; empty for others."""
        spec = self._fields.single_device
        return "" if spec is None else spec.to_string()

    @property
    def fingerprint(self) -> str:
        """Identity of the mesh to all its clients: equal on each of them, without local part and name."""
        return fingerprint(self._fields)

    def shape(self) -> list[int]:
        """Returns the size of each dimension."""
        return list(self._fields.shape)

    def dim_size(self, dim_name: str) -> int:
        """Returns the size of a dimension.

        Raises:
            MeshError: There is no such dimension.
        """
        return self[dim_name].size

    def contains_dim(self, dim_name: str) -> bool:
        """Returns whether there is a dimension of that name."""
        return any(dim.name == dim_name for dim in self._fields.dims)

    def __contains__(self, dim_name: object) -> bool:
        return any(dim.name == dim_name for dim in self._fields.dims)

    def __getitem__(self, dim_name: str) -> MeshDimension:
        for dim in self._fields.dims:
            if dim.name == dim_name:
                return dim
        known = ", ".join(self.dim_names) or "none: it is a mesh without dimensions"
        raise MeshError(f"mesh {self.name!r} has no dimension {dim_name!r:.200}; its dimensions are {known}")

    def device_type(self) -> str:
        """Returns the type of the devices: CPU, GPU or TPU; empty for the empty mesh."""
        return self._fields.device_type

    def use_xla_spmd(self) -> bool:
        """Returns the flag that the mesh was made with; it has no effect here."""
        return self._fields.use_xla_spmd

    def is_single_device(self) -> bool:
        """Returns whether this is a mesh without dimensions of one device."""
        return self._fields.single_device is not None

    # Devices ------------------------------------------------------------------------------------------------

    def global_device_ids(self) -> NDArray[np.int64]:
        """Returns the ids of all devices, in an array of the mesh's shape."""
        fields = self._fields
        if not fields.dims:
            return np.zeros(0, np.int64)
        return np.arange(fields.first_id, fields.first_id + fields.size, dtype=np.int64).reshape(fields.shape)

    def global_devices(self) -> list[str]:
        """Returns the names of all devices by id; empty if the mesh was made without them."""
        return [device.to_string() for device in self._fields.global_devices]

    def min_global_device_id(self) -> int:
        """Returns the lowest id of a device in the mesh."""
        return self._fields.first_id

    def local_device_ids(self) -> list[int]:
        """Returns the ids of this client's devices."""
        return list(self._fields.local_ids)

    def local_devices(self) -> list[str]:
        """Returns the names of this client's devices, in the order of `local_device_ids`."""
        return [device.to_string() for device in self._fields.local_devices]

    def num_local_devices(self) -> int:
        """Returns how many of the devices are this client's."""
        return len(self._fields.local_devices)

    def is_remote(self) -> bool:
        """Returns whether all devices belong to other clients."""
        return bool(self._fields.dims) and not self._fields.local_ids

    def coords(self, device_idx: int) -> NDArray[np.int64]:
        """Returns where a device lies: its index along each dimension, as an array.

        Args:
            device_idx: The device's position in the mesh, from 0 to `size - 1`.

        Raises:
            MeshError: There is no such position.
        """
        return np.array(self.device_location(device_idx), np.int64)

    def device_location(self, offset: int) -> list[int]:
        """Returns where a device lies: its index along each dimension, as a list.

        Args:
            offset: The device's position in the mesh, from 0 to `size - 1`.

        Raises:
            MeshError: There is no such position.
        """
        position = _integer(offset, "a position in a mesh")
        if not 0 <= position < self.size:
            raise MeshError(
                f"there is no position {position} in a mesh of {self.size} devices; they count from 0"
            )
        return [position // stride % size for stride, size in zip(self.strides, self.shape(), strict=True)]

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Returns where each device lies, by position: `{0: {"x": 0, "y": 0}, 1: {"x": 0, "y": 1}, ...}`."""
        return {offset: self._named_location(offset) for offset in range(self.size)}

    def local_device_locations(self) -> list[dict[str, int]]:
        """Returns where each of this client's devices lies, in the order of `local_device_ids`."""
        return [self._named_location(i - self._fields.first_id) for i in self._fields.local_ids]

    def _named_location(self, offset: int) -> dict[str, int]:
        return dict(zip(self.dim_names, self.device_location(offset), strict=True))

    def host_mesh(self) -> Mesh:
        """Returns the mesh of the CPU devices beside this mesh's devices: the same but for type and name."""
        fields = self._fields
        if fields.empty:
            return self
        if fields.single_device is not None:
            return Mesh._of(MeshFields(single_device=_on_cpu(fields.single_device)))
        return Mesh._of(
            MeshFields(
                dims=fields.dims,
                first_id=fields.first_id,
                local_ids=fields.local_ids,
                local_devices=tuple(map(_on_cpu, fields.local_devices)),
                global_devices=tuple(map(_on_cpu, fields.global_devices)),
            ).check()
        )

    # Clients ------------------------------------------------------------------------------------------------

    def client_ranks(self) -> tuple[int, ...]:
        """Returns the ids of the clients that have devices in the mesh, in ascending order.

        Raises:
            MeshError: The mesh does not say whose the other clients' devices are.
        """
        return client_ranks(self._fields)

    def group(self, axis: str) -> Group:
        """Returns the group of clients that lie along a dimension of the mesh, for collectives among them.

        They are the clients whose devices share all other coordinates with this client's devices, in the
        order of the dimension. On a 4x2 mesh ("batch", "model") of four clients with two devices each,
        `group("batch")` has all four, and `group("model")` only this one. All clients of the mesh can make
        the group, each gets its own.

        Args:
            axis: The dimension's name.

        Raises:
            MeshError: There is no such dimension; this client has no device in the mesh; or the dimension
                cuts through a client in a way that makes several groups of clients.
            NotInitializedError: `initialize_accelerator_system` was not called.
        """
        position = self.dim_names.index(self[axis].name)
        state = context.current()
        me = this_client()
        ranks = self._groups.get((axis, me))
        if ranks is None:
            ranks = group_along(self._fields, position, me.client_id, me.num_clients, me.job)
            self._groups[axis, me] = ranks
            self._announce()
        from dmesh.collectives.communicator import Communicator  # loaded by now; it is large

        return state.get(Communicator).mesh_group(self.fingerprint, axis, ranks)

    def _announce(self) -> None:
        """Tells people who look at the cluster of this mesh, if there is one."""
        from dmesh.coordination.agent_source import opened_agent  # likewise

        agent = opened_agent()
        if agent is not None:
            me = this_client()
            agent.announce_mesh(describe(self._fields, me.job, me.client_id))

    # The value ----------------------------------------------------------------------------------------------

    def to_string(self) -> str:
        """Returns the mesh as a string, in TensorFlow's form; `from_string` reads it."""
        return format_mesh(self._fields)

    def as_proto(self) -> layout_pb2.MeshProto:
        """Returns the mesh as a message with the fields of TensorFlow's; `from_proto` reads it."""
        return write_mesh(self._fields)

    def __eq__(self, other: object) -> bool:
        return self._fields == other._fields if isinstance(other, Mesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields)

    def __repr__(self) -> str:
        return f"Mesh.from_string({self.to_string()})"

    def _repr_html_(self) -> str:
        return draw_mesh(self._fields)

    def __reduce__(self) -> tuple[Callable[[str], Mesh], tuple[str]]:
        return Mesh.from_string, (self.to_string(),)


def _first_of(ids: object) -> int:
    """Returns the first of ids that count up one by one."""
    if not isinstance(ids, np.ndarray):
        raise MeshError(
            f"global_device_ids must be a NumPy array, got {_kind(ids)}; numpy.arange(n) makes one"
        )
    if ids.size == 0:
        raise MeshError("global_device_ids must not be empty; a mesh has at least one device")
    if ids.dtype.kind not in "iu":
        raise MeshError(f"global_device_ids must be an array of integers, got {ids.dtype}")
    flat = ids.ravel()
    first = int(flat[0])
    if not 0 <= first < _MOST_IDS or not np.array_equal(flat, np.arange(first, first + flat.size)):
        shown = np.array2string(flat, threshold=8)
        raise MeshError(
            f"global_device_ids must count up one by one, row by row, from 0 or more; got {shown}"
        )
    return first


def _specs(devices: object, what: str) -> tuple[DeviceSpec, ...]:
    if not isinstance(devices, list):
        raise MeshError(f"{what} must be a list of DeviceSpec or of device names, got {_kind(devices)}")
    return tuple(_spec(device, what) for device in devices)


def _spec(device: object, what: str) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str):
        raise MeshError(f"{what} must be DeviceSpec or device names, got {_kind(device)}")
    try:
        return DeviceSpec.from_string(device)
    except DeviceError as error:
        raise MeshError(f"{what}: {error}") from error


def _on_cpu(device: DeviceSpec) -> DeviceSpec:
    return device.replace(device_type="CPU")


def _integer(value: object, what: str) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # whether it is an index is the question
    except TypeError:
        raise MeshError(f"{what} must be an integer, got {value!r:.200}") from None


def _kind(value: object) -> str:
    return type(value).__name__

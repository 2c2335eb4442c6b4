"""The `Layout`: an immutable value that says how an array is cut over a mesh."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dmesh.errors import LayoutError, MeshError
from dmesh.layout.kinds import MATCH, UNSHARDED, LayoutType
from dmesh.layout.proto import read_layout, write_layout
from dmesh.layout.text import format_layout, parse_layout
from dmesh.mesh import Mesh
from dmesh.mesh.drawing import draw_mesh

if TYPE_CHECKING:
    from dmesh.mesh.proto import Serializable
    from dmesh.v1 import layout_pb2

_MOST_DIMENSIONS = 64
"""More than NumPy's arrays can have."""


class Layout:
    """Distribution of an array over the devices of a mesh.

    For each dimension of the array, the layout names the dimension of the mesh along which it is cut into
    equal shards, or says `UNSHARDED`. Over mesh dimensions that the layout does not name, shards are
    replicated. Layouts are immutable values, equal if their specs, types and meshes are.

    With a 3x2 mesh of dimensions `x` and `y`, `Layout(["x", UNSHARDED], mesh)` cuts a 6x4 array into three
    shards of shape 2x4, and both devices along `y` have the same one.

    ```python
    with dmesh.session():
        mesh = dmesh.create_distributed_mesh([("x", dmesh.num_global_devices("CPU"))])
        rows = dmesh.Layout(["x", dmesh.UNSHARDED], mesh)
        assert rows.num_shards(0) == mesh.dim_size("x")
    ```

    Args:
        sharding_specs: For each dimension of the array the name of a mesh dimension, `UNSHARDED` or `MATCH`.
        mesh: The mesh.

    Raises:
        LayoutError: A spec is not a dimension of the mesh, or appears twice.
    """

    __slots__ = ("_mesh", "_specs", "_type")
    _specs: tuple[str, ...]
    _mesh: Mesh
    _type: LayoutType

    def __init__(self, sharding_specs: Sequence[str], mesh: Mesh) -> None:
        self._mesh = _checked_mesh(mesh)
        if mesh.is_single_device() or mesh.size == 0:
            raise LayoutError(
                "sharding specs need a mesh with dimensions; for a single device use "
                "Layout.from_single_device_mesh()"
            )
        self._specs = _checked_specs(sharding_specs, mesh)
        self._type = LayoutType.STATIC

    # Other ways to make one ---------------------------------------------------------------------------------

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Makes a layout in which every device has the whole array.

        Args:
            mesh: The mesh.
            rank: Number of the array's dimensions.

        Raises:
            LayoutError: An argument is not usable.
        """
        return cls([UNSHARDED] * _checked_rank(rank), mesh)

    @classmethod
    def batch_sharded(cls, mesh: Mesh, batch_dim: str, rank: int, axis: int = 0) -> Layout:
        """Makes a layout that cuts one dimension of the array.

        Args:
            mesh: The mesh.
            batch_dim: The mesh dimension along which it is cut.
            rank: Number of the array's dimensions.
            axis: Which of them is cut; counted from the end if negative.

        Raises:
            LayoutError: An argument is not usable.
        """
        specs = [UNSHARDED] * _checked_rank(rank)
        specs[_checked_axis(axis, rank)] = batch_dim
        return cls(specs, mesh)

    @classmethod
    def inner_sharded(cls, mesh: Mesh, inner_dim: str, rank: int) -> Layout:
        """Makes a layout that cuts the last dimension of the array.

        Args:
            mesh: The mesh.
            inner_dim: The mesh dimension along which it is cut.
            rank: Number of the array's dimensions.

        Raises:
            LayoutError: An argument is not usable.
        """
        return cls.batch_sharded(mesh, inner_dim, rank, axis=-1)

    @classmethod
    def from_single_device_mesh(cls, mesh: Mesh) -> Layout:
        """Makes the layout in which a single device has the whole array.

        Args:
            mesh: A mesh of one device without dimensions, as `Mesh.from_device` makes it.

        Raises:
            LayoutError: It is another kind of mesh.
        """
        if not _checked_mesh(mesh).is_single_device():
            raise LayoutError(
                f"mesh {mesh.name!r} has dimensions; from_single_device_mesh() needs one made by "
                "Mesh.from_device()"
            )
        return cls._of((), mesh, LayoutType.SINGLE_DEVICE)

    @classmethod
    def from_device(cls, device: str) -> Layout:
        """Makes the layout in which a single device has the whole array.

        Args:
            device: The device's full name, such as `/job:localhost/replica:0/task:0/device:CPU:0`.

        Raises:
            MeshError: It is not a device's full name.
        """
        return cls.from_single_device_mesh(Mesh.from_device(device))

    @classmethod
    def from_string(cls, layout_str: str) -> Layout:
        """Reads what `to_string` wrote, or what TensorFlow did.

        Raises:
            LayoutError: The string is malformed, or what it says is not a valid layout.
        """
        if not isinstance(layout_str, str):
            raise LayoutError(f"a layout string must be a str, got {type(layout_str).__name__}")
        try:
            return cls._from_parts(*parse_layout(layout_str))
        except (LayoutError, MeshError) as error:
            raise LayoutError(f"cannot read the layout string {layout_str!r:.200}: {error}") from error

    @classmethod
    def from_proto(cls, layout_proto: Serializable) -> Layout:
        """Reads what `as_proto` wrote.

        Args:
            layout_proto: A `LayoutProto`, of `dmesh.v1.layout_pb2` or of TensorFlow.

        Raises:
            LayoutError: It is not such a message, or what it says is not a valid layout.
        """
        try:
            return cls._from_parts(*read_layout(layout_proto))
        except (LayoutError, MeshError) as error:
            raise LayoutError(f"cannot read the layout message: {error}") from error

    @classmethod
    def _from_parts(cls, specs: Sequence[str], mesh: Mesh, kind: LayoutType) -> Layout:
        """Creates a layout from its serialized fields, after validating them."""
        if kind is LayoutType.SINGLE_DEVICE:
            if specs:
                raise LayoutError("the layout of a single device has no sharding specs")
            return cls.from_single_device_mesh(mesh)
        layout = cls(specs, mesh)
        return layout if kind is LayoutType.STATIC else layout.to_parted()

    @classmethod
    def _of(cls, specs: tuple[str, ...], mesh: Mesh, kind: LayoutType) -> Layout:
        layout = object.__new__(cls)
        layout._specs, layout._mesh, layout._type = specs, mesh, kind
        return layout

    def to_parted(self) -> Layout:
        """Returns this layout as a parted one.

        Raises:
            LayoutError: It is a single device's.
        """
        if self._type is LayoutType.SINGLE_DEVICE:
            raise LayoutError("the layout of a single device has no sharding, so it has no parted form")
        return Layout._of(self._specs, self._mesh, LayoutType.PARTED)

    def delete(self, dims: int | Sequence[int]) -> Layout:
        """Returns the layout of the array without some of its dimensions.

        Args:
            dims: Which dimensions to drop, one or several; counted from the end if negative.

        Raises:
            LayoutError: There is no such dimension.
        """
        chosen = dims if isinstance(dims, Sequence) else [dims]
        dropped = {_checked_axis(dim, self.rank) for dim in chosen}
        return Layout([spec for index, spec in enumerate(self._specs) if index not in dropped], self._mesh)

    # What it says -------------------------------------------------------------------------------------------

    @property
    def sharding_specs(self) -> list[str]:
        """For each dimension of the array a mesh dimension, `UNSHARDED` or `MATCH`."""
        return list(self._specs)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._mesh

    @property
    def rank(self) -> int:
        """Number of the array's dimensions; 0 in the layout of a single device, which fits any array."""
        return len(self._specs)

    @property
    def shape(self) -> list[int]:
        """Shape of the mesh."""
        return self._mesh.shape()

    @property
    def type(self) -> LayoutType:
        """Kind of the layout."""
        return self._type

    def num_shards(self, idx: int) -> int:
        """Returns into how many shards a dimension of the array is cut.

        Args:
            idx: Which dimension; counted from the end if negative.

        Raises:
            LayoutError: There is no such dimension, or its spec is `MATCH`, so that it is not known.
        """
        spec = self._specs[_checked_axis(idx, self.rank)]
        if spec == MATCH:
            raise LayoutError(f"dimension {idx} of {self!r:.200} is MATCH: its sharding depends on the array")
        return 1 if spec == UNSHARDED else self._mesh.dim_size(spec)

    def is_fully_replicated(self) -> bool:
        """Returns whether no dimension is sharded, not even over a mesh dimension of size 1."""
        return not self.is_single_device() and all(spec == UNSHARDED for spec in self._specs)

    def is_batch_parallel(self) -> bool:
        """Returns whether the first dimension of the array is sharded and no other."""
        return bool(self._specs) and self._specs[0] != UNSHARDED and set(self._specs[1:]) <= {UNSHARDED}

    def is_single_device(self) -> bool:
        """Returns whether the whole array is on one device."""
        return self._type is LayoutType.SINGLE_DEVICE

    # Shapes and places --------------------------------------------------------------------------------------

    def global_shape_from_local_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole array from that of one shard.

        Args:
            local_shape: The shard's shape.

        Raises:
            LayoutError: It has another number of dimensions than the layout, or a size is negative.
        """
        shape = self._checked_shape(local_shape, "local")
        if self.is_single_device():
            return shape
        return tuple(size * self.num_shards(index) for index, size in enumerate(shape))

    def local_shape_from_global_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one shard from that of the whole array.

        Args:
            global_shape: The whole array's shape.

        Raises:
            LayoutError: It has another number of dimensions than the layout, or a size cannot be cut evenly.
        """
        shape = self._checked_shape(global_shape, "global")
        if self.is_single_device():
            return shape
        for index, size in enumerate(shape):
            shards = self.num_shards(index)
            if size % shards:
                raise LayoutError(
                    f"dimension {index} of the global shape {shape} has size {size}, which cannot be "
                    f"split into the {shards} equal shards of mesh dimension {self._specs[index]!r}; "
                    f"pad it to {-(-size // shards) * shards}, or use UNSHARDED"
                )
        return tuple(size // self.num_shards(index) for index, size in enumerate(shape))

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Returns which shard each device has, by the device's position in the mesh.

        A shard is named by its index along each dimension of the array.

        Raises:
            LayoutError: A spec is `MATCH`.
        """
        axes = [
            None if self.num_shards(i) and spec == UNSHARDED else spec for i, spec in enumerate(self._specs)
        ]
        if self.is_single_device():
            return [()]
        names = self._mesh.dim_names
        positions = [None if axis is None else names.index(axis) for axis in axes]
        return [
            tuple(0 if position is None else location[position] for position in positions)
            for location in itertools.product(*(range(size) for size in self._mesh.shape()))
        ]

    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Returns a shard's number among all shards, counted row by row.

        Args:
            offset_tuple: The shard's index along each dimension of the array, as in `offset_to_shard`.

        Raises:
            LayoutError: There is no such shard.
        """
        counts = [self.num_shards(index) for index in range(self.rank)]
        indices = tuple(_checked_integer(index, "a shard's index") for index in offset_tuple)
        if len(indices) != self.rank or any(not 0 <= i < n for i, n in zip(indices, counts, strict=False)):
            raise LayoutError(
                f"there is no shard {indices}: this layout cuts arrays of {self.rank} dimensions into "
                f"{counts} shards, counted from 0"
            )
        return sum(index * math.prod(counts[axis + 1 :]) for axis, index in enumerate(indices))

    def _checked_shape(self, shape: Sequence[int], what: str) -> tuple[int, ...]:
        sizes = tuple(_checked_integer(size, f"a size in the {what} shape") for size in shape)
        if not self.is_single_device() and len(sizes) != self.rank:
            raise LayoutError(
                f"the {what} shape {sizes} has {len(sizes)} dimensions, but the layout is for {self.rank}: "
                f"{list(self._specs)}"
            )
        if any(size < 0 for size in sizes):
            raise LayoutError(f"the {what} shape {sizes} has a negative size")
        return sizes

    # The value ----------------------------------------------------------------------------------------------

    def to_string(self) -> str:
        """Returns the layout as a string, in TensorFlow's form; `from_string` reads it."""
        return format_layout(self._specs, self._mesh, self._type)

    def as_proto(self) -> layout_pb2.LayoutProto:
        """Returns the layout as a message with the fields of TensorFlow's; `from_proto` reads it."""
        return write_layout(self._specs, self._mesh, self._type)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self._type, self._specs, self._mesh) == (other._type, other._specs, other._mesh)

    def __hash__(self) -> int:
        return hash((self._type, self._specs, self._mesh))

    def __repr__(self) -> str:
        return f"Layout.from_string({self.to_string()})"

    def _repr_html_(self) -> str:
        title = f"Layout [{', '.join(self._specs)}]" if self._specs else "Layout of a whole array"
        title += f" on mesh {self._mesh.name!r}" if self._mesh.name else ""
        names = self._mesh.dim_names
        axes = [names.index(spec) if spec in names else None for spec in self._specs]

        def shard(position: int) -> str:
            location = self._mesh.device_location(position)
            return f"shard {tuple(0 if axis is None else location[axis] for axis in axes)}"

        return draw_mesh(self._mesh._fields, title, shard if axes and MATCH not in self._specs else None)

    def __reduce__(self) -> tuple[Callable[[str], Layout], tuple[str]]:
        return Layout.from_string, (self.to_string(),)


def _checked_mesh(mesh: Mesh) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise LayoutError(f"a layout needs a Mesh, got {type(mesh).__name__}: {mesh!r:.200}")
    return mesh


def _checked_specs(specs: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    if isinstance(specs, str) or not isinstance(specs, Sequence):
        raise LayoutError(
            f"sharding_specs must be a list with one entry for each dimension, got {specs!r:.200}"
        )
    _checked_rank(len(specs))
    for spec in specs:
        if not isinstance(spec, str) or (spec not in (UNSHARDED, MATCH) and spec not in mesh):
            raise LayoutError(
                f"{spec!r:.200} is not a dimension of the mesh; expected {', '.join(mesh.dim_names)} or "
                "UNSHARDED"
            )
        if spec not in (UNSHARDED, MATCH) and list(specs).count(spec) > 1:
            raise LayoutError(
                f"mesh dimension {spec!r} appears twice in {list(specs)}; an array can be sharded along "
                "it only once"
            )
    return tuple(specs)


def _checked_rank(rank: int) -> int:
    if not 0 <= _checked_integer(rank, "rank") <= _MOST_DIMENSIONS:
        raise LayoutError(f"rank is {rank}; an array has 0 to {_MOST_DIMENSIONS} dimensions")
    return rank


def _checked_axis(axis: int, rank: int) -> int:
    index = _checked_integer(axis, "a dimension")
    if not -rank <= index < rank:
        counted = f"which count from 0 to {rank - 1}" if rank else "so there is none to name"
        raise LayoutError(f"there is no dimension {axis} in a layout of {rank} dimensions, {counted}")
    return index % rank


def _checked_integer(value: int, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{what} must be an integer, got {value!r:.200}") from None

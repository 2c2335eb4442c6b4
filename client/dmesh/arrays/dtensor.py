"""`DTensor`: a NumPy array on the devices of a mesh, sharded or replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh._lazy_imports import load
from dmesh.arrays import ledger
from dmesh.arrays.dispatch.registry import FUNCTIONS, HOOKS, name_of, refuse
from dmesh.arrays.operators import Operators
from dmesh.arrays.policy import check_gather
from dmesh.arrays.spec import WHOLE, Spec
from dmesh.arrays.transfer.execute import run_exchange
from dmesh.arrays.transfer.mapping import Exchange
from dmesh.arrays.transfer.plan import Reduce, plan
from dmesh.errors import MeshMismatchError, UnshardableError
from dmesh.layout import Layout
from dmesh.mesh import Mesh

Shards = tuple[NDArray[Any], ...]
API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")
"""Versions of the Python array API that `dmesh.array_api` has, the newest one last."""


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> DTensor:
    """Call a NumPy function that returns a sharded array."""
    result: DTensor = function(*args, **kwargs)
    return result


class DTensor(Operators):
    """NumPy array on the devices of a mesh, sharded or replicated.

    NumPy's functions and operators take it and return sharded arrays (docs/arrays.md). All clients of the
    mesh must call the same operations in the same order. The functions of `dmesh` create arrays:
    `copy_to_mesh`, `zeros`, `arange`, `from_function`, `from_local`.

    Args:
        spec: Its placement.
        shards: This client's blocks, one for each slot of the spec; None for an array without elements, in
            `explain`.
    """

    __slots__ = ("_memo", "_owned", "_shards", "_spec")
    _spec: Spec
    _shards: Shards | None
    _owned: bool  # whether the shards may be written to, because nothing else uses their memory
    _memo: DTensor | None  # the complete array, after contributions were reduced

    def __init__(self, spec: Spec, shards: Shards | None) -> None:
        self._spec = spec
        self._shards = shards
        self._owned = False
        self._memo = None

    # Properties ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """Placement."""
        return self._spec

    @property
    def layout(self) -> Layout:
        """Layout. Unreduced contributions are not in it; see `partial`."""
        return self._spec.layout

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._spec.grid.mesh

    @property
    def device(self) -> Mesh:
        """The mesh: the device in the sense of the Python array API."""
        return self.mesh

    def to_device(self, device: Mesh | Layout, /, *, stream: Any = None) -> DTensor:
        """Return the array in another layout of its mesh; the array itself if `device` is its mesh.

        Args:
            device: A layout, or the mesh of the array.
            stream: Must be None.

        Raises:
            LayoutError: The layout does not fit the array.
            MeshMismatchError: `device` is another mesh, or a layout on another mesh.
        """
        if stream is not None:
            raise ValueError(f"to_device() has no streams, got stream={stream!r:.100}")
        if device in (self.mesh, self.layout):
            return self
        if not isinstance(device, Layout):
            raise MeshMismatchError(
                f"to_device() moves an array within its own mesh, {self.mesh!r:.200}, not to "
                f"{device!r:.200}. Use dmesh.copy_to_mesh(x.full(), layout)"
            )
        return HOOKS["relayout"](self, device, uneven=True)  # type: ignore[no-any-return]

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        if api_version is not None and api_version not in API_VERSIONS:
            raise ValueError(
                f"dmesh.array_api is version {API_VERSIONS[-1]} of the standard, not {api_version!r}"
            )
        return load("dmesh.array_api")

    @property
    def partial(self) -> tuple[str, ...]:
        """Mesh dimensions along which the devices hold unreduced contributions."""
        return tuple(self._spec.grid.names[axis] for axis in self._spec.partial)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._spec.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._spec.ndim

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return self._spec.size

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._spec.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self._spec.size * self._spec.dtype.itemsize

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self) -> str:
        return HOOKS["repr"](self)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        return HOOKS["html"](self)  # type: ignore[no-any-return]

    def __copy__(self) -> DTensor:
        return self.copy()

    def __deepcopy__(self, memo: object) -> DTensor:
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise UnshardableError(
            "a sharded array cannot be pickled, because this process has only this client's blocks: send "
            "x.full(), or save it with dmesh.checkpoint.save"
        )

    # Elements -----------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> Shards:
        """This client's blocks, by slot, read-only: later writes to the array copy them first.

        Raises:
            UnshardableError: The array has no elements, within `explain`.
        """
        if self._shards is None:
            raise UnshardableError(
                f"{ledger.current_operation('this operation')} depends on the elements of an array, so "
                "dmesh.explain cannot explain it"
            )
        self._owned = False
        return self._shards

    def to_local(self) -> list[NDArray[Any]]:
        """Return this client's blocks as read-only views, one for each of its devices, in their order.

        Unreduced contributions are reduced first.
        """
        whole = move(self, self._spec.complete())
        views = []
        for slot in whole.spec.slot_of:
            view = whole.blocks[slot].view()
            view.flags.writeable = False
            views.append(view)
        return views

    def full(self) -> NDArray[Any]:
        """Return a copy of the whole array on every client, as a NumPy array."""
        with ledger.operation("full"):
            return move(self, self._spec.replicated()).blocks[0].copy()

    def numpy(self) -> NDArray[Any]:
        """Return a replicated array as a NumPy array, like TensorFlow's `numpy()`.

        Raises:
            ImplicitGatherError: The array is sharded, and the policy forbids gathering it.
        """
        return self.__array__()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a sharded array cannot become a NumPy array without a copy")
        with ledger.operation("np.asarray"):
            target = self._spec.replicated()
            check_gather("np.asarray", self._spec, target)
            found = move(self, target).blocks[0].copy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if copy is False:
            raise BufferError("a sharded array cannot be exported without a copy")
        given = {"stream": stream, "max_version": max_version, "dl_device": dl_device}
        found: Any = self.__array__()
        return found.__dlpack__(**{key: value for key, value in given.items() if value is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the memory of the host

    def item(self, *index: Any) -> Any:
        """Return an element as a Python scalar, on every client."""
        one = self
        if index:
            place = index[0] if len(index) == 1 else index
            if not isinstance(place, tuple):
                if not -self.size <= place < self.size:
                    raise IndexError(f"index {place} is out of bounds for size {self.size}")
                place = tuple(int(i) for i in np.unravel_index(place % self.size, self.shape))
            one = self[place]
        if one.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        with ledger.operation("item"):
            return move(one, one._spec.replicated()).blocks[0].item()

    def tolist(self) -> NoReturn:
        """Raise UnshardableError: it would gather the whole array, as `x.full().tolist()` does."""
        raise UnshardableError("tolist() would gather the whole array. Use x.full().tolist() to do so")

    def __iter__(self) -> Iterator[DTensor]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        with ledger.operation("iteration"):
            target = self._spec.complete().replace(axes=(WHOLE, *self._spec.axes[1:]))
            check_gather("iteration", self._spec, target)
            whole = move(self, target)
        return (whole[at] for at in range(self.shape[0]))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __getitem__(self, index: Any) -> DTensor:
        return HOOKS["getitem"](self, index)  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        HOOKS["setitem"](self, index, value)

    def replace_with(self, other: DTensor) -> None:
        """Adopt the blocks of an array of the same placement: the last step of operations in place."""
        assert other._spec is self._spec
        self._shards, self._owned, self._memo = other._shards, other._owned, None
        other._owned = False

    def writable(self) -> Shards:
        """Return this client's blocks for writing, after a copy if anything else may use their memory."""
        if not self._owned:
            self._shards = tuple(block.copy() for block in self.blocks)
            self._owned = True
        self._memo = None
        assert self._shards is not None
        return self._shards

    def alias(self) -> DTensor:
        """Return another array with the same blocks; writing to either copies them first."""
        return DTensor(self._spec, None if self._shards is None else self.blocks)

    # NumPy's protocols --------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return HOOKS["ufunc"](ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if any(getattr(kind, "stands_for_array", False) for kind in types):
            return NotImplemented  # the other argument replaces itself by its array, and calls again
        handler = FUNCTIONS.get(func)
        if handler is None:
            refuse(func)
        with ledger.operation(f"np.{name_of(func)}"):
            return handler(*args, **kwargs)

    # Methods ------------------------------------------------------------------------------------------------

    @property
    def T(self) -> DTensor:
        """The array with its dimensions in reverse order."""
        return _call(np.transpose, self)

    @property
    def mT(self) -> DTensor:
        """The array with its last two dimensions exchanged."""
        if self.ndim < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")
        return _call(np.swapaxes, self, -1, -2)

    @property
    def real(self) -> DTensor:
        """Real part."""
        return _call(np.real, self)

    @property
    def imag(self) -> DTensor:
        """Imaginary part."""
        return _call(np.imag, self)

    def astype(
        self, dtype: DTypeLike, order: str = "K", casting: str = "unsafe", copy: bool = True
    ) -> DTensor:
        """Return the array with another dtype."""
        del order, copy
        return HOOKS["astype"](self, np.dtype(dtype), casting)  # type: ignore[no-any-return]

    def copy(self, order: str = "C") -> DTensor:
        """Return a copy."""
        del order
        return _call(np.copy, self)

    def reshape(self, *shape: Any, order: str = "C") -> DTensor:
        """Return the array with another shape; see `numpy.reshape`."""
        lengths = shape[0] if len(shape) == 1 else shape
        return _call(np.reshape, self, lengths, order=order)

    def transpose(self, *axes: Any) -> DTensor:
        """Return the array with its dimensions in another order; see `numpy.transpose`."""
        order = axes[0] if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], Sequence)) else axes
        return _call(np.transpose, self, order or None)

    def fill(self, value: Any) -> None:
        """Set all elements."""
        self[...] = value

    def dot(self, other: Any) -> DTensor:
        """Return `numpy.dot` of the two arrays."""
        return _call(np.dot, self, other)


def move(x: DTensor, target: Spec) -> DTensor:
    """Return the array in another placement of the same shape and dtype; itself if it has that placement.

    Contributions are reduced only once: the complete array is kept for later calls.
    """
    spec = x._spec
    if spec is target:
        return x
    source = x if x._memo is None else x._memo
    shards = None if source._shards is None else source.blocks
    now = source._spec
    if now is target:
        return DTensor(now, shards)
    for step in plan(now, target):
        if ledger.is_tracing():
            ledger.record(
            f"{step.kind} {step.source.describe()} -> {step.target.describe()}", step.kind,
            step.bytes_by_client(), step.target.largest, "relayout",
        )  # fmt: skip
        if shards is not None:
            shards = step.run(shards)
        now = step.target
        if isinstance(step, Reduce) and not now.partial:
            x._memo = DTensor(now, shards)
    return DTensor(now, shards)


def exchange(x: DTensor, mapping: Exchange, target: Spec, into: DTensor | None = None) -> DTensor:
    """Move an array's elements according to a mapping.

    Args:
        x: The source.
        mapping: The mapping.
        target: Placement of the target.
        into: Array to write to, whose other elements stay; None for a new one.
    """
    itemsize = x.dtype.itemsize
    if ledger.is_tracing():
        ledger.record(
        f"exchange {x.spec.describe()} -> {target.describe()}", "exchange",
        {client: n * itemsize for client, n in mapping.moved.items()}, target.largest, "exchange",
    )  # fmt: skip
    if x._shards is None or (into is not None and into._shards is None):
        return DTensor(target, None)
    blocks = run_exchange(mapping, x.blocks, x.dtype, None if into is None else into.writable())
    return DTensor(target, blocks) if into is None else into


def read(x: Any) -> Any:
    """Return the value of a variable that stands for an array; anything else as it is."""
    return x.value() if getattr(type(x), "stands_for_array", False) else x


def is_dtensor(x: ArrayLike | DTensor) -> bool:
    """Return whether something is a sharded array, or a `DVariable`, which holds one."""
    return isinstance(read(x), DTensor)

"""`DVariable`: a variable with a sharded array as its value, and a fixed layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.arrays import ledger
from dmesh.arrays.dispatch.operands import is_scalar
from dmesh.arrays.dispatch.ufunc import astype, store
from dmesh.arrays.dtensor import DTensor, move, read
from dmesh.arrays.transfer.functions import copy_to_mesh, relayout
from dmesh.errors import ArgumentTypeError, LayoutError, UnshardableError
from dmesh.layout import Layout
from dmesh.structure import map_structure


class DVariable(NDArrayOperatorsMixin):
    """Variable with a sharded array as its value; TensorFlow's `tf.experimental.dtensor.DVariable`.

    Operators, NumPy's functions and an array's methods use its value. A value that was read before an
    assignment does not change.

    ```python
    w = dmesh.DVariable(dmesh.zeros((4, 3), layout=dmesh.Layout(["x", dmesh.UNSHARDED], mesh)))
    w.assign_sub(0.1 * (w + 1))
    ```

    Args:
        initial_value: A sharded array; or an array that is equal on all clients, with `layout`; or a function
            that returns one of them.
        dtype: Type of the elements; None for that of the initial value.
        layout: Its layout; None for the initial value's.
        trainable: Stored, as in TensorFlow; dmesh does not use it.
        name: Name for display.

    Raises:
        LayoutError: There is no layout, or it differs from the initial value's.
    """

    stands_for_array = True
    __slots__ = ("_value", "name", "trainable")
    __hash__ = None  # type: ignore[assignment]  # like arrays

    def __init__(
        self,
        initial_value: ArrayLike | DTensor | Callable[[], Any],
        dtype: DTypeLike | None = None,
        *,
        layout: Layout | None = None,
        trainable: bool = True,
        name: str | None = None,
    ) -> None:
        value = initial_value() if callable(initial_value) else initial_value
        value = read(value)
        if isinstance(value, DTensor):
            if layout is not None and value.layout != layout:
                raise LayoutError(
                    f"DVariable got layout {layout.sharding_specs}, and an initial value of layout "
                    f"{value.layout.sharding_specs}. Omit layout=, or call dmesh.relayout on the value first"
                )
            value = relayout(value, value.layout, uneven=True)
        elif layout is None:
            raise LayoutError("DVariable needs a layout: pass layout=, or a sharded array as initial value")
        else:
            value = copy_to_mesh(np.asarray(value, dtype), layout)
        self._value: DTensor = (
            value if dtype is None or value.dtype == dtype else astype(value, np.dtype(dtype))
        )
        self.name = name
        """Name for display."""
        self.trainable = trainable
        """Stored, as in TensorFlow; dmesh does not use it."""

    # Properties ---------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Layout. Assignments do not change it."""
        return self._value.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self._value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._value.dtype

    def value(self) -> DTensor:
        """Return the value, an array that later assignments do not change."""
        return self._value.alias()

    read_value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value(), name)  # attributes and methods of the array

    def __repr__(self) -> str:
        return f"DVariable({'' if self.name is None else f'{self.name!r}, '}{self._value!r})"

    def __getitem__(self, index: Any) -> DTensor:
        return self._value[index]

    def __iter__(self) -> Iterator[DTensor]:
        return iter(self.value())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self._value.__array__(dtype, copy)

    def __len__(self) -> int:
        return len(self._value)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __float__(self) -> float:
        return float(self._value)

    # Assignments --------------------------------------------------------------------------------------------

    def assign(
        self,
        value: DTensor | DVariable | float,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> DVariable:
        """Set the value; an array of another layout is brought to the variable's.

        Args:
            value: A sharded array of the variable's shape and dtype, or a number for all elements.
            use_locking: Kept for TensorFlow's sake, as the next ones are.
            name: No effect.
            read_value: No effect.

        Returns:
            The variable.

        Raises:
            ArgumentTypeError: The value has another dtype.
            UnshardableError: The value is a plain array.
            ValueError: The value has another shape.
        """
        del use_locking, name, read_value
        return self._changed("assign", value, None)

    def assign_add(
        self,
        delta: DTensor | DVariable | float,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> DVariable:
        """Add to the value; see `assign`."""
        del use_locking, name, read_value
        return self._changed("assign_add", delta, np.add)

    def assign_sub(
        self,
        delta: DTensor | DVariable | float,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> DVariable:
        """Subtract from the value; see `assign`."""
        del use_locking, name, read_value
        return self._changed("assign_sub", delta, np.subtract)

    def _changed(self, operation: str, given: Any, ufunc: np.ufunc | None) -> DVariable:
        value = read(given)
        with ledger.operation(f"DVariable.{operation}"):
            if is_scalar(value):
                if ufunc is None:
                    self._value[...] = value
                else:
                    ufunc(self._value, value, out=self._value)
                return self
            if not isinstance(value, DTensor):
                raise UnshardableError(
                    f"DVariable.{operation} takes a sharded array or a number, got {type(value).__name__}. "
                    "Make it a sharded array with dmesh.copy_to_mesh(x, variable.layout)"
                )
            if value.shape != self.shape:
                raise ValueError(
                    f"cannot {operation} shape {value.shape} to a variable of shape {self.shape}"
                )
            if value.dtype != self.dtype:
                raise ArgumentTypeError(
                    f"cannot {operation} {value.dtype} to a variable of {self.dtype}: "
                    "value.astype(...) converts"
                )
            there = move(value, self._value.spec)  # an explicit move, no implicit gather
            store(there if ufunc is None else ufunc(self._value, there), self._value, "no")
        return self

    # NumPy's protocols --------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, DVariable) for one in kwargs.get("out", ())):
            raise UnshardableError(f"out= of np.{ufunc.__name__} is no variable: assign() sets its value")
        values, options = map_structure(read, inputs), map_structure(read, kwargs)
        return getattr(ufunc, method)(*values, **options)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return func(*map_structure(read, args), **map_structure(read, kwargs))

"""Variables: arrays that are assigned to. In a strategy's scope they become replicated ones."""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from dmesh._locks import Lock
from dmesh.devices.device import DeviceSpec, this_client
from dmesh.distribute import scopes
from dmesh.distribute.array_operators import ArrayOperators
from dmesh.distribute.base import StrategyBase
from dmesh.distribute.combining import Array, as_value, frozen
from dmesh.distribute.reduce_op import VariableAggregation, VariableSynchronization
from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["Variable"]


class _Replicated(ABCMeta):
    """Creates the current strategy's kind of variable, where there is a strategy."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Variable and scopes.has_strategy():
            return scopes.frame().strategy.extended.create_variable(args, kwargs)
        return super().__call__(*args, **kwargs)


class Variable(ArrayOperators, metaclass=_Replicated):
    """Array that is assigned as a whole. NumPy accepts it wherever it accepts an array.

    In a strategy's scope this creates a `DistributedVariable`, which exists on all replicas, starts with the
    first client's initial value and is kept in sync. All clients must create the same variables in the same
    order.

    ```python
    step = dmesh.Variable(0, dtype=np.int64, name="step")
    step.assign_add(1)
    assert step + 1 == 2
    ```

    Args:
        initial_value: The initial value, or a function without arguments that returns it.
        trainable: True for a parameter of a model. The default is True, unless it is combined on read: the
            copies of replicas would be trained each by itself.
        name: Name in messages.
        dtype: Dtype of the elements; None for the initial value's.
        constraint: Function that optimizers apply to each new value; stored for them.
        synchronization: Time at which the copies of replicas are combined.
        aggregation: Operation that combines them; None for NONE.

    Raises:
        StrategyValueError: An argument is not valid.
        StrategyTypeError: The value is not an array.
    """

    def __init__(
        self,
        initial_value: ArrayLike | Callable[[], ArrayLike] | None = None,
        trainable: bool | None = None,
        *,
        name: str = "Variable",
        dtype: DTypeLike | None = None,
        constraint: Callable[[Array], Array] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
    ) -> None:
        aggregation = VariableAggregation.NONE if aggregation is None else aggregation
        if not isinstance(synchronization, VariableSynchronization):
            raise StrategyValueError(
                f"variable {name!r}: synchronization must be a VariableSynchronization, got "
                f"{synchronization!r}"
            )
        if not isinstance(aggregation, VariableAggregation):
            raise StrategyValueError(
                f"variable {name!r}: aggregation must be a VariableAggregation, got {aggregation!r}"
            )
        if initial_value is None:
            raise StrategyValueError(f"variable {name!r} needs an initial_value: an array or a function")
        value = as_value(initial_value() if callable(initial_value) else initial_value, f"variable {name!r}")
        self._value = frozen(np.array(value, dtype=dtype))
        self._shape, self._dtype = self._value.shape, self._value.dtype
        self._name = name
        on_read = synchronization is VariableSynchronization.ON_READ
        self._trainable = not on_read if trainable is None else bool(trainable)
        self._constraint = constraint
        self._synchronization = synchronization
        self._aggregation = aggregation
        self._lock = Lock()

    # -- properties ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its dimensions, which never change."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements, which never changes."""
        return self._dtype

    @property
    def device(self) -> str:
        """The name of the device that holds it: this client's first CPU device."""
        job, client, _ = this_client()
        return DeviceSpec(job, 0, client, "CPU", 0).to_string()

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self._shape)

    @property
    def distribute_strategy(self) -> StrategyBase:
        """The strategy in whose scope it was created."""
        return scopes.default_frame().strategy

    @property
    def trainable(self) -> bool:
        """True for a parameter of a model."""
        return self._trainable

    @property
    def constraint(self) -> Callable[[Array], Array] | None:
        """Function that optimizers apply to each new value."""
        return self._constraint

    @property
    def synchronization(self) -> VariableSynchronization:
        """Time at which the copies of replicas are combined: on write or on read."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """Operation that combines the copies."""
        return self._aggregation

    def __repr__(self) -> str:
        return f"<Variable {self._name!r} {self.dtype}{list(self.shape)}: {self._value!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Values are never written to, so copies share them. Each copy has a lock of its own.
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _lock=Lock())
        return twin

    # -- reading ------------------------------------------------------------------------------------

    def read_value(self) -> Array:
        """Return the value; it cannot be written to, and later assignments do not change it."""
        return self._value

    def value(self) -> Array:
        """Return the value, as `read_value` does."""
        return self.read_value()

    def numpy(self) -> Array:
        """Return a copy of the value, which may be written to."""
        return self.read_value().copy()

    # -- assigning ----------------------------------------------------------------------------------

    def assign(
        self, value: ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Give it another value of the same shape.

        Args:
            value: The value.
            use_locking: Without effect: for programs written for TensorFlow, as are the next ones.
            name: Without effect.
            read_value: Without effect.

        Returns:
            The variable.

        Raises:
            StrategyValueError: The value has another shape.
            StrategyTypeError: The value would lose its kind, as 1.5 would as an integer.
        """
        del use_locking, name, read_value
        self._update("assign", _replace, value)
        return self

    def assign_add(
        self, delta: ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Add to it; see `assign`."""
        del use_locking, name, read_value
        self._update("assign_add", np.add, delta)
        return self

    def assign_sub(
        self, delta: ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Subtract from it; see `assign`."""
        del use_locking, name, read_value
        self._update("assign_sub", np.subtract, delta)
        return self

    def _update(self, what: str, how: Callable[[Array, Array], Array], value: Any) -> None:
        checked = self._checked(what, value)
        with self._lock:
            self._value = self._updated(how, self._value, checked)

    def _checked(self, what: str, value: Any) -> Array:
        """Return a value that may be assigned, in the variable's dtype."""
        array = as_value(value, f"{what} of variable {self._name!r}")
        if array.shape != self.shape:
            raise StrategyValueError(
                f"{what} of variable {self._name!r} needs the shape {self.shape}, got {array.shape}"
            )
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise StrategyTypeError(
                f"{what} of variable {self._name!r}, which is {self.dtype}, got {array.dtype}: "
                "convert it first"
            )
        return array.astype(self.dtype, copy=False)

    def _updated(self, how: Callable[[Array, Array], Array], old: Array, value: Array) -> Array:
        """Return the new value, in memory of its own: the old one may be in use."""
        return frozen(np.asarray(how(old, value)).astype(self.dtype, copy=False))


def _replace(old: Array, value: Array) -> Array:
    return np.array(value)

"""Operators of objects that hold an array."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from dmesh.errors import StrategyTypeError

__all__ = ["ArrayOperators"]


class ArrayOperators(NDArrayOperatorsMixin):
    """Base of objects that hold an array, and have its operators."""

    @abstractmethod
    def read_value(self) -> NDArray[Any]:
        """Return the array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is None:  # NumPy 1 knows no None here
            return np.asarray(self.read_value(), dtype=dtype)
        return np.array(self.read_value(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(target, ArrayOperators) for target in kwargs.get("out", ())):
            raise StrategyTypeError(
                f"a {type(self).__name__} cannot be changed in place: variables have assign, assign_add and "
                "assign_sub"
            )
        plain = [item.read_value() if isinstance(item, ArrayOperators) else item for item in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.read_value(), spec) if spec else str(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __len__(self) -> int:
        return len(self.read_value())

    def __bool__(self) -> bool:
        return bool(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __float__(self) -> float:
        return float(self.read_value())

    def __index__(self) -> int:
        return self.read_value().__index__()

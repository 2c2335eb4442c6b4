"""Operators of sharded arrays, conversions to numbers, and the methods that are functions of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.registry import HOOKS


def _operator(ufunc: np.ufunc, hook: str = "binary") -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", self) is None:
            return NotImplemented
        return HOOKS[hook](ufunc, self, other)

    return method


def _reflected(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", self) is None:
            return NotImplemented
        return HOOKS["binary"](ufunc, other, self)

    return method


def _in_place(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return HOOKS["ufunc"](ufunc, "__call__", (self, other), {"out": (self,)})

    return method


def _unary(ufunc: np.ufunc) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return HOOKS["ufunc"](ufunc, "__call__", (self,), {})

    return method


class Operators:
    """Operators and methods of `DTensor`: each operator is a ufunc, each method a NumPy function."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # like NumPy arrays

    def __bool__(self: Any) -> bool:
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self.item())

    def __int__(self: Any) -> int:
        return int(self.item())

    def __float__(self: Any) -> float:
        return float(self.item())

    def __complex__(self: Any) -> complex:
        return complex(self.item())

    def __index__(self: Any) -> int:
        if self.ndim or self.dtype.kind not in "iu":
            raise TypeError("only integer scalar arrays can be converted to a scalar index")
        return int(self.item())

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if spec and self.size == 1 else repr(self)

    __add__, __radd__, __iadd__ = _operator(np.add), _reflected(np.add), _in_place(np.add)
    __sub__, __rsub__ = _operator(np.subtract), _reflected(np.subtract)
    __mul__, __rmul__ = _operator(np.multiply), _reflected(np.multiply)
    __truediv__, __rtruediv__ = _operator(np.true_divide), _reflected(np.true_divide)
    __floordiv__, __rfloordiv__ = _operator(np.floor_divide), _reflected(np.floor_divide)
    __mod__, __rmod__ = _operator(np.remainder), _reflected(np.remainder)
    __divmod__, __rdivmod__ = _operator(np.divmod), _reflected(np.divmod)
    __pow__, __rpow__ = _operator(np.power, "power"), _reflected(np.power)
    __lshift__, __rlshift__ = _operator(np.left_shift), _reflected(np.left_shift)
    __rshift__, __rrshift__ = _operator(np.right_shift), _reflected(np.right_shift)
    __and__, __rand__ = _operator(np.bitwise_and), _reflected(np.bitwise_and)
    __or__, __ror__ = _operator(np.bitwise_or), _reflected(np.bitwise_or)
    __xor__, __rxor__ = _operator(np.bitwise_xor), _reflected(np.bitwise_xor)
    __matmul__, __rmatmul__ = _operator(np.matmul), _reflected(np.matmul)
    __isub__, __imul__, __itruediv__ = (
        _in_place(np.subtract),
        _in_place(np.multiply),
        _in_place(np.true_divide),
    )
    __ifloordiv__, __imod__, __ipow__ = (
        _in_place(np.floor_divide),
        _in_place(np.remainder),
        _in_place(np.power),
    )
    __ilshift__, __irshift__ = _in_place(np.left_shift), _in_place(np.right_shift)
    __iand__, __ior__, __ixor__ = (
        _in_place(np.bitwise_and),
        _in_place(np.bitwise_or),
        _in_place(np.bitwise_xor),
    )
    __imatmul__ = _in_place(np.matmul)
    __lt__, __le__, __gt__, __ge__ = (
        _operator(np.less), _operator(np.less_equal), _operator(np.greater), _operator(np.greater_equal)
    )  # fmt: skip
    __eq__, __ne__ = _operator(np.equal), _operator(np.not_equal)
    __neg__, __pos__, __abs__, __invert__ = (
        _unary(np.negative), _unary(np.positive), _unary(np.absolute), _unary(np.invert)
    )  # fmt: skip


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = function.__name__
    method.__doc__ = f"Return `numpy.{function.__name__}` of the array."
    return method


for _function in (
    np.all, np.any, np.argmax, np.argmin, np.argsort, np.clip, np.cumprod, np.cumsum, np.diagonal, np.max,
    np.mean,
    np.min, np.nonzero, np.prod, np.ptp, np.ravel, np.repeat, np.round, np.searchsorted, np.squeeze,
    np.std, np.sum,
    np.swapaxes, np.take, np.trace, np.var,
):  # fmt: skip
    setattr(
        Operators,
        {"amax": "max", "amin": "min"}.get(_function.__name__, _function.__name__),
        _method(_function),
    )
Operators.flatten = lambda self, order="C": np.ravel(self, order=order)  # type: ignore[attr-defined]


def _conjugate(self: Any) -> Any:
    """Return the complex conjugate."""
    return np.conjugate(self) if self.dtype.kind == "c" else self.copy()


Operators.conj = Operators.conjugate = _conjugate  # type: ignore[attr-defined]

"""Fourier transforms; transformed dimensions become unsharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.reduction import normalized_axes
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import store
from dmesh.arrays.ops.along import along, kernel_of


def _fft_one(function: Any) -> Any:
    def handler(a: Any, n: Any = None, axis: int = -1, norm: Any = None, out: Any = None) -> Any:
        (dim,) = normalized_axes(axis, a.ndim)
        (result,) = along(
            f"np.fft.{function.__name__}", a, [dim], kernel_of(function, dim, (), (("n", n), ("norm", norm)))
        )
        return result if out is None else store(result, out, "same_kind")

    return handler


@lru_cache(maxsize=1024)
def _many(function: Any, axes: tuple[int, ...], s: Any, norm: Any) -> Callable[..., Any]:
    return lambda block: function(block, s=s, axes=axes, norm=norm)


def _fft_many(function: Any, default: Any) -> Any:
    def handler(a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None) -> Any:
        chosen = range(a.ndim - (a.ndim if s is None else len(s)), a.ndim) if axes is None else axes
        dims = tuple(int(d) % a.ndim for d in chosen)
        lengths = None if s is None else tuple(s)
        (result,) = along(f"np.fft.{function.__name__}", a, dims, _many(function, dims, lengths, norm))
        return result if out is None else store(result, out, "same_kind")

    return handler


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    implements(getattr(np.fft, _name), note="whole dimension")(_fft_one(getattr(np.fft, _name)))
for _name in ("fftn", "ifftn", "rfftn", "irfftn"):
    implements(getattr(np.fft, _name), note="whole dimension")(_fft_many(getattr(np.fft, _name), None))
for _name in ("fft2", "ifft2", "rfft2", "irfft2"):
    implements(getattr(np.fft, _name), note="whole dimension")(_fft_many(getattr(np.fft, _name), (-2, -1)))


def _shift(sign: int) -> Any:
    def handler(x: Any, axes: Any = None) -> Any:
        dims = (
            range(x.ndim)
            if axes is None
            else normalized_axes(axes if not isinstance(axes, list) else tuple(axes), x.ndim)
        )
        shifts = tuple(x.shape[d] // 2 if sign > 0 else -(x.shape[d] // 2) for d in dims)
        return np.roll(x, shifts, tuple(dims))

    return handler


implements(np.fft.fftshift)(_shift(1))
implements(np.fft.ifftshift)(_shift(-1))

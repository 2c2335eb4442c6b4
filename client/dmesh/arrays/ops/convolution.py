"""Convolutions and correlations of sequences: each device reads its neighbors' margins."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.dispatch.operands import bring, grid_among
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.indexing import read_whole
from dmesh.arrays.spec import spec_of
from dmesh.arrays.transfer.mapping import Dim, Run, Side, plan_exchange, side

MODES = ("full", "same", "valid")


@implements(np.convolve)
def convolve(a: Any, v: Any, mode: Any = "full") -> Any:
    """Return the convolution of two sequences; every device gets the shorter one whole."""
    x, y = _sequences(a, v, mode, "np.convolve")
    longer, shorter = (y, x) if len(y) > len(x) else (x, y)
    weights = np.asarray(read_whole(shorter))
    if not isinstance(longer, DTensor):
        return np.convolve(longer, weights, mode)
    return _convolved("np.convolve", longer, weights, mode)


@implements(np.correlate)
def correlate(a: Any, v: Any, mode: Any = "valid") -> Any:
    """Return the correlation of two sequences; every device gets the shorter one whole."""
    x, y = _sequences(a, v, mode, "np.correlate")
    if len(y) > len(x):
        return np.flip(np.conjugate(correlate(y, x, mode)))
    weights = np.asarray(read_whole(y))
    if not isinstance(x, DTensor):
        return np.correlate(x, weights, mode)
    return _convolved("np.correlate", x, np.conjugate(weights)[::-1], mode)


def _sequences(a: Any, v: Any, mode: str, name: str) -> list[Any]:
    grid_among([x for x in (a, v) if isinstance(x, DTensor)], name)
    found: list[Any] = []
    for x in (a, v):
        line = x if isinstance(x, DTensor) else np.asarray(x)
        if line.ndim > 1:
            raise ValueError("object too deep for desired array")
        found.append(line.reshape(1) if not line.ndim else line)
        if not len(found[-1]):
            raise ValueError(f"{'av'[len(found) - 1]} cannot be empty")
    if mode not in MODES:
        raise ValueError(f"mode must be one of 'valid', 'same', or 'full' (got {mode!r})")
    return found


def _convolved(name: str, x: DTensor, weights: NDArray[Any], mode: str) -> DTensor:
    """Return the convolution of a sequence with one that is not longer.

    Element i of the full one needs those from `i - len(weights) + 1` to i.
    """
    n, margin = len(x), len(weights) - 1
    length = {"full": n + margin, "same": n, "valid": n - margin}[mode]
    begin = {"full": 0, "same": margin // 2, "valid": margin}[mode]
    spec = x.spec.complete()
    kind = np.convolve(np.ones(1, x.dtype), np.ones(1, weights.dtype)).dtype
    target = spec_of(spec.grid, (length,), kind, spec.axes)
    needed = tuple(
        (max(0, low + begin - margin), min(n, high + begin)) if low < high else (0, 0)
        for low, high in target.cuts(0)
    )
    dim = Dim(n, side(spec, 0), Side(target.axes[0], needed, Run()))
    parts = exchange(bring(x, spec, name), plan_exchange(spec, [dim], target.used), spec)
    if parts._shards is None:
        return DTensor(target, None)
    made = []
    for ((low, high),), block in zip(target.regions, parts.blocks, strict=True):
        if low == high:
            made.append(np.empty(0, kind))
            continue
        skipped = low + begin - max(0, low + begin - margin)
        made.append(np.convolve(block, weights)[skipped : skipped + high - low])
    return DTensor(target, tuple(made))

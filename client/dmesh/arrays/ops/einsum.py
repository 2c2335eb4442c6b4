"""Einsum, and products of vectors implemented with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.protocol import GENERALIZED
from dmesh.arrays.dispatch.reduction import reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import elementwise, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import mappings
from dmesh.arrays.ops.contraction import Labels, check_arrays, contract
from dmesh.arrays.ops.diagonals import diagonal_of
from dmesh.errors import UnshardableError


def _parse(subscripts: str, operands: Sequence[DTensor]) -> tuple[list[Labels], Labels]:
    text = subscripts.replace(" ", "")
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        raise ValueError(
            "more operands provided to einstein sum function than specified in the subscripts string"
            if len(operands) > len(terms)
            else "fewer operands provided to einstein sum function than specified in the subscripts string"
        )
    longest = 0
    for term, x in zip(terms, operands, strict=True):
        if "..." in term:
            longest = max(longest, x.ndim - len(term.replace("...", "")))
    dots = tuple(f".{i}" for i in range(longest))
    found = []
    for term, x in zip(terms, operands, strict=True):
        before, ellipsis, after = term.partition("...")
        count = x.ndim - len(before) - len(after)
        if count < 0 or (count and not ellipsis):
            raise ValueError(
                f"einstein sum subscripts {term!r} do not match an operand of {x.ndim} dimensions"
            )
        found.append((*before, *dots[longest - count :], *after))
    if arrow:
        before, ellipsis, after = result.partition("...")
        if dots and not ellipsis:
            raise ValueError(
                "output has more dimensions than subscripts given in einstein sum, but no '...' ellipsis "
                "provided to broadcast the extra dimensions."
            )
        out: Labels = (*before, *(dots if ellipsis else ()), *after)
    else:
        every = [label for labels in found for label in labels if not label.startswith(".")]
        out = (*dots, *sorted({label for label in every if every.count(label) == 1}))
    known = {label for labels in found for label in labels}
    if any(label not in known for label in out) or len(set(out)) != len(out):
        raise ValueError(
            f"the output of the einstein sum subscripts {subscripts!r} does not match their inputs"
        )
    return found, out


@implements(np.einsum)
def einsum(*operands: Any, out: Any = None, optimize: Any = False, **kwargs: Any) -> Any:
    """Return sums of products given by labels; operands are combined from left to right."""
    del optimize
    if not operands or not isinstance(operands[0], str):
        raise UnshardableError(
            "np.einsum of sharded arrays takes its subscripts as a string, such as 'ij,jk->ik'"
        )
    if any(
        kwargs.get(key) not in (None, usual)
        for key, usual in (("dtype", None), ("order", "K"), ("casting", "safe"))
    ):
        raise UnshardableError("np.einsum of sharded arrays has no arguments dtype=, order= and casting=")
    arrays = list(operands[1:])
    check_arrays("np.einsum", *arrays)
    if not all(isinstance(x, DTensor) for x in arrays):
        raise UnshardableError("np.einsum of sharded arrays and numbers: multiply the result")
    terms, result = _parse(operands[0], arrays)
    labels, x = _reduced(arrays[0], terms[0], set(result).union(*terms[1:]))
    for at, (y, term) in enumerate(zip(arrays[1:], terms[1:], strict=True), 1):
        later = set(result).union(*terms[at + 1 :])
        other, y = _reduced(y, term, set(labels) | later)
        kept = tuple(dict.fromkeys(label for label in (*labels, *other) if label in later))
        x = _einsum_pair(x, y, labels, other, kept)
        labels = kept
    final = _reduced(x, labels, set(result))
    labels, x = final
    x = mappings.moved_dims(x, [labels.index(label) for label in result]) if labels != result else x
    return x if out is None else store(x, out, "same_kind")


def _reduced(x: DTensor, labels: Labels, needed: set[Any]) -> tuple[Labels, DTensor]:
    """Return an operand without repeated labels, summed over labels that nothing else has."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            if x.shape[i] != x.shape[j]:
                raise ValueError(
                    f"dimensions in operand for collapsing index {label!r} don't match "
                    f"({x.shape[i]} != {x.shape[j]})"
                )
            x = diagonal_of(x, i, j)
            labels = (*(one for d, one in enumerate(labels) if d not in (i, j)), label)
    gone = tuple(d for d, label in enumerate(labels) if label not in needed)
    if gone:
        x = reduce(np.add if x.dtype.kind != "b" else np.logical_or, x, gone, x.dtype)
        labels = tuple(label for d, label in enumerate(labels) if d not in gone)
    return labels, x


def _einsum_pair(a: DTensor, b: DTensor, left: Labels, right: Labels, out: Labels) -> DTensor:
    lengths: dict[Any, int] = {}
    for label, n in [*zip(left, a.shape, strict=True), *zip(right, b.shape, strict=True)]:
        if lengths.get(label, n) not in (n, 1) and n != 1:
            raise ValueError(
                f"operands could not be broadcast together: label {label!r} has lengths {lengths[label]} "
                f"and {n}"
            )
        lengths[label] = n if lengths.get(label, 1) == 1 else lengths[label]
    for number, (x, labels) in enumerate(((a, left), (b, right))):
        short = [d for d, label in enumerate(labels) if x.shape[d] != lengths[label]]
        if short:
            full = _broadcast_to(x, tuple(lengths[label] for label in labels))
            a, b = (full, b) if number == 0 else (a, full)
    letters = {label: chr(97 + at) for at, label in enumerate(dict.fromkeys((*left, *right)))}
    text = ",".join("".join(letters[x] for x in labels) for labels in (left, right))
    text += "->" + "".join(letters[x] for x in out)
    dtype = np.result_type(a.dtype, b.dtype)
    shared = [label for label in left if label in right and label not in out]
    matrix = not any(label in right for label in left if label in out) and shared

    def kernel(x: Any, y: Any) -> Any:
        return np.einsum(text, x, y, optimize=bool(matrix))

    return contract("np.einsum", kernel, a, b, left, right, out, dtype)


def _broadcast_to(x: DTensor, shape: tuple[int, ...]) -> DTensor:
    broadcast: Any = np.broadcast_to
    result: DTensor = broadcast(x, shape)
    return result


def _vector(name: str, subscripts: str) -> Callable[..., Any]:
    def function(a: Any, b: Any, /, **kwargs: Any) -> Any:
        check_arrays(name, a, b)
        least = {"np.matvec": (2, 1), "np.vecmat": (1, 2)}.get(name, (1, 1))
        if a.ndim < least[0] or b.ndim < least[1]:
            raise ValueError(f"{name} takes arrays of at least {least} dimensions, not {(a.ndim, b.ndim)}")
        if name == "np.vecdot":
            axis = kwargs.pop("axis", -1)
            a, b = np.moveaxis(a, axis, -1), np.moveaxis(b, axis, -1)
        if kwargs:
            raise UnshardableError(f"{name} of sharded arrays has no argument {next(iter(kwargs))}=")
        lengths = a.shape[-1], b.shape[-2 if name == "np.vecmat" else -1]
        if lengths[0] != lengths[1]:  # unlike einsum, a length of 1 is not broadcast
            raise ValueError(f"{name} needs dimensions of equal lengths, got {lengths[0]} and {lengths[1]}")
        x = elementwise(np.conjugate, (a,), {}) if a.dtype.kind == "c" and subscripts[:6] != "...ij," else a
        return einsum(subscripts, x, b)

    return function


for _name, _subscripts in (
    ("vecdot", "...k,...k->..."), ("matvec", "...ij,...j->...i"), ("vecmat", "...i,...ij->...j")
):  # fmt: skip
    if hasattr(np, _name):
        GENERALIZED[getattr(np, _name)] = _vector(f"np.{_name}", _subscripts)

# ruff: noqa: E501
"""Operations by family: each takes arrays, sharded ones or NumPy's, and returns what NumPy would."""

from __future__ import annotations

import numpy as np

F = ("float64", "float32")
N = ("float64", "float32", "int64", "int32", "complex128")
R = ("float64", "float32", "int64", "int32", "uint8")
ANY = ("float64", "float32", "int64", "int32", "uint8", "complex128", "bool")
I = ("int64", "int32", "uint8")  # noqa: E741

UNARY = {
    "negative": (lambda a: -a, N), "positive": (np.positive, N), "abs": (abs, (*R, "complex128")),
    "square": (np.square, N), "exp": (np.exp, F), "sqrt": (lambda a: np.sqrt(abs(a)), R), "isnan": (np.isnan, F),
    "sign": (np.sign, R), "conjugate": (np.conjugate, N), "logical_not": (np.logical_not, ANY),
    "invert": (lambda a: ~a, (*I, "bool")), "floor": (np.floor, F), "modf": (np.modf, F), "frexp": (np.frexp, F),
    "times 2": (lambda a: a * 2, N), "2 minus": (lambda a: 2 - a, N), "half": (lambda a: a / 2, R),
    "power": (lambda a: a**2, N), "astype": (lambda a: a.astype(np.float32), R), "real": (np.real, N),
    "imag": (np.imag, N), "clip": (lambda a: np.clip(a, 0, 3), R), "round": (lambda a: np.round(a / 3, 1), F),
    "copy": (np.copy, ANY), "zeros_like": (np.zeros_like, ANY), "full_like": (lambda a: np.full_like(a, 3), R),
    "angle": (np.angle, ("complex128",)), "nan_to_num": (np.nan_to_num, F), "sinc": (np.sinc, F),
    "1 / (1 + a*a)": (lambda a: 1 / (1 + a * a), F), "np.float32(2)": (lambda a: a * np.float32(2), R),
    "where": (lambda a: np.where(a > 1, a, 0), R), "masked add": (lambda a: np.add(a, 1, where=a > 1, out=np.zeros_like(a)), N[:4]),
    "iadd": (lambda a: iadd(a * 1), N[:4]), "sum of halves": (lambda a: (a * 0.5 + a * 0.5), F),
}  # fmt: skip


def iadd(a):
    a += 1
    a *= 2
    return a


BINARY = {
    "add": (np.add, N), "subtract": (lambda a, b: a - b, N), "multiply": (lambda a, b: a * b, N),
    "divide": (lambda a, b: a / (b * b + 1), N), "floor_divide": (lambda a, b: a // (b * b + 1), R[:4]),
    "divmod": (lambda a, b: divmod(a, b * b + 1), R[:4]), "less": (lambda a, b: a < b, R), "equal": (lambda a, b: a == b, ANY),
    "maximum": (np.maximum, R), "logical_and": (np.logical_and, ANY), "arctan2": (np.arctan2, F),
    "where": (lambda a, b: np.where(a > b, a, b), R), "isclose": (np.isclose, F), "hypot": (np.hypot, F),
    "array_equiv": (np.array_equiv, ANY), "xor": (lambda a, b: a ^ b, I),
}  # fmt: skip

REDUCTIONS = {
    "sum": (np.sum, ANY), "prod": (np.prod, N), "mean": (np.mean, N), "any": (np.any, ANY), "all": (np.all, ANY),
    "var": (np.var, N), "std": (np.std, N), "nansum": (np.nansum, N), "count_nonzero": (np.count_nonzero, ANY),
    "logical_xor": (lambda a, **k: np.logical_xor.reduce(a, **k), ANY), "nanmean": (np.nanmean, F), "nanvar": (np.nanvar, F),
    "sum with initial": (lambda a, **k: np.sum(a, initial=3, **k), R), "sum where": (lambda a, **k: np.sum(a, where=a > 1, **k), R),
    "negated": (lambda a, **k: -(np.sum(a, **k) * 2), N), "sums added": (lambda a, **k: np.sum(a, **k) + np.sum(a, **k), N),
}  # fmt: skip
EXTREMES = {
    "max": (np.max, R), "min": (np.min, R), "ptp": (np.ptp, R), "nanmax": (np.nanmax, F), "fmin": (np.fmin.reduce, F),
    "median": (np.median, F), "quantile": (lambda a, **k: np.quantile(a, [0.25, 0.5], **k), F),
    "percentile": (lambda a, **k: np.percentile(a, 30, **k), F),
}  # fmt: skip
ALONG = {
    "cumsum": (np.cumsum, N), "cumprod": (np.cumprod, N), "maximum.accumulate": (lambda a, axis: np.maximum.accumulate(a, axis), R),
    "argmax": (np.argmax, R), "argmin": (np.argmin, R), "sort": (np.sort, R), "argsort": (lambda a, axis: np.argsort(a, axis=axis, kind="stable"), R),
    "diff": (lambda a, axis: np.diff(a, axis=axis), N), "flip": (np.flip, ANY), "roll": (lambda a, axis: np.roll(a, 2, axis), ANY),
    "fft": (lambda a, axis: np.fft.fft(a, axis=axis), ("float64", "complex128")), "subtract.accumulate": (lambda a, axis: np.subtract.accumulate(a, axis), N),
    "repeat": (lambda a, axis: np.repeat(a, 2, axis), ANY), "take": (lambda a, axis: np.take(a, [0, 0, -1], axis), ANY),
    "partition": (lambda a, axis: np.sort(np.partition(a, 0, axis), axis), R), "delete": (lambda a, axis: np.delete(a, 0, axis), ANY),
    "concatenate": (lambda a, axis: np.concatenate([a, a, a], axis), ANY), "array_split": (lambda a, axis: np.array_split(a, 3, axis), ANY),
    "stack": (lambda a, axis: np.stack([a, a], axis), ANY), "expand_dims": (np.expand_dims, ANY), "norm": (lambda a, axis: np.linalg.norm(a, axis=axis), F),
    "nancumsum": (np.nancumsum, F), "fftshift": (lambda a, axis: np.fft.fftshift(a, axis), N), "average": (lambda a, axis: np.average(a, axis) if a.size else a, F),
    "unwrap": (lambda a, axis: np.unwrap(a, axis=axis), F), "expected argmax": (lambda a, axis: np.argmax(a * 0, axis=axis, keepdims=True), R),
}  # fmt: skip
WHOLE = {
    "searchsorted": (lambda a: np.searchsorted([0, 1, 3], a), F), "digitize": (lambda a: np.digitize(a, [0, 2]), F), "interp": (lambda a: np.interp(a, [0, 2], [1.0, 3.0]), F),
    "isin": (lambda a: np.isin(a, [1, 2]), I), "select": (lambda a: np.select([a > 2, a > 0], [a, a * 2], 7), R), "vecdot": (lambda a: np.linalg.vecdot(a, a), N),
    "vector_norm": (np.linalg.vector_norm, F),
    "ravel": (np.ravel, ANY), "transpose": (np.transpose, ANY), "T twice": (lambda a: a.T.T, ANY), "tile": (lambda a: np.tile(a, 2), ANY),
    "reshape -1": (lambda a: np.reshape(a, -1), ANY), "squeeze": (lambda a: np.squeeze(a[None]), ANY), "flip": (np.flip, ANY),
    "ravel and back": (lambda a: a.ravel().reshape(a.shape), ANY), "reversed": (lambda a: a.reshape(a.shape[::-1]), ANY),
    "moveaxis": (lambda a: np.moveaxis(a, 0, -1), ANY), "swapaxes": (lambda a: np.swapaxes(a, 0, -1), ANY), "roll": (lambda a: np.roll(a, 3), ANY),
    "pad": (lambda a: np.pad(a, 1), ANY), "pad edge": (lambda a: np.pad(a, 1, mode="wrap") if 0 not in a.shape else a, ANY),
    "atleast_3d": (np.atleast_3d, ANY), "broadcast_to": (lambda a: np.broadcast_to(a, (2, *a.shape)), ANY),
    "cumsum flat": (np.cumsum, N), "argmax flat": (lambda a: np.argmax(a) if a.size else a, R), "nonzero": (np.nonzero, ANY),
    "flatnonzero": (np.flatnonzero, ANY), "mask": (lambda a: a[a > 1], R), "argwhere": (np.argwhere, ANY), "outer": (lambda a: np.outer(a, a), N),
    "extract": (lambda a: np.extract(a > 0, a), R), "array_equal": (lambda a: np.array_equal(a, a * 1), ANY), "allclose": (lambda a: np.allclose(a, a), F),
    "add.outer": (lambda a: np.add.outer(a, a), N), "norm": (np.linalg.norm, F), "median flat": (lambda a: np.median(a) if a.size else a, F),
    "bincount": (lambda a: np.bincount(a.ravel()), ("uint8",)), "histogram": (lambda a: np.histogram(a, 4, (-3, 6))[0], F),
    "repeat flat": (lambda a: np.repeat(a, 2), ANY), "unique rows": (lambda a: a[..., :1], ANY), "ellipsis": (lambda a: a[..., None], ANY),
    "sort flat": (lambda a: np.sort(a, axis=None), R), "trim": (lambda a: np.append(a, a), ANY),
}  # fmt: skip
MATRIX = {
    "cov": (lambda a: np.cov(a) if a.shape[0] > 1 and a.shape[1] > 1 else a, N), "matrix_norm": (np.linalg.matrix_norm, F), "mT": (lambda a: np.matrix_transpose(a), ANY),
    "tril": (np.tril, ANY), "triu": (lambda a: np.triu(a, 1), ANY), "trace": (np.trace, N), "diagonal": (np.diagonal, ANY), "diag": (lambda a: np.diag(a, 1), ANY),
    "diag of row": (lambda a: np.diag(a[0]) if len(a) else a, ANY), "rot90": (np.rot90, ANY), "fliplr": (np.fliplr, ANY), "vander": (lambda a: np.vander(a.ravel(), 3), N),
    "fft2": (np.fft.fft2, ("float64",)), "einsum trace": (lambda a: np.einsum("ij->ji", a), N), "einsum sum": (lambda a: np.einsum("ij->i", a), N),
    "gram": (lambda a: a.T @ a, N), "gram sum": (lambda a: (a @ a.T).sum(), N), "kron": (lambda a: np.kron(a, a), N), "hstack": (lambda a: np.hstack([a, a]), ANY),
    "column_stack": (lambda a: np.column_stack([a, a]), ANY), "dstack": (lambda a: np.dstack([a, a]), ANY), "norm 1": (lambda a: np.linalg.norm(a, 1) if a.size else a, F), "vsplit": (lambda a: np.vsplit(a, [1]), ANY), "einsum pair": (lambda a: np.einsum("ij,kj->ik", a, a), N),
    "einsum three": (lambda a: np.einsum("ij,kj,kl->il", a, a, a), N), "vdot": (lambda a: np.vdot(a, a), N), "inner": (lambda a: np.inner(a, a), N),
}  # fmt: skip


PRODUCTS = {
    "matmul": (np.matmul, N), "operator": (lambda a, b: a @ b, ANY), "dot": (np.dot, N), "tensordot": (lambda a, b: np.tensordot(a, b, 1), N),
    "einsum": (lambda a, b: np.einsum("...ij,...jk->...ik", a, b), N), "mean of product": (lambda a, b: (a @ b).mean(), N),
    "row sums": (lambda a, b: (a @ b).sum(axis=0), N), "added": (lambda a, b: a @ b + a @ b, N), "squared": (lambda a, b: np.square(a @ b), N),
}  # fmt: skip

INDICES = [
    (0,), (-1,), (slice(1, None),), (slice(None, None, 2),), (slice(None, None, -1),), (slice(-2, 0, -1),), (None,), (Ellipsis,), (Ellipsis, 0), (slice(None), 0),
    (Ellipsis, slice(1, 3)), (slice(2, 2),), (None, Ellipsis, None), (0, Ellipsis, None), ([0, -1, 0],), (np.array([[0, 0], [-1, 0]]),),
    (Ellipsis, [0, 0]), ([0, -1], slice(1, None)), (slice(None), [0, -1]), ([0, -1], [0, -1]), ([0, -1], None, [0, -1]), (0, [0, 0]), ([0], 0), (slice(None), 0, [0, 0]),
    ([0, 0], slice(None), [0, -1]), (np.zeros(0, int),),
]  # fmt: skip
WRITABLE = [
    (0,), (-1,), (slice(1, None),), (slice(None, None, 2),), (slice(None, None, -1),), (None,), (Ellipsis,), (Ellipsis, 0), (slice(None), 0),
    (Ellipsis, slice(1, 3)), (slice(2, 2),), ([0, -1, 0],), (Ellipsis, [0, 0]), ([0, -1], slice(1, None)), (slice(None), [0, -1]), (np.zeros(0, int),), (0, 0),
]  # fmt: skip

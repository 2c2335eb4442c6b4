"""Arrays of all dtypes and forms of memory, and what NumPy alone makes of those of several ranks."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dmesh.collectives.reduction import resolve
from dmesh.errors import CollectiveTypeError

NUMBERS = [
    "?",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f2",
    "f4",
    "f8",
    "g",
    "F",
    "D",
    "m8[s]",
    "M8[D]",
]
SHORT = [
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float4_e2m1fn", "int4", "uint4",
    "int2", "uint2",
]  # fmt: skip
OTHERS = ["S3", "U5", "V7", [("a", "<i4"), ("b", "<f8", (2,))]]
DTYPES = [np.dtype(text) for text in NUMBERS] + [np.dtype(getattr(ml_dtypes, name)) for name in SHORT]
ALL_DTYPES = DTYPES + [np.dtype(text) for text in OTHERS]
FORMS = ["C", "F", "strided", "reversed", "swapped", "unaligned"]


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if dtype.names or (dtype.kind in "SUV" and dtype.type.__module__ == "numpy"):
        array = np.zeros(shape, dtype)
        flat = array.reshape(-1)
        if dtype.names:
            flat["a"] = generator.integers(0, 100, flat.size)
            flat["b"] = generator.normal(size=(flat.size, 2))
        elif dtype.kind in "SU":
            flat[...] = [str(number) for number in generator.integers(0, 999, flat.size)]
        else:
            flat.view(np.uint8)[...] = generator.integers(0, 256, flat.nbytes)
        return array
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu" or dtype.kind in "mM":
        return generator.integers(0, 256, shape).astype(np.int64).astype(dtype)
    if dtype.kind == "c":
        return (generator.normal(size=shape) + 1j * generator.normal(size=shape)).astype(dtype)
    if dtype.name.startswith(("int", "uint")):
        return generator.integers(0, 2, shape).astype(np.int8).astype(dtype)
    return (generator.normal(size=shape)).astype(dtype)


def in_form(array: np.ndarray, form: str) -> np.ndarray:
    """The same values in another form of memory."""
    if form == "F" and array.ndim:
        return np.asfortranarray(array)
    if form == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if form == "reversed" and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    if form == "swapped" and array.dtype.type.__module__ == "numpy":
        return array.astype(array.dtype.newbyteorder(">"))
    if form == "unaligned":
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
        memory[...] = array.reshape(-1)
        return memory.reshape(array.shape)
    return array


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the bit, in dtype and shape; and in the form that is promised."""
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.dtype.isnative
    assert actual.shape == expected.shape
    assert actual.flags.c_contiguous
    if actual.dtype == np.longdouble:  # has padding
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()


def reduced(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """What a reduction should give, by NumPy alone."""
    dtype = arrays[0].dtype
    stacked = np.stack(arrays)
    short = dtype.type.__module__.startswith("ml_dtypes")
    short_float = dtype == np.float16 or (short and "float" in dtype.name)
    with np.errstate(all="ignore"):
        if op in ("any", "all"):
            return getattr(np, op)(stacked.astype(bool), axis=0)
        if op in ("sum", "prod"):
            work = np.float32 if short_float else np.int64 if dtype.kind == "b" else dtype
            ufunc = np.add if op == "sum" else np.multiply
            result = stacked[0].astype(work)
            for array in stacked[1:]:
                result = np.asarray(ufunc(result, array.astype(work)))
            return result.astype(np.int64 if dtype.kind == "b" else dtype)
        if op == "mean":
            integer = dtype.kind in "biu" or (short and not short_float)
            work = np.float32 if short_float else np.float64 if integer else dtype
            result = stacked[0].astype(work)
            for array in stacked[1:]:
                result = np.asarray(result + array.astype(work))
            return np.asarray(result / len(arrays)).astype(np.float64 if integer else dtype)
        if short:
            work = np.float32 if short_float else np.int16
        else:
            work = dtype
        ufunc = {
            "min": np.minimum, "max": np.maximum, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
            "bitwise_xor": np.bitwise_xor,
        }[op]  # fmt: skip
        result = stacked[0].astype(work)
        for array in stacked[1:]:
            result = np.asarray(ufunc(result, array.astype(work)))
        return result.astype(dtype)


def meaningful(op: str, dtype: np.dtype) -> bool:
    try:
        resolve(op, dtype)
    except CollectiveTypeError:
        return False
    return True

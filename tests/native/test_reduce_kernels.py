"""The native reductions have the same bits as NumPy's, for every dtype, op, number of arrays and length."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.native.library import NAMES, STREAM, Kernels

from dmesh.collectives.reduction import resolve
from dmesh.collectives.request import OPS
from dmesh.errors import CollectiveTypeError

pytestmark = pytest.mark.slow

Array = NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [*NAMES, BFLOAT16]
ISAS = ["ISA_BEST", "ISA_BASELINE"]
ARITHMETIC = ("sum", "prod", "mean")
X86 = platform.machine() in ("x86_64", "AMD64")
GUARD = 0xA5


def meaningful(op: str, dtype: np.dtype[Any]) -> bool:
    """Whether there is to be a kernel: any and all are asked of truth values, whatever the arrays are."""
    try:
        return resolve(op, dtype).wire == dtype
    except CollectiveTypeError:
        return False


CASES = [(op, dtype) for dtype in DTYPES for op in OPS if meaningful(op, dtype)]
cases = pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{dtype}" for op, dtype in CASES])
isas = pytest.mark.parametrize("isa", ISAS)


def parts(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the two parts of a complex number, or the dtype itself."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or dtype == BFLOAT16


def values(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    """Elements of all kinds: ordinary ones, all bits, and the special ones."""
    generator = np.random.default_rng(seed)
    if dtype.kind == "b":
        return generator.integers(0, 2, count).astype(dtype)
    if dtype.kind == "c":
        return values(parts(dtype), 2 * count, seed).view(dtype)
    bits = generator.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind in "iu":
        return np.where(generator.random(count) < 0.1, dtype.type(0), bits)
    if dtype.kind in "mM":
        return np.where(generator.random(count) < 0.1, np.array("NaT", dtype), bits)
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    numbers = [0.0, 1.0, np.inf, np.pi, limits.max, limits.tiny, limits.smallest_subnormal, limits.eps]
    special = np.array([*numbers, *(-np.array(numbers, dtype)), np.nan], dtype)
    special = special[generator.integers(0, special.size, count)]
    ordinary = generator.normal(size=count).astype(dtype)
    kind = generator.random(count)
    # Few of them are NaN, which would hide everything else from the third array on.
    return np.where(kind < 0.5, ordinary, np.where(kind < 0.8, special, bits))


def folded(op: str, arrays: list[Array]) -> Array:
    """What Reduction makes of the arrays, in their order."""
    reduction = resolve(op, arrays[0].dtype)
    accumulator = np.empty(arrays[0].size, reduction.accumulator)
    for number, array in enumerate(arrays):
        reduction.fold(array, accumulator, number == 0)
    result = accumulator
    if reduction.result != reduction.accumulator:
        result = np.empty(arrays[0].size, reduction.result)
    reduction.finish(accumulator, result, len(arrays))
    return result


def multiplied_without_fusing(arrays: list[Array]) -> Array:
    """The product of complex numbers on an x86 CPU without fused multiply-add."""
    result = arrays[0].copy()
    with np.errstate(all="ignore"):
        for factor in arrays[1:]:
            a, b, c, d = result.real.copy(), result.imag.copy(), factor.real, factor.imag
            result.real, result.imag = a * c - b * d, a * d + b * c
    return result


def expected_of(op: str, arrays: list[Array], isa: str) -> Array:
    if op == "prod" and arrays[0].dtype.kind == "c" and isa == "ISA_BASELINE" and X86:
        return multiplied_without_fusing(arrays)
    return folded(op, arrays)


def same(actual: Array, expected: Array, op: str) -> None:
    """The same bits, but for what NumPy itself leaves open."""
    assert actual.dtype == expected.dtype
    if is_float(expected.dtype):
        actual, expected = (
            actual.view(parts(actual.dtype)).copy(),
            expected.view(parts(expected.dtype)).copy(),
        )
        if op in ARITHMETIC:
            # Of two NaN operands, one is the result.
            nan = np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(actual), nan)
            actual[nan] = expected[nan] = 0
        elif not X86:
            actual[actual == 0] = expected[expected == 0] = 0
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    np.testing.assert_array_equal(actual.view(bits), expected.view(bits))


class Place:
    """Memory for an array, at any address, between two guards."""

    def __init__(self, size: int, offset: int) -> None:
        self._memory = np.full(size + 256, GUARD, np.uint8)
        self._start = 64 + offset
        self._size = size

    @property
    def content(self) -> Array:
        return self._memory[self._start : self._start + self._size]

    def check(self) -> None:
        assert (self._memory[: self._start] == GUARD).all()
        assert (self._memory[self._start + self._size :] == GUARD).all()


def run(
    kernels: Kernels,
    op: str,
    arrays: list[Array],
    *,
    isa: str = "ISA_BEST",
    outs: int = 1,
    flags: int = 0,
    offset: int = 0,
    in_place: bool = False,
) -> list[Array]:
    """Reduces, and returns the outputs."""
    dtype, count = arrays[0].dtype, arrays[0].size
    kernel = kernels.find(op, dtype, isa)
    assert kernel is not None
    result = resolve(op, dtype).result
    # Each at another offset from a cache line.
    inputs = [Place(array.nbytes, (offset * (number + 1)) % 64) for number, array in enumerate(arrays)]
    for place, array in zip(inputs, arrays, strict=True):
        place.content[...] = array.view(np.uint8)
    outputs = [Place(count * result.itemsize, (offset * (number + 3)) % 64) for number in range(outs)]
    if in_place:
        # The last input is the first output: what is written too early is missed.
        both = [*reversed(inputs)][:outs]
        outputs[: len(both)] = both
    kernel([place.content for place in inputs], [place.content for place in outputs], count, flags)
    for place in inputs + outputs:
        place.check()
    written = {id(place) for place in outputs}
    for place, array in zip(inputs, arrays, strict=True):
        assert id(place) in written or (place.content == array.view(np.uint8)).all(), "an input has changed"
    return [place.content.copy().view(result) for place in outputs]


def test_there_are_kernels_for_all_of_these_dtypes_and_ops(kernels: Kernels) -> None:
    for dtype in DTYPES:
        for op in OPS:
            for isa in ISAS:
                kernel = kernels.find(op, dtype, isa)
                assert (kernel is not None) == meaningful(op, dtype), (op, dtype)
                if kernel is not None:
                    assert kernel.input_size == resolve(op, dtype).wire.itemsize
                    assert kernel.output_size == resolve(op, dtype).result.itemsize


@cases
@isas
@settings(max_examples=25)
@given(
    ways=st.integers(1, 6),
    outs=st.integers(1, 4),
    count=st.integers(0, 200) | st.integers(500, 2100),
    flags=st.sampled_from([0, STREAM]),
    offset=st.integers(0, 17),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_reductions_have_the_bits_of_numpy(
    kernels: Kernels,
    op: str,
    dtype: np.dtype[Any],
    isa: str,
    ways: int,
    outs: int,
    count: int,
    flags: int,
    offset: int,
    in_place: bool,
    seed: int,
) -> None:
    arrays = [values(dtype, count, seed + number) for number in range(ways)]
    in_place = in_place and resolve(op, dtype).result.itemsize == dtype.itemsize
    outputs = run(kernels, op, arrays, isa=isa, outs=outs, flags=flags, offset=offset, in_place=in_place)
    expected = expected_of(op, arrays, isa)
    for output in outputs:
        same(output, expected, op)


@isas
@pytest.mark.parametrize("flags", [0, STREAM])
@pytest.mark.parametrize("ways", [1, 2, 3, 4, 5, 7, 8, 11, 23])
@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", "f4"), ("mean", "f4"), ("sum", "f2"), ("max", "i1"), ("mean", "u2")]
)
def test_many_arrays_of_many_blocks(
    kernels: Kernels, op: str, dtype: str, ways: int, flags: int, isa: str
) -> None:
    arrays = [values(np.dtype(dtype), 50_003, number) for number in range(ways)]
    in_place = dtype != "u2"
    for output in run(kernels, op, arrays, isa=isa, outs=3, flags=flags, offset=4, in_place=in_place):
        same(output, folded(op, arrays), op)


@isas
@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "mean", "min", "max"])
def test_every_short_float(kernels: Kernels, op: str, dtype: np.dtype[Any], isa: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    others = values(dtype, 24, 7)
    left = np.tile(every, others.size)
    right = np.repeat(others, every.size)
    for arrays in ([every], [left, right], [right, left, left[::-1].copy()]):
        (output,) = run(kernels, op, arrays, isa=isa)
        same(output, folded(op, arrays), op)


@isas
@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8")], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "mean", "min", "max"])
@pytest.mark.parametrize("ways", [1, 2, 3, 4, 6])
def test_a_single_nan_keeps_its_sign_and_payload(
    kernels: Kernels, op: str, ways: int, dtype: np.dtype[Any], isa: str
) -> None:
    bits = np.dtype(f"u{dtype.itemsize}")
    quiet, sign = int(np.array(np.nan, dtype).view(bits)), 1 << (8 * dtype.itemsize - 1)
    signalling = int(np.array(np.inf, dtype).view(bits)) | 1
    nans = np.array([quiet, quiet | 5, quiet | sign, quiet | sign | 3, signalling, signalling | sign], bits)
    for which in range(ways):
        arrays = [np.full(nans.size * 7, 2, dtype) for _ in range(ways)]
        arrays[which] = np.tile(nans, 7).view(dtype)
        (output,) = run(kernels, op, arrays, isa=isa)
        np.testing.assert_array_equal(output.view(bits), folded(op, arrays).view(bits))


@isas
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 31, 33, 64, 100])
@pytest.mark.skipif(not X86, reason="the order of zeros is the CPU's")
def test_of_two_zeros_the_same_one_wins_at_every_place(
    kernels: Kernels, op: str, dtype: str, count: int, isa: str
) -> None:
    for signs in ([0.0, -0.0], [-0.0, 0.0], [0.0, -0.0, 0.0], [-0.0, 0.0, 0.0, -0.0]):
        arrays = [np.full(count, sign, dtype) for sign in signs]
        (output,) = run(kernels, op, arrays, isa=isa)
        same(output, folded(op, arrays), op)
        assert (
            np.signbit(output).all()
            == np.signbit(output).any()
            == np.signbit(signs[0 if dtype == "f2" else -1])
        )


@isas
def test_bytes_of_truth_other_than_one_are_true(kernels: Kernels, isa: str) -> None:
    a, b = (np.random.default_rng(seed).integers(0, 4, 1000, np.uint8).view(np.bool_) for seed in (1, 2))
    for op in ("any", "all", "min", "max", "bitwise_and", "bitwise_or", "bitwise_xor"):
        (output,) = run(kernels, op, [a, b], isa=isa)
        assert set(output.view(np.uint8)) <= {0, 1}
        np.testing.assert_array_equal(output, folded(op, [a, b]))


@pytest.mark.parametrize("stream", [False, True])
@given(size=st.integers(0, 400) | st.integers(4000, 9000), to=st.integers(0, 64), source=st.integers(0, 64))
def test_copies(kernels: Kernels, stream: bool, size: int, to: int, source: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + source, np.uint8)[source:]
    place = Place(size, to)
    kernels.copy(place.content, data, stream=stream)
    place.check()
    np.testing.assert_array_equal(place.content, data)


def test_sanitizers_find_nothing(compile_kernels: Callable[..., Path]) -> None:
    driver = Path(__file__).with_name("sanitized_kernels.c")
    flags = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    try:
        program = compile_kernels("sanitized", *flags, driver)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no sanitizers")
    done = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100_000

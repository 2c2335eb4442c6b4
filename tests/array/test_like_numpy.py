"""Results, dtypes and errors that random programs found to differ from NumPy's; each case is one of them."""

import warnings

import numpy as np
import pytest
from tests.array.worlds import World, assert_same, run, whole

import dmesh
from dmesh import Layout

FOUR = World(1, 4, (4,))
TWO = World(2, 2, (4,))
NAN, INF = np.nan, np.inf
A = {
    "f": np.array([2.0, -1.0, 0.0, 3.5, 1.0]),
    "h": np.array([INF, 1.0, NAN, -2.0, 5.0], np.float16),
    "z": np.array([1 + 2j, 0, -1j, 2, 3 - 1j]),
    "i": np.array([3, -2, 0, 5, 1], np.int32),
    "s": np.array([3, -2, 0, 5, 1], np.int8),
    "u": np.array([3, 2, 0, 5, 1], np.uint64),
    "b": np.array([True, False, True, True, False]),
    "m": np.arange(12.0).reshape(3, 4),
    "k": np.arange(12).reshape(4, 3) % 5,
    "n": np.array(3.0),
    "t": np.array(True),
    "d": np.array([5, 1, -3, 8, 2], "m8[s]"),
    "e": np.arange(12, dtype="m8[ms]").reshape(4, 3),
}


def on(mesh, values):
    layout = ["unsharded"] * values.ndim
    if values.ndim:
        layout[0] = "x"
    return dmesh.copy_to_mesh(values, Layout(layout, mesh), uneven=True)


def outcome(function, arrays):
    """Returns a result and what became of the arrays, or the type of the error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            result = function(**arrays)
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            return error
    return [whole(one) for one in (result, *arrays.values()) if one is not None]


def compare(mesh, function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    theirs = outcome(function, {name: A[name].copy() for name in names})
    mine = outcome(function, {name: on(mesh, A[name]) for name in names})
    if isinstance(theirs, Exception):
        assert isinstance(mine, Exception), f"NumPy raises {theirs!r}"
        assert isinstance(mine, type(theirs)) or isinstance(theirs, type(mine))
        return
    if isinstance(mine, Exception):
        raise mine
    assert_same(mine, theirs)


CASES = {
    # a sum that is partial
    "partial * infinity": lambda f: np.sum(f) * INF,
    "partial / 0": lambda f: np.sum(f) / 0,
    "partial / 0.0 of rows": lambda m: m.sum(axis=0) / 0.0,
    "partial * nan": lambda f: NAN * np.sum(f),
    "partial * 2": lambda f: np.sum(f) * 2 / 4,
    "sum of dtype bool": lambda i: np.sum(i, dtype=bool),
    "sum to bool": lambda i, t: np.sum(i, out=t),
    "prod of dtype bool": lambda i: np.prod(i, dtype=bool),
    # reductions
    "nanvar of infinity": lambda h: np.nanvar(h),
    "nanstd of infinity": lambda h: np.nanstd(h, axis=0),
    "min of narrower dtype": lambda i: np.minimum.reduce(i, dtype=np.int8),
    "sum along the axis of a number": lambda n: np.sum(n, axis=0, keepdims=True),
    "any along the last axis of a number": lambda n: np.any(n, axis=-1),
    "sum along the second axis of a number": lambda n: np.sum(n, axis=1),
    "argmax of a number": lambda n: np.argmax(n, axis=0),
    "any to float": lambda f, n: np.any(f, out=n),
    "argmax to an unsafe dtype": lambda f, n: np.argmax(f, out=n),
    "nanmean of dtype int": lambda f: np.nanmean(f, dtype=int),
    "std to int": lambda h, i: np.std(h, axis=0, keepdims=True, out=i[:1]),
    "average by weights of 0": lambda f: np.average(f, weights=f - f),
    "average": lambda f: np.average(f, weights=abs(f)),
    "cumsum of a number": lambda n: np.cumsum(n, axis=0),
    "cumulative_prod of a number": lambda n: np.cumulative_prod(n),
    "matrix_rank of a vector": lambda f: np.linalg.matrix_rank(f),
    "mean of times": lambda d: np.mean(d),
    "mean of times by rows": lambda e: e.mean(axis=0),
    "sum of times": lambda d: np.sum(d, initial=1, keepdims=True),
    "cumsum of times": lambda e: np.cumsum(e, axis=0),
    "max of times": lambda e: np.max(e, axis=0, initial=np.timedelta64(2, "s")),
    "clip of times": lambda d: np.clip(d, 0, np.timedelta64(3, "s")),
    "gradient of times": lambda e: np.gradient(e, axis=0),
    # products
    "vdot of booleans": lambda b: np.vdot(b, b),
    "conj of booleans": lambda b: b.conj(),
    "diagonal of no square": lambda m: np.einsum("ii->i", m),
    "trace of no square": lambda m: np.einsum("ii", m),
    "lost dots": lambda m: np.einsum("i...,i...->i", m, m),
    "tensordot beyond the axes": lambda m, k: np.tensordot(m, k, ([3], [0])),
    "vecmat of too few dimensions": lambda f: np.vecmat(f, f),
    "multi_dot of three vectors": lambda f: np.linalg.multi_dot([f, f, f]),
    # dtypes
    "outer with a Python number": lambda h: np.subtract.outer(h, 2),
    "outer of a Python number": lambda h: np.maximum.outer(2.0, h),
    "clip of three dtypes": lambda b, h: np.clip(b, 2.0, h),
    "clip by an integer beyond the dtype": lambda s: np.clip(s, 0, 300),
    "select of weak and strong": lambda b, h: np.select([b, ~b], [h, b], 1),
    "select by integers": lambda i, f: np.select([i], [f]),
    "histogram of booleans": lambda b: np.histogram(b, 3)[0],
    "full_like of a large float": lambda u: np.full_like(u, 1e300, dtype=np.float32),
    "full_like of a float": lambda u: np.full_like(u, 2.5),
    "full_like of a large integer": lambda s: np.full_like(s, np.int64(300)),
    "pad by -1": lambda u: np.pad(u, 1, constant_values=-1),
    "pad by less than nothing": lambda u: np.pad(u, -1),
    "gradient of booleans": lambda b: np.gradient(b),
    "ediff1d of booleans": lambda b: np.ediff1d(b),
    "unravel_index of booleans": lambda b: np.unravel_index(b, (3, 4)),
    "trapezoid": lambda z: np.trapezoid(z * INF),
    "casting equiv": lambda f: np.multiply(2.0, f.astype("f4"), casting="equiv"),
    # shapes and indices
    "column_stack of numbers": lambda n: np.column_stack([n, n]),
    "nanvar of too few": lambda f: np.nanvar(f[:2], ddof=3),
    "nanvar of too few integers": lambda i: np.nanvar(i[:2], ddof=3),
    "take from nothing": lambda m: np.take(m[:0], [0], axis=0, mode="clip"),
    "put into nothing": lambda f: np.put(f[:0], [0], 1, mode="wrap"),
    "take from a number": lambda n: np.take(n, [0], axis=0),
    "lists that do not fit": lambda m: m[[0, 1], [0, 1, 2]],
    "item of a number": lambda n: n.item(0),
    "item from the end": lambda m: m.item(-1),
    "item beyond the end": lambda m: m.item(12),
    "out that is larger": lambda n, f: np.add(n, n, out=f),
    "out that is smaller": lambda n, f: np.add(n, f, out=n),
    "where that is larger": lambda n, b: np.add(n, n, out=n, where=b),
    "mask = matrix": lambda m: m.__setitem__(m > 3, m),
    "mask = row of a matrix": lambda f, b: f.__setitem__(b, f[None, :3]),
    # writing
    "place of another dtype": lambda i, b, n: np.place(i, b, n),
    "putmask of another dtype": lambda i, b, n: np.putmask(i, b, n),
    "putmask of one": lambda m: np.putmask(m, m > 3, m[:1, :1]),
    "copyto of -1": lambda u: np.copyto(u, -1),
    "copyto of a float": lambda i: np.copyto(i, 2.5),
}  # fmt: skip


@pytest.mark.parametrize("world", [FOUR, TWO], ids=["one client", "two clients"])
def test_results_and_errors_are_those_of_numpy(world):
    def program(mesh):
        wrong = []
        for name, function in CASES.items():
            try:
                compare(mesh, function)
            except Exception as error:  # noqa: BLE001 -- all of them are reported
                wrong.append(f"{name}: {type(error).__name__}: {error}"[:500])
        return wrong

    for wrong in run(world, program):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "function",
    [
        lambda f: np.var(f, dtype=np.uint8),
        lambda z: np.std(z, dtype=np.float64),
    ],
)
def test_a_variance_whose_mean_is_rounded_is_refused(function):
    def program(mesh):
        (name,) = function.__code__.co_varnames
        with pytest.raises(dmesh.errors.UnshardableError, match="dtype="):
            function(on(mesh, A[name]))

    run(FOUR, program)

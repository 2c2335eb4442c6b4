# ruff: noqa: E501
"""The Python array API standard, 2024.12, by `dmesh.array_api`: names, signatures, dtypes, results, special values.

What is compared with is array-api-strict. Arrays are sharded: their first dimension is cut, evenly or not.
"""

import inspect
import itertools
import math
import operator
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.array import standard
from tests.array.standard import NAMED_KINDS, Array, Call, strict, xp
from tests.array.worlds import World, run

import dmesh

WORLDS = {"4 devices": World(1, 4, (4,)), "2 clients": World(2, 2, (4,))}


BOTH = pytest.mark.parametrize("world", ["4 devices", pytest.param("2 clients", marks=pytest.mark.slow)])


def ids(name):
    return ".".join(filter(None, name)) if isinstance(name, tuple) else None


def on(world, program, policy="forbid"):
    """Run a program as all clients of a world, with its mesh as the default one, and return one's result."""

    def work(mesh):
        with dmesh.default_mesh(mesh), dmesh.implicit_gather(policy), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return program()

    found = run(WORLDS[world], work)
    for other in found[1:]:
        standard.assert_same(other, found[0], "one client's result, and another one's")
    return found[0]


def test_the_page_has_the_numbers_of_tests():
    page = (Path(__file__).resolve().parents[2] / "docs" / "arrays.md").read_text()
    rows = {
        match[1]: (int(match[2]), int(match[3]))
        for match in re.finditer(r"^\| ([\w ,]+) \| (\d+) \| (\d+) \|$", page, re.M)
    }
    operators = {**standard.OPERATORS, **standard.IN_PLACE, **standard.REFLECTED}
    assert rows == {
        "functions, by name": (len(standard.NAMES), 0), "functions, by signature": (len(standard.NAMES), 0),
        "methods and attributes of arrays": (len(standard.METHODS + standard.ATTRIBUTES), 0),
        "methods, by signature": (len(standard.METHODS) - 1, 0), "constants and dtypes": (len(standard.CONSTANTS + standard.DTYPES), 0),
        "results of functions, for random arguments": (len(standard.CASES), 0),
        "special values, and pairs of them": (len(SPECIAL), sum(bool(one.marks) for one in SPECIAL)),
        "dtypes of results": (len(standard.BINARY), 0), "operators": (len(operators), 0), "indices, read and written": (len(INDICES), 0),
    }  # fmt: skip


def test_every_function_has_cases():
    assert set(standard.NAMES) == set(standard.CASES) | set(standard.UNCOMPARED)


@pytest.mark.parametrize("name", standard.NAMES, ids=ids)
def test_functions_are_there(name):
    assert callable(standard.find(xp, *name))
    assert name[1] in (getattr(xp, name[0]) if name[0] else xp).__all__


@pytest.mark.parametrize("name", [*standard.METHODS, *standard.ATTRIBUTES])
def test_arrays_have(name):
    assert hasattr(dmesh.DTensor, name)


@pytest.mark.parametrize("name", [*standard.CONSTANTS, *standard.DTYPES])
def test_constants_and_dtypes_are_there(name):
    mine, theirs = getattr(xp, name), getattr(strict, name)
    assert (
        np.dtype(mine).name == name
        if name in standard.DTYPES
        else mine is theirs or mine == theirs or math.isnan(mine)
    )


@pytest.mark.parametrize("name", standard.NAMES, ids=ids)
def test_signatures(name):
    function = standard.find(xp, *name)
    expected = standard.signature(*name)
    if isinstance(function, np.ufunc):
        assert function.nin == len([p for p in expected.parameters.values() if p.kind is p.POSITIONAL_ONLY])
        return
    if inspect.isclass(function):
        return
    found = inspect.signature(function).parameters
    positional = [p for p in found.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    anything = any(p.kind is p.VAR_KEYWORD for p in found.values())
    at = 0
    for p in expected.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            assert any(q.kind is p.kind for q in found.values())
        elif p.kind is p.POSITIONAL_ONLY:
            if not any(q.kind is q.VAR_POSITIONAL for q in found.values()):
                assert p.default is p.empty or positional[at].default is not p.empty, p
            at += 1
        elif p.kind is p.POSITIONAL_OR_KEYWORD:
            assert p.name in found
            assert len(positional) > at
            at += 1
        else:
            assert p.name in found or anything, f"no keyword {p.name}"
            if p.name in found:
                assert found[p.name].kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
                assert (found[p.name].default is p.empty) == (p.default is p.empty), p


@pytest.mark.parametrize("name", [name for name in standard.METHODS if name != "__array_namespace__"])
def test_signatures_of_methods(name):
    def arguments(kind):
        return [p for p in inspect.signature(getattr(kind, name)).parameters.values() if p.name != "self"]

    expected, found = arguments(type(strict.ones(1))), arguments(dmesh.DTensor)
    assert sum(p.default is p.empty for p in found) == sum(p.default is p.empty for p in expected)
    assert {p.name for p in expected if p.default is not p.empty} <= {
        p.name for p in found if p.default is not p.empty
    }


def compare(name, cases, world, policy="forbid", sign=False):
    expected = []
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected.append(standard.plain(standard.call(standard.find(strict, *name), case, strict)))

    def program():
        function = standard.find(xp, *name)
        return [standard.plain(standard.call(function, case, xp)) for case in cases]

    for case, mine, theirs in zip(cases, on(world, program, policy), expected, strict=True):
        standard.assert_same(mine, theirs, f"{'.'.join(name)}{case}", sign=sign)


GATHERS = {
    ("", "take_along_axis"), ("", "where"),
    *(("linalg", name) for name in ("eigh", "eigvalsh", "matrix_norm", "matrix_rank", "pinv", "qr", "svd", "svdvals")),
    *(("fft", name) for name in standard.FUNCTIONS["fft"] if "shift" not in name and "freq" not in name),
}  # fmt: skip
"""Functions that need whole rows, columns or matrices on one device for some arrays, or whose operands may be cut
differently: the policy must allow it."""


def results(name, world, data, count):
    cases = [standard.CASES[name](data.draw) for _ in range(count)]
    compare(name, cases, world, "allow" if name in GATHERS else "forbid")


@pytest.mark.parametrize("name", standard.CASES, ids=ids)
@settings(max_examples=2, phases=(Phase.generate,))
@given(data=st.data())
def test_some_results(name, data):
    results(name, "4 devices", data, 4)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", standard.CASES, ids=ids)
@settings(max_examples=8, phases=(Phase.generate,))
@given(data=st.data())
def test_results(name, world, data):
    results(name, world, data, 8)


# Elementwise functions --------------------------------------------------------------------------------------

_REAL = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    -2.0,
    3.0,
    -3.0,
    1e300,
    -1e300,
    math.pi,
    5e-324,
]


def special(dtype):
    if dtype.startswith("float"):
        with np.errstate(over="ignore"):
            return np.array(_REAL, dtype)
    parts = _REAL[:9]
    return np.array([complex(a, b) for a, b in itertools.product(parts, parts)], dtype)


SPECIAL = [
    pytest.param(name, kinds, marks=[pytest.mark.xfail(reason="NumPy's sign of an infinite or NaN part is not the standard's")]
                 if (name, kinds) == ("sign", standard.COMPLEX) else [], id=f"{name}-{kinds[0][:-2]}")
    for name, kind in (standard.UNARY | standard.BINARY).items() for kinds in (standard.FLOATS, standard.COMPLEX)
    if set(kinds) <= set(standard.KINDS[kind])
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("name", "dtypes"), SPECIAL)
def test_special_values(name, dtypes, world):
    """Each special value, and each pair of two, gives what the standard says, or what NumPy does instead."""
    cases = []
    for dtype in dtypes:
        x = special(dtype)
        if name in standard.UNARY:
            cases.append(Call((Array(x),)))
        else:
            pairs = x[:24]
            cases.append(Call((Array(np.repeat(pairs, len(pairs))), Array(np.tile(pairs, len(pairs))))))
    compare(("", name), cases, world, sign=True)


@pytest.mark.parametrize("name", standard.BINARY)
def test_dtypes_of_results(name):
    """Every pair of dtypes that the standard lets meet, and every dtype with a Python number."""
    function, mine, numbers = (
        getattr(strict, name),
        getattr(xp, name),
        {"b": True, "i": 1, "u": 1, "f": 1.0, "c": 1j},
    )
    pairs = list(itertools.product(standard.KINDS[standard.BINARY[name]], repeat=2))

    def program():
        for a, b in pairs:
            try:
                expected = function(
                    strict.ones(5, dtype=getattr(strict, a)), strict.ones(5, dtype=getattr(strict, b))
                )
            except TypeError:
                continue
            found = mine(xp.ones(5, dtype=getattr(xp, a)), xp.ones(5, dtype=getattr(xp, b)))
            assert found.dtype == np.asarray(expected._array).dtype, (a, b)
        for a in standard.KINDS[standard.BINARY[name]]:
            x = xp.ones(5, dtype=getattr(xp, a))
            number = numbers[x.dtype.kind]
            kept = (
                x.dtype
                if np.asarray(function(strict.ones(5, dtype=getattr(strict, a)), number)._array).dtype != bool
                else bool
            )
            assert mine(x, number).dtype == mine(number, x).dtype == kept

    on("4 devices", program)


@BOTH
@pytest.mark.parametrize("name", [*standard.OPERATORS, *standard.IN_PLACE, *standard.REFLECTED])
def test_operators(name, world):
    function = (standard.OPERATORS | standard.IN_PLACE | standard.REFLECTED)[name]
    unary = function in standard.UNARY
    cases = []
    for dtype in standard.KINDS[(standard.UNARY | standard.BINARY)[function]]:
        x, y = (standard.values(dtype, (5, 3), seed, 0 if function == "pow" else -5) for seed in (1, 2))
        x, y = (np.where(one == 0, np.ones((), one.dtype), one) for one in (x, y))
        if "shift" in function:
            x, y = abs(x), abs(y)
        others = (
            [()]
            if unary
            else [
                (Array(y),),
                (Array(y[:1]),),
                ({"b": True, "i": 2, "u": 2, "f": 1.5, "c": 2j}[y.dtype.kind],),
            ]
        )
        cases += [Call((Array(x), *other)) for other in others]

    def apply(library):
        results = []
        for case in cases:
            args = standard.made(case.args, library)
            before = args[0]
            result = getattr(before, name)(*args[1:])
            if name in standard.IN_PLACE:
                assert result is before
            results.append(standard.plain(result))
        return results

    for case, mine, theirs in zip(cases, on(world, lambda: apply(xp)), apply(strict), strict=True):
        standard.assert_same(mine, theirs, f"{name}{case}")


@BOTH
def test_nan_and_nothing_in_reductions(world):
    """NaN on one device is NaN in the result; the reduction of nothing is what NumPy has."""
    names = ("sum", "prod", "mean", "std", "var", "any", "all", "count_nonzero", "max", "min", "argmax", "argmin",
             "cumulative_sum", "cumulative_prod", "sort", "argsort")  # fmt: skip
    lists = (
        [1.0, math.nan, 2.0, 3.0, -1.0],
        [math.nan, 1.0, 2.0, 3.0, 0.0],
        [1.0, 2.0, 3.0, 0.0, math.nan],
        [math.inf, -math.inf, 1.0, 2.0],
    )
    empty = [(name, np.zeros(shape)) for name in names[:8] for shape in (0, (0, 3), (3, 0))]
    cases = [(name, np.array(values)) for name in names for values in lists] + empty

    def program():
        with pytest.raises(ValueError, match="zero-size"):
            xp.max(xp.zeros(0))
        return [getattr(xp, name)(xp.asarray(values)).full() for name, values in cases]

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for (name, values), mine in zip(cases, on(world, program), strict=True):
            theirs = getattr(np, name)(values, **({"stable": True} if "sort" in name else {}))
            standard.assert_same(mine, np.asarray(theirs), f"{name}({values})")


@settings(max_examples=100)
@given(data=st.data())
def test_ranges_have_numpys_bits(data):
    start, stop, step = (
        data.draw(st.one_of(st.integers(-9, 9), st.floats(-9, 9, allow_subnormal=False))) for _ in range(3)
    )
    step = step if abs(step) > 0.01 else 0.1
    dtype = data.draw(st.sampled_from([None, "float32", "float64"]))
    n, endpoint = data.draw(st.integers(0, 9)), data.draw(st.booleans())
    mesh = dmesh.create_mesh([("x", 1)])
    with dmesh.default_mesh(mesh):
        mine = (
            xp.arange(start, stop, step, dtype=dtype).full(),
            xp.linspace(start, stop, n, endpoint=endpoint).full(),
        )
    theirs = np.arange(start, stop, step, dtype=dtype), np.linspace(start, stop, n, endpoint=endpoint)
    assert [(x.dtype, x.shape, x.tobytes()) for x in mine] == [
        (x.dtype, x.shape, x.tobytes()) for x in theirs
    ]


@pytest.mark.parametrize(
    ("limits", "dtype"),
    [
        ((2**62, 2**62 + 5), "int64"),
        ((2**64 - 4, 2**64 - 1), "uint64"),
        ((-(2**63), 3 - 2**63), "int64"),
        ((250, 255), "uint8"),
        ((254, 256, 2), "uint8"),
    ],
)
def test_ranges_at_the_limits_of_integers(limits, dtype):
    with dmesh.default_mesh(dmesh.create_mesh([("x", 1)])):
        found = xp.arange(*limits, dtype=getattr(xp, dtype)).full()
    assert (found.dtype, found.tolist()) == (dtype, list(range(*limits)))


@BOTH
def test_results_have_names(world):
    def program():
        for matrix in (xp.eye(4), xp.ones((3, 2, 2))):
            sign, logarithm = (found := xp.linalg.slogdet(matrix))
            assert found.sign is sign and found.logabsdet is logarithm  # noqa: PT018
        x = xp.asarray([[1, 2, 1], [2, 1, 3]])
        assert xp.unique_all(x)._fields == ("values", "indices", "inverse_indices", "counts")
        assert xp.unique_counts(x).counts.full().tolist() == [3, 2, 1]
        assert xp.unique_inverse(x).inverse_indices.shape == x.shape

    on(world, program)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x[5, ...], IndexError), (lambda x: xp.sum(x, axis=5), IndexError), (lambda x: xp.expand_dims(x, axis=5), IndexError),
        (lambda x: xp.fft.fft(x, axis=5), IndexError), (lambda x: xp.squeeze(x, axis=0), ValueError), (lambda x: xp.broadcast_to(x, (2, 2)), ValueError),
        (lambda x: xp.reshape(x, (7,)), ValueError), (lambda x: xp.reshape(x, (15,), copy=False), ValueError), (lambda x: bool(x), ValueError),
        (lambda x: float(x[0, 0] * 1j), TypeError), (lambda x: operator.index(x[0, 0]), TypeError), (lambda x: xp.concat([x, xp.ones(3)]), ValueError),
        (lambda x: xp.linalg.cross(x[:, :2], x[:, :2]), ValueError), (lambda x: xp.linalg.solve(x, x), ValueError), (lambda x: xp.meshgrid(x[0], indexing="ji"), ValueError),
    ],
)  # fmt: skip
def test_errors(call, error):
    def program():
        with pytest.raises(error):
            call(xp.ones((5, 3)))

    on("4 devices", program)


def test_an_array_without_dimensions():
    def program():
        x = xp.asarray(3.5)
        assert x[()].full() == x[...].full() == 3.5
        assert x[None].shape == (1,)
        x[()] = 2.0
        assert float(x) == 2
        x[...] = 4
        return float(x)

    assert on("4 devices", program) == 4


# The array --------------------------------------------------------------------------------------------------

INDICES = [
    (0, ...), (-1, ...), (0, 1), (slice(None), ...), (slice(1, None, 2), ...), (slice(None, None, -1), ...), (slice(2, 2), ...), (slice(None), 1), ..., (..., 0),
    (None, ...), (None, 0, ...), (..., None),
    (slice(1, 4), slice(None, None, 2)), (Array(np.array([0, 3])), Array(np.array([1, 0]))), (Array(np.array([0, 3])), 1), (1, Array(np.array([0, 2]))),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (5, 3)])
def test_a_mask_without_dimensions_writes_all_or_nothing(shape, there, world):
    expected = np.full(shape, -7.0 if there else 1.0)

    def program():
        x, y = xp.ones(shape), xp.ones(shape)
        x[xp.asarray(there)] = -7.0
        y[xp.asarray(there)] = xp.full((1, *shape), -7.0)
        return [x.full(), y.full()]

    standard.assert_same(on(world, program), [expected, expected])


@BOTH
@pytest.mark.parametrize(
    ("shape", "mask"), [((4,), (0,)), ((4, 3), (0,)), ((4, 3), (4, 0)), ((4, 3), (0, 3))]
)
def test_a_mask_may_be_empty_along_any_dimension(shape, mask, world):
    values = np.arange(float(np.prod(shape))).reshape(shape)
    found = on(world, lambda: xp.asarray(values)[xp.zeros(mask, dtype=xp.bool)].full())
    standard.assert_same(found, values[np.zeros(mask, bool)])


@BOTH
@pytest.mark.parametrize("dtype", ["int64", "uint64", "float32", "complex64", "bool"])
def test_arrays_are_filled_with_an_array_without_dimensions(dtype, world):
    value = np.asarray(1, dtype)
    found = on(
        world,
        lambda: [xp.full(5, xp.asarray(value)).full(), xp.full(5, xp.asarray([1])[0], dtype=dtype).full()],
    )
    standard.assert_same(found, [np.full(5, value), np.full(5, value)])


@BOTH
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
@pytest.mark.filterwarnings("ignore:`axes` should not be `None`:DeprecationWarning")
def test_transforms_of_given_lengths_are_those_of_the_last_dimensions(name, world):
    values, lengths = np.arange(30.0).reshape(5, 2, 3), [(4,), (2, 5), (5, 2, 4)]
    found = on(
        world, lambda: [getattr(xp.fft, name)(xp.asarray(values), s=s).full() for s in lengths], "allow"
    )
    last = [tuple(range(-len(s), 0)) for s in lengths]
    expected = [getattr(np.fft, name)(values, s, axes) for s, axes in zip(lengths, last, strict=True)]
    standard.assert_same(found, expected)


@BOTH
@pytest.mark.parametrize("name", ["vecdot", "matvec", "vecmat"])
def test_products_of_vectors_repeat_no_length_of_one(name, world):
    function = getattr(np, name)
    shapes = {"vecdot": ((4, 1), (4, 3)), "matvec": ((4, 1), (3,)), "vecmat": ((1,), (3, 4))}[name]

    def program():
        with pytest.raises(ValueError, match="1 and 3"):
            function(xp.ones(shapes[0]), xp.ones(shapes[1]))

    on(world, program, "allow")


@BOTH
@pytest.mark.parametrize("shapes", [((0, 3), (1, 3)), ((1, 3), (0, 3)), ((2, 0, 3), (2, 1, 3))])
def test_products_of_no_vectors_with_one_are_none(shapes, world):
    x, y = np.ones(shapes[0]), np.ones(shapes[1])
    found = on(world, lambda: xp.vecdot(xp.asarray(x), xp.asarray(y)).full(), "allow")
    standard.assert_same(found, np.vecdot(x, y))


@BOTH
@pytest.mark.parametrize("number", range(len(INDICES)))
def test_reading_and_writing_by_index(number, world):
    index, values = INDICES[number], np.arange(15.0).reshape(5, 3)

    def apply(library, assign=True):
        key = standard.made(index, library)
        x = library.asarray(values)
        taken = x[key]
        result = [standard.plain(taken)]
        if assign:
            x[key] = taken * 2 + 1
            result.append(standard.plain(x))
            x[key] = -7.0
            result.append(standard.plain(x))
        return result

    lists = isinstance(index, tuple) and any(isinstance(one, Array) or one is None for one in index)
    standard.assert_same(on(world, lambda: apply(xp, not lists)), apply(strict, not lists), str(index))


@BOTH
def test_masks(world):
    values = np.arange(15.0).reshape(5, 3)

    def apply(library):
        x = library.asarray(values)
        results = [
            x[x > 4],
            x[library.asarray([True, False, True, True, False])],
            x[library.asarray(np.zeros((5, 3), bool))],
        ]
        for truth in (True, False):
            results.append(library.asarray(3.0)[library.asarray(truth)])
        x[x > 4] = 0.0
        return standard.plain([*results, x])

    standard.assert_same(on(world, lambda: apply(xp)), apply(strict))


@BOTH
def test_numbers(world):
    def apply(library):
        found = []
        for value in (True, 3, -2.5, 1 + 2j):
            x = library.asarray([value])[0]
            found += [bool(x)] + ([complex(x)] if not isinstance(value, bool) else [])
            found += [int(x), float(x)] if not isinstance(value, complex) else []
        return [
            *found,
            [10, 20, 30, 40][library.asarray([3])[0]],
            f"{library.asarray([1.5])[0]:.1f}" if library is xp else "1.5",
        ]

    assert on(world, lambda: apply(xp)) == apply(strict)


@BOTH
def test_attributes(world):
    def apply(library):
        x = library.asarray(np.arange(30.0).reshape(5, 2, 3))
        return [x.shape, x.ndim, x.size, standard.plain(x.mT), standard.plain(x[0, ...].T)]

    standard.assert_same(on(world, lambda: apply(xp)), apply(strict))


@BOTH
def test_namespace_and_devices(world):
    def program():
        x = xp.ones((5, 3))
        assert x.__array_namespace__() is x.__array_namespace__(api_version="2024.12") is xp
        with pytest.raises(ValueError, match=r"2024\.12 of the standard"):
            x.__array_namespace__(api_version="2099.12")
        info = xp.__array_namespace_info__()
        assert x.device == info.default_device() == dmesh.get_default_mesh() == info.devices()[0]
        assert x.to_device(x.device) is x.to_device(x.layout) is x
        whole = x.to_device(dmesh.Layout.replicated(x.mesh, 2))
        assert whole.layout.is_fully_replicated()
        assert not x.layout.is_fully_replicated()
        assert xp.ones_like(x, device=whole.layout).layout == whole.layout
        assert xp.asarray(whole) is whole
        assert xp.asarray(whole, copy=True) is not whole
        with pytest.raises(ValueError, match="copy"):
            xp.asarray(whole, dtype=xp.float32, copy=False)
        with pytest.raises(ValueError, match="copy"):
            xp.asarray([1.0], copy=False)
        with pytest.raises(dmesh.errors.LayoutError, match="device="):
            xp.ones(3, device="cpu")
        with pytest.raises(dmesh.errors.MeshMismatchError, match="own mesh"):
            x.to_device("cpu")
        with pytest.raises(ValueError, match="streams"):
            x.to_device(x.device, stream=1)

    on(world, program)


def test_inspection():
    def program():
        mine, theirs = xp.__array_namespace_info__(), strict.__array_namespace_info__()
        assert set(mine.capabilities()) == set(theirs.capabilities())
        assert {key: np.dtype(one).name for key, one in mine.default_dtypes(device=mine.default_device()).items()} == {
            "real floating": "float64", "complex floating": "complex128", "integral": "int64", "indexing": "int64"
        }  # fmt: skip
        for kind in (None, *NAMED_KINDS, ("bool", "integral")):
            assert set(mine.dtypes(kind=kind)) == set(theirs.dtypes(kind=kind))

    on("4 devices", program)
    assert xp.__array_api_version__ == "2024.12"


def test_arrays_lie_on_all_devices_by_default():
    """Dimension by dimension along the mesh's; outside of any `default_mesh`, along a row of all devices."""

    def program(mesh):
        with dmesh.default_mesh(mesh):
            layouts = [xp.ones(shape).layout.sharding_specs for shape in ((), 5, (5, 3), (5, 3, 2))]
            assert layouts == [[], ["x"], ["x", "y"], ["x", "y", "unsharded"]]
            assert xp.asarray(np.ones((5, 3))).layout.sharding_specs == ["x", "y"]
        x = xp.ones(5)
        assert (x.mesh.dim_names, x.mesh.shape()) == (["x"], [4])
        assert x.spec.shards == 4

    run(World(2, 2, (2, 2)), program)


@BOTH
def test_dlpack(world):
    def program():
        x = xp.from_dlpack(np.arange(5.0))
        assert x.__dlpack_device__() == (1, 0)
        assert xp.from_dlpack(x) is x
        assert xp.from_dlpack(x, copy=True) is not x
        with pytest.raises(dmesh.errors.ImplicitGatherError):
            np.from_dlpack(x)
        with pytest.raises(BufferError, match="without a copy"):
            np.from_dlpack(x, copy=False)
        return np.from_dlpack(x.to_device(dmesh.Layout.replicated(x.mesh, 1)))

    assert on(world, program).tolist() == [0, 1, 2, 3, 4]


@BOTH
def test_arrays_without_values(world):
    def program():
        like = xp.empty_like(xp.ones((5, 3)), dtype=xp.int8)
        return [(x.shape, x.dtype.name) for x in (xp.empty((5, 3)), xp.empty(7, dtype=xp.int8), like)]

    assert on(world, program) == [((5, 3), "float64"), ((7,), "int8"), ((5, 3), "int8")]


@BOTH
@pytest.mark.parametrize("name", ["eigh", "qr", "svd"])
@pytest.mark.parametrize("shape", [(3, 4, 4), (5, 2, 2), (4, 4)])
def test_factorizations(name, shape, world):
    values = standard.values("float64", shape, 1)
    values = values + np.swapaxes(values, -1, -2)

    def program():
        x, linalg = xp.asarray(values), xp.linalg
        if name == "eigh":
            found = linalg.eigh(x)
            back = (found.eigenvectors * found.eigenvalues[..., None, :]) @ found.eigenvectors.mT
        elif name == "qr":
            found = linalg.qr(x, mode="reduced")
            back = found.Q @ found.R
            assert linalg.qr(x, mode="complete").Q.shape == shape
        else:
            found = linalg.svd(x, full_matrices=False)
            back = (found.U * found.S[..., None, :]) @ found.Vh
            assert linalg.svd(x, full_matrices=True).U.shape == shape
        return back.full()

    standard.assert_same(on(world, program, "allow"), values)


@settings(max_examples=10)
@given(data=st.data())
def test_hypothesis_makes_arrays_of_the_namespace(data):
    """Its strategies for the array API write element by element, reshape, and look for equal elements."""
    from hypothesis.extra.array_api import make_strategies_namespace

    mesh = dmesh.create_mesh([("x", 1)])
    with dmesh.default_mesh(mesh):
        strategies = make_strategies_namespace(xp, api_version="2024.12")
        x = data.draw(
            strategies.arrays(strategies.numeric_dtypes(), strategies.array_shapes(max_dims=2, max_side=4))
        )
        assert isinstance(x, dmesh.DTensor)
        assert bool(xp.all(xp.equal(x, x) | xp.isnan(x)))


def test_the_elements_of_an_array_one_by_one():
    def program():
        x = xp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        with pytest.raises(dmesh.errors.ImplicitGatherError, match="iteration"):
            iter(x)
        with dmesh.implicit_gather("allow"):
            return [row.full() for row in x]

    assert np.array(on("2 clients", program)).tolist() == [[1, 2], [3, 4], [5, 6]]

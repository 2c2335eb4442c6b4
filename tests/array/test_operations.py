"""Every operation equals NumPy's: random shapes, dtypes, meshes, layouts and partial sums."""

import warnings

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.array import operations as ops
from tests.array.worlds import WORLDS, Made, arrays, assert_same, lengths, run, specs, whole

import dmesh


def compare(mesh, function, made, what):
    """Compares an operation with NumPy's, and what it moves with what is explained."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            expected, failure = function(*(one.values.copy() for one in made)), None
        except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            expected, failure = None, error
        with dmesh.implicit_gather("allow"):
            operands = [one.on(mesh) for one in made]
            before = [one.spec for one in operands]
            try:
                explained = dmesh.explain(function, *operands)
            except dmesh.errors.UnshardableError:
                explained = None  # it depends on the elements
            except (ValueError, IndexError, TypeError, ZeroDivisionError):
                assert failure is not None, what
                return
            try:
                with dmesh.debug.bytes_moved() as moved:
                    result = function(*operands)
            except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
                if failure is None:
                    raise AssertionError(what) from error
                return
            assert failure is None, f"{what}: NumPy raises {failure!r}"
            if explained is not None:
                own = explained.bytes_by_client.get(dmesh.client_id(), 0)
                assert moved.total == own, f"{what}: {moved.by_kind} moved, {explained} explained"
            assert_same(whole(result), expected, what)
            for one, operand, spec in zip(made, operands, before, strict=True):
                assert operand.spec is spec
                assert_same(operand.full(), one.values, f"{what}: an operand has changed")


EXAMPLES = settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
"""A failure is not made smaller: each attempt would end a cluster, and start another one."""
FAMILIES = {"unary": ops.UNARY, "whole": ops.WHOLE}


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data())
def test_operations_of_one_array(family, data):
    table = FAMILIES[family]
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(table)), min_size=4, max_size=4, unique=True))
    shape = data.draw(st.lists(lengths, min_size=1 if family == "whole" else 0, max_size=3))
    cases = [(name, table[name][0], [data.draw(arrays(world, shape, table[name][1]))]) for name in names]
    run(world, in_turn, cases)


def in_turn(mesh, cases):
    for name, function, made in cases:
        compare(mesh, function, made, f"{name} of {made}")


@EXAMPLES
@given(data=st.data())
def test_operations_of_two_arrays(data):
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(ops.BINARY)), min_size=4, max_size=4, unique=True))
    shape = data.draw(st.lists(lengths, min_size=0, max_size=3))
    cases = []
    for name in names:
        function, dtypes = ops.BINARY[name]
        left = [1 if data.draw(st.integers(0, 4)) == 0 else n for n in shape]
        right = [1 if data.draw(st.integers(0, 4)) == 0 else n for n in shape][
            data.draw(st.integers(0, len(shape))) :
        ]
        cases.append(
            (
                name,
                function,
                [data.draw(arrays(world, left, dtypes)), data.draw(arrays(world, right, dtypes))],
            )
        )
    run(world, in_turn, cases)


@pytest.mark.parametrize("family", ["REDUCTIONS", "EXTREMES"])
@EXAMPLES
@given(data=st.data())
def test_reductions(family, data):
    table = getattr(ops, family)
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(table)), min_size=4, max_size=4, unique=True))
    shape = data.draw(st.lists(lengths, min_size=1, max_size=3))
    cases = []
    for name in names:
        function, dtypes = table[name]
        if name in ("median", "quantile", "percentile") and 0 in shape:
            continue
        axis = data.draw(
            st.sampled_from([None, *range(-len(shape), len(shape)), tuple(range(len(shape)))[:2]])
        )
        keepdims = data.draw(st.booleans())

        def reduced(a, function=function, axis=axis, keepdims=keepdims):
            return function(a, axis=axis, keepdims=keepdims)

        cases.append(
            (f"{name}(axis={axis}, keepdims={keepdims})", reduced, [data.draw(arrays(world, shape, dtypes))])
        )
    run(world, in_turn, cases)


@EXAMPLES
@given(data=st.data())
def test_operations_along_a_dimension(data):
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(ops.ALONG)), min_size=5, max_size=5, unique=True))
    shape = data.draw(st.lists(lengths, min_size=1, max_size=3))
    cases = []
    for name in names:
        function, dtypes = ops.ALONG[name]
        axis = data.draw(st.integers(-len(shape), len(shape) - 1))

        def along(a, function=function, axis=axis):
            return function(a, axis=axis)

        cases.append((f"{name}(axis={axis})", along, [data.draw(arrays(world, shape, dtypes))]))
    run(world, in_turn, cases)


@EXAMPLES
@given(data=st.data())
def test_matrices(data):
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(ops.MATRIX)), min_size=4, max_size=4, unique=True))
    shape = [data.draw(lengths), data.draw(lengths)]
    cases = [
        (name, ops.MATRIX[name][0], [data.draw(arrays(world, shape, ops.MATRIX[name][1]))]) for name in names
    ]
    run(world, in_turn, cases)


@EXAMPLES
@given(data=st.data())
def test_products(data):
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(ops.PRODUCTS)), min_size=3, max_size=3, unique=True))
    batch = data.draw(st.sampled_from([(), (), (3,), (2,)]))
    n, k, m = (data.draw(lengths) for _ in range(3))
    cases = []
    for name in names:
        function, dtypes = ops.PRODUCTS[name]
        lead = batch if name not in ("dot", "tensordot") else ()
        right = () if data.draw(st.booleans()) else lead
        a, b = (
            data.draw(arrays(world, (*lead, n, k), dtypes)),
            data.draw(arrays(world, (*right, k, m), dtypes)),
        )
        cases.append((name, function, [a, b]))
    run(world, in_turn, cases)


@EXAMPLES
@given(data=st.data())
def test_indexing(data):
    world = data.draw(st.sampled_from(WORLDS))
    shape = data.draw(st.lists(lengths, min_size=1, max_size=3))
    cases = []
    for _ in range(4):
        index = data.draw(st.sampled_from(ops.INDICES))
        cases.append((f"a[{index}]", lambda a, index=index: a[index], [data.draw(arrays(world, shape))]))
    run(world, in_turn, cases)


def assigned(a, value, index):
    b = a * 1
    c = b[...]
    b[index] = value
    return b, c if isinstance(c, dmesh.DTensor) else a * 1


@EXAMPLES
@given(data=st.data())
def test_assignment(data):
    world = data.draw(st.sampled_from(WORLDS))
    shape = data.draw(st.lists(lengths, min_size=1, max_size=3))
    made = data.draw(arrays(world, shape, ops.N))
    cases = []
    for _ in range(3):
        index = data.draw(st.sampled_from(ops.WRITABLE))
        try:
            target = made.values[index].shape
        except IndexError:
            continue
        kind = data.draw(st.sampled_from(["number", "array", "row"]))
        if kind == "number":
            cases.append((f"a[{index}] = 7", lambda a, index=index: assigned(a, 7, index), [made]))
            continue
        unique = not any(isinstance(x, (list, np.ndarray)) for x in index)
        value = data.draw(
            arrays(
                world,
                target if kind == "array" else target[1:],
                ops.N[:4] if made.values.dtype.kind != "c" else ops.N,
            )
        )
        if made.values.dtype.kind in "iu" and value.values.dtype.kind == "f":
            continue
        if not unique:
            continue
        cases.append(
            (
                f"a[{index}] = {kind} of {value}",
                lambda a, v, index=index: assigned(a, v, index),
                [made, value],
            )
        )
    run(world, in_turn, cases)


@EXAMPLES
@given(data=st.data())
def test_relayout(data):
    world = data.draw(st.sampled_from(WORLDS))
    shape = data.draw(st.lists(lengths, min_size=0, max_size=3))
    made = data.draw(arrays(world, shape, ("float64", "int32", "complex128")))
    targets = [data.draw(specs(world, len(shape))) for _ in range(3)]

    def program(mesh):
        x = made.on(mesh)
        for target in targets:
            layout = dmesh.Layout(list(target), mesh)
            explained = dmesh.explain(lambda y, layout=layout: dmesh.relayout(y, layout, uneven=True), x)
            with dmesh.debug.bytes_moved() as moved:
                x = dmesh.relayout(x, layout, uneven=True)
            assert moved.total == explained.bytes_by_client.get(dmesh.client_id(), 0)
            assert x.layout == layout
            assert not x.partial
            for region, block in zip(x.spec.regions, x.blocks, strict=True):
                assert_same(block, made.values[tuple(slice(a, b) for a, b in region)])
        assert_same(x.full(), made.values)

    run(world, lambda mesh: program(mesh))


def test_a_made_array_says_what_it_is():
    assert Made(np.zeros(3), ("x",)).partial == ""

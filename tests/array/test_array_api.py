"""The Python array API standard, 2024.12, by `dmesh.array_api`: names, signatures, dtypes, results, special values.

What is compared with is array-api-strict. Arrays are sharded: their first dimension is cut, evenly or not.
"""

import inspect
import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.array import standard
from tests.array.standard import Array, Call, strict
from tests.array.worlds import World, run

import dmesh
import dmesh.array_api as xp

import os; POLICY=os.environ.get("POL","allow")
pytestmark = pytest.mark.skipif(np.__version__ < "2.3", reason="NumPy has the standard's functions since 2.3")
WORLDS = {"4 devices": World(1, 4, (4,)), "2 clients": World(2, 2, (4,))}


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
    assert np.dtype(mine).name == name if name in standard.DTYPES else mine is theirs or mine == theirs or math.isnan(mine)


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
            assert p.name in found and len(positional) > at
            at += 1
        else:
            assert p.name in found or anything, f"no keyword {p.name}"
            if p.name in found:
                assert found[p.name].kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
                assert (found[p.name].default is p.empty) == (p.default is p.empty), p


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


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", standard.CASES, ids=ids)
@settings(max_examples=5, phases=(Phase.generate,))
@given(data=st.data())
def test_results(name, world, data):
    compare(name, [standard.CASES[name](data.draw) for _ in range(6)], world, POLICY)

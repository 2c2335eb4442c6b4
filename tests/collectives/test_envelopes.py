"""Descriptors of transfers: dtype, shape and tag are read from each that a send makes, and from no other."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from dmesh.collectives.envelope import parse
from dmesh.collectives.request import TRANSFER, describe
from dmesh.errors import CollectiveTypeError
from dmesh.testing import FakeCluster

STRUCTURED = [
    [("object", "u1")],
    [("x", "<f8", (2, 3)), ("names", [("first", "S4"), ("last", ">U3")])],
    np.dtype([("flag", "?"), ("x", "f8"), ("y", "i2")], align=True),
    {"names": ["b", "a"], "formats": ["i4", "u1"], "offsets": [8, 1], "itemsize": 16},
    [(("a title", "name"), "i4"), ("t", "M8[25s]")],
    [('it\'s "quoted"\\', "u1"), ("newline\n\t\x00", "u1"), ("日本 é \U0001f600", "u1"), (", ('x'", "u1")],
    [],
]


@pytest.mark.parametrize("given", STRUCTURED, ids=range(len(STRUCTURED)))
def test_structured_dtypes_are_read(given):
    dtype = np.dtype(given)
    assert parse(describe(TRANSFER, dtype, (2, 3), where="tag=5")[0]) == (dtype, (2, 3), 5)


@settings(max_examples=25)
@given(numpy_strategies.nested_dtypes().filter(lambda dtype: dtype.names and not dtype.hasobject))
def test_any_structured_dtype_is_read(dtype):
    assert parse(describe(TRANSFER, dtype, ())[0]) == (dtype, (), 0)


@given(st.text("[](){},:'\"\\ 019abu8Tre", max_size=30), st.integers(0, 2000))
def test_other_texts_are_refused_with_one_error(text, deep):
    for name in (f"[{text}", f"[('{text}', 'u1')", "[(" * deep, f"[('a', {text})]", f"{{{text}}}"):
        try:
            dtype, shape, tag = parse(described := f"{TRANSFER}({name}, shape (1,))")
        except CollectiveTypeError:
            continue
        assert describe(TRANSFER, dtype, shape, where=f"tag={tag}" if tag else "")[0] == described


def test_objects_are_received_while_another_thread_compiles(monkeypatch):
    """CPython's `ast` then fails with SystemError, until 3.12; here it always does."""

    def fail(*args, **kwargs):
        raise SystemError("AST constructor recursion depth mismatch (before=90, after=65)")

    def program():
        from dmesh import client_id, collectives

        if client_id() == 0:
            collectives.send_object({"rows": 300}, 1)
            collectives.send(np.zeros(4711, [("a", "u1"), ("b", "<f8")]), 1)
            return None
        return collectives.recv_object(0), len(collectives.recv(None, 0))

    with FakeCluster(2) as cluster, monkeypatch.context() as patched:
        patched.setattr(ast, "literal_eval", fail)
        received = cluster.run(program)[1]
    assert received == ({"rows": 300}, 4711)

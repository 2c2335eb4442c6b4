"""Values with a part for each replica, and how they go into and come out of nested structures."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.distribute.values import DistributedValues, Mirrored, PerReplica, regroup, select_replica
from dmesh.structure import flatten, map_structure, outline, rebuild


class Point(NamedTuple):
    x: Any
    y: Any


LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=3))
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(STRUCTURES)
def test_a_structure_is_rebuilt_from_its_leaves(structure: Any) -> None:
    again = rebuild(structure, flatten(structure))
    assert again == structure
    assert type(again) is type(structure)


@given(STRUCTURES)
def test_what_is_regrouped_is_selected_again(structure: Any) -> None:
    replicas = [map_structure(lambda leaf, i=i: (i, leaf) and f"{i}{leaf}", structure) for i in range(3)]
    together = regroup(replicas)
    assert [select_replica(index, together) for index in range(3)] == replicas


def test_dicts_go_by_sorted_keys_and_keep_their_own_order_and_type() -> None:
    assert flatten({"b": 1, "a": 2}) == [2, 1]
    mapped = map_structure(lambda leaf: leaf * 10, OrderedDict(b=1, a=2))
    assert type(mapped) is OrderedDict
    assert list(mapped.items()) == [("b", 10), ("a", 20)]


def test_a_dict_that_makes_its_own_values_is_rebuilt_as_one() -> None:
    rebuilt = map_structure(lambda leaf: leaf + 1, defaultdict(list, b=1, a=2))
    assert type(rebuilt) is defaultdict
    assert list(rebuilt.items()) == [("b", 2), ("a", 3)]
    assert rebuilt["c"] == []
    assert map_structure(lambda leaf: leaf + 1, Counter("aab")) == Counter("aaabb")
    assert map_structure(str, MappingProxyType({"a": 1})) == {"a": "1"}


def test_keys_without_an_order_are_refused() -> None:
    with pytest.raises(TypeError, match="must have an order"):
        flatten({1: 0, "a": 1})


def test_outlines_tell_structures_apart() -> None:
    assert outline({"loss": 1, "steps": (2, [3])}) == "{'loss': *, 'steps': (*, [*])}"
    with pytest.raises(ValueError, match=r"\[\*\] and \(\*\)"):
        map_structure(lambda a, b: a, [1], (1,))
    with pytest.raises(ValueError, match="fewer"):
        rebuild([1, 2], [1])
    with pytest.raises(ValueError, match="got 3"):
        rebuild([1, 2], [1, 2, 3])


def test_each_replica_gets_its_part_and_plain_values_go_to_all() -> None:
    batch = {"x": PerReplica([1, 2]), "rate": 0.5}
    assert select_replica(1, (batch, [Mirrored("ab")])) == ({"x": 2, "rate": 0.5}, ["b"])


def test_a_single_replicas_value_stays_bare() -> None:
    assert regroup([7]) == 7


def test_none_and_shared_distributed_values_stay_what_they_are() -> None:
    shared = Mirrored([1, 1])
    assert regroup([(None, shared), (None, shared)]) == (None, shared)


def test_equal_small_numbers_are_values_of_their_replicas() -> None:
    assert regroup([0, 0]).values == (0, 0)


def test_replicas_that_return_different_structures_are_named() -> None:
    with pytest.raises(ValueError, match=r"replica 0 of this client \(\*, \*\), replica 2 \*"):
        regroup([(1, 2), (1, 2), 3])


def test_a_per_replica_value_is_no_array() -> None:
    with pytest.raises(TypeError, match=r"strategy\.reduce"):
        np.asarray(PerReplica([1, 2]))


def test_a_mirrored_value_is_an_array() -> None:
    value = Mirrored([np.arange(3.0)] * 2)
    np.testing.assert_array_equal(value + 1, [1, 2, 3])
    np.testing.assert_array_equal(np.asarray(value, dtype=np.int64), [0, 1, 2])
    assert np.sum(value) == 3


def test_values_show_their_replicas() -> None:
    assert repr(PerReplica([1, 2])) == "PerReplica:{\n  0: 1,\n  1: 2\n}"
    assert isinstance(PerReplica([1]), DistributedValues)
    with pytest.raises(ValueError, match="PerReplica needs a value"):
        PerReplica([])

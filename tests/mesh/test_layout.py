"""The `Layout` value: its strings, the arithmetic of shards, and what cannot be one."""

import copy
import itertools
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mesh.meshes import grid, layouts

from dmesh.errors import LayoutError, MeshError
from dmesh.layout import MATCH, UNSHARDED, Layout, LayoutType
from dmesh.mesh import Mesh

MESH = grid({"x": 2, "y": 4}, clients=2, client=1, name="m")
TEXT = MESH.to_string()
DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


# Questions --------------------------------------------------------------------------------------------------


def test_the_words():
    assert (UNSHARDED, MATCH) == ("unsharded", "match")


def test_questions():
    layout = Layout(["x", UNSHARDED, "y"], MESH)
    assert (layout.rank, layout.mesh, layout.shape, layout.type) == (3, MESH, [2, 4], LayoutType.STATIC)
    assert layout.sharding_specs == ["x", UNSHARDED, "y"]
    assert [layout.num_shards(i) for i in range(3)] == [2, 1, 4]
    assert layout.num_shards(-1) == 4
    assert not layout.is_fully_replicated()
    assert not layout.is_batch_parallel()
    assert not layout.is_single_device()


@pytest.mark.parametrize(
    ("specs", "replicated", "parallel"),
    [
        ([], True, False),
        ([UNSHARDED], True, False),
        ([UNSHARDED, UNSHARDED], True, False),
        (["x"], False, True),
        (["x", UNSHARDED], False, True),
        ([UNSHARDED, "x"], False, False),
        (["x", "y"], False, False),
    ],
)
def test_kinds(specs, replicated, parallel):
    layout = Layout(specs, MESH)
    assert (layout.is_fully_replicated(), layout.is_batch_parallel()) == (replicated, parallel)


def test_sharding_over_one_device_still_counts_as_sharding():
    assert not Layout(["x"], grid({"x": 1})).is_fully_replicated()


def test_ways_to_make_one():
    assert Layout.replicated(MESH, 2) == Layout([UNSHARDED, UNSHARDED], MESH)
    assert Layout.replicated(MESH, 0).sharding_specs == []
    assert Layout.batch_sharded(MESH, "x", 2) == Layout(["x", UNSHARDED], MESH)
    assert Layout.batch_sharded(MESH, "x", rank=3, axis=1) == Layout([UNSHARDED, "x", UNSHARDED], MESH)
    assert Layout.batch_sharded(MESH, "x", 3, -3) == Layout(["x", UNSHARDED, UNSHARDED], MESH)
    assert Layout.inner_sharded(MESH, "y", 3) == Layout([UNSHARDED, UNSHARDED, "y"], MESH)
    assert Layout(("x", MATCH, MATCH), MESH).sharding_specs == ["x", MATCH, MATCH]


def test_a_single_device():
    layout = Layout.from_device(DEVICE)
    assert layout == Layout.from_single_device_mesh(Mesh.from_device(DEVICE))
    assert layout.is_single_device()
    assert (layout.type, layout.rank, layout.shape) == (LayoutType.SINGLE_DEVICE, 0, [])
    assert not layout.is_fully_replicated()
    assert not layout.is_batch_parallel()
    assert (
        layout.global_shape_from_local_shape([4, 3]) == layout.local_shape_from_global_shape((4, 3)) == (4, 3)
    )
    assert layout.offset_to_shard() == [()]


def test_parted():
    layout = Layout(["x", UNSHARDED], MESH)
    parted = layout.to_parted()
    assert parted.type is LayoutType.PARTED
    assert parted != layout
    assert parted.sharding_specs == layout.sharding_specs
    assert parted.to_parted() == parted


def test_deleting_dimensions():
    layout = Layout(["x", UNSHARDED, "y"], MESH)
    assert layout.delete([0, 1]) == layout.delete((0, -2)) == Layout(["y"], MESH)
    assert layout.delete(1) == Layout(["x", "y"], MESH)
    assert layout.delete([]) == layout
    assert layout.delete([0, 0, 1, 2]).rank == 0


def test_what_is_returned_is_the_callers():
    specs = ["x", UNSHARDED]
    layout = Layout(specs, MESH)
    specs[0] = "y"
    layout.sharding_specs.append("y")
    layout.shape.clear()
    assert layout == Layout(["x", UNSHARDED], MESH)
    with pytest.raises(AttributeError):
        layout.mesh = MESH


def test_equality():
    layout = Layout(["x", UNSHARDED], MESH)
    others = [
        Layout(["y", UNSHARDED], MESH),
        Layout(["x"], MESH),
        Layout(["x", UNSHARDED], grid({"x": 2, "y": 4})),
        layout.to_parted(),
        Layout.from_device(DEVICE),
    ]
    for other in [*others, layout.to_string(), None]:
        assert layout != other
    assert len({layout, Layout(["x", UNSHARDED], MESH), *others}) == 6


# Strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(["x", UNSHARDED], MESH), f"sharding_specs:x,unsharded, mesh:{TEXT}"),
        (Layout(["x", "y"], MESH), f"sharding_specs:x,y, mesh:{TEXT}"),
        (Layout([], MESH), f"sharding_specs: mesh:{TEXT}"),
        (Layout([UNSHARDED], MESH), f"sharding_specs:unsharded, mesh:{TEXT}"),
        (Layout(["x", MATCH], MESH), f"sharding_specs:x,match, mesh:{TEXT}"),
        (Layout(["x", UNSHARDED], MESH).to_parted(), f"parted:x,unsharded, mesh:{TEXT}"),
        (Layout([], MESH).to_parted(), f"parted: mesh:{TEXT}"),
        (Layout.from_device(DEVICE), f"maximal:true, mesh:{DEVICE}"),
    ],
)
def test_tensorflows_strings(layout, text):
    assert layout.to_string() == text
    assert repr(layout) == f"Layout.from_string({text})"
    assert Layout.from_string(text) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo", "expected sharding specs, a space and mesh:"),
        ("", "expected sharding specs, a space and mesh:"),
        (f"sharding_specs:x,mesh:{TEXT}", "expected sharding specs, a space and mesh:"),
        (f"sharding_specs:x, {TEXT}", "expected sharding specs, a space and mesh:"),
        (f"sharding_specs:x mesh:{TEXT}", "there is no comma after the sharding spec 'x'"),
        (f"sharding_specs:x,unsharded mesh:{TEXT}", "there is no comma after the sharding spec 'unsharded'"),
        (f"sharding_specs:q, mesh:{TEXT}", "'q' is not a dimension of the mesh; expected x, y or UNSHARDED"),
        (f"sharding_specs:, mesh:{TEXT}", "'' is not a dimension of the mesh"),
        (f"sharding_specs:any, mesh:{TEXT}", "'any' is not a dimension of the mesh"),
        (f"sharding_specs:scalar, mesh:{TEXT}", "'scalar' is not a dimension of the mesh"),
        (f"sharding_specs:x,x, mesh:{TEXT}", "mesh dimension 'x' appears twice in ['x', 'x']"),
        (
            f"specs:x, mesh:{TEXT}",
            "it starts with 'specs:x,'; expected sharding_specs:, parted: or maximal:true,",
        ),
        (f"x, mesh:{TEXT}", "it starts with 'x,'"),
        (f"maximal:false, mesh:{DEVICE}", "it starts with 'maximal:false,'"),
        (
            f"maximal:true, mesh:{TEXT}",
            "mesh 'm' has dimensions; from_single_device_mesh() needs one made by",
        ),
        (f"sharding_specs: mesh:{DEVICE}", "for a single device use Layout.from_single_device_mesh()"),
        (f"parted: mesh:{DEVICE}", "sharding specs need a mesh with dimensions"),
        ("sharding_specs: mesh:empty_mesh", "sharding specs need a mesh with dimensions"),
        ("sharding_specs:x, mesh:foo", "cannot read the mesh string 'foo'"),
        ("empty_layout", "expected sharding specs, a space and mesh:"),
        (f"sharding_specs:{'unsharded,' * 65} mesh:{TEXT}", "rank is 65; an array has 0 to 64 dimensions"),
    ],
)
def test_malformed_strings(text, message):
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        Layout.from_string(text)
    assert str(caught.value).startswith(f"cannot read the layout string {text!r:.200}")


def test_strings_that_are_none():
    for text in (None, b"", 7):
        with pytest.raises(LayoutError, match=f"a layout string must be a str, got {type(text).__name__}"):
            Layout.from_string(text)


# Mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Layout(["x"], "mesh"), "a layout needs a Mesh, got str: 'mesh'"),
        (lambda: Layout(["x"], None), "a layout needs a Mesh, got NoneType"),
        (lambda: Layout.replicated("mesh", 1), "a layout needs a Mesh, got str"),
        (lambda: Layout.from_single_device_mesh("mesh"), "a layout needs a Mesh, got str"),
        (
            lambda: Layout(["x", "x"], MESH),
            "mesh dimension 'x' appears twice in ['x', 'x']; an array can be sharded",
        ),
        (lambda: Layout(["q"], MESH), "'q' is not a dimension of the mesh; expected x, y or UNSHARDED"),
        (lambda: Layout([None], MESH), "None is not a dimension of the mesh"),
        (
            lambda: Layout("x", MESH),
            "sharding_specs must be a list with one entry for each dimension, got 'x'",
        ),
        (lambda: Layout(None, MESH), "sharding_specs must be a list"),
        (lambda: Layout([UNSHARDED] * 65, MESH), "rank is 65; an array has 0 to 64 dimensions"),
        (
            lambda: Layout([], Mesh.from_device(DEVICE)),
            "sharding specs need a mesh with dimensions; for a single",
        ),
        (lambda: Layout.replicated(MESH, -1), "rank is -1; an array has 0 to 64 dimensions"),
        (lambda: Layout.replicated(MESH, 10**10), "rank is 10000000000; an array has 0 to 64 dimensions"),
        (lambda: Layout.replicated(MESH, 1.0), "rank must be an integer, got 1.0"),
        (lambda: Layout.replicated(MESH, True), "rank must be an integer, got True"),
        (lambda: Layout.batch_sharded(MESH, "q", 1), "'q' is not a dimension of the mesh"),
        (
            lambda: Layout.batch_sharded(MESH, "x", 2, 2),
            "there is no dimension 2 in a layout of 2 dimensions, which",
        ),
        (
            lambda: Layout.batch_sharded(MESH, "x", 2, -3),
            "there is no dimension -3 in a layout of 2 dimensions",
        ),
        (lambda: Layout.batch_sharded(MESH, "x", 2, "0"), "a dimension must be an integer, got '0'"),
        (
            lambda: Layout.batch_sharded(MESH, "x", 0),
            "there is no dimension 0 in a layout of 0 dimensions, so there",
        ),
        (lambda: Layout.inner_sharded(MESH, "x", 0), "there is no dimension -1 in a layout of 0 dimensions"),
        (lambda: Layout.inner_sharded(MESH, "x", -1), "rank is -1"),
        (lambda: Layout(["x"], MESH).delete(1), "there is no dimension 1 in a layout of 1 dimensions"),
        (lambda: Layout(["x"], MESH).delete([0, 7]), "there is no dimension 7 in a layout of 1 dimensions"),
        (lambda: Layout(["x"], MESH).num_shards(1), "there is no dimension 1 in a layout of 1 dimensions"),
        (
            lambda: Layout([MATCH], MESH).num_shards(0),
            "dimension 0 of Layout.from_string(sharding_specs:match, mesh:m",
        ),
        (lambda: Layout([MATCH], MESH).offset_to_shard(), "is MATCH: its sharding depends on the array"),
        (lambda: Layout([MATCH], MESH).local_shape_from_global_shape([4]), "is MATCH: its sharding depends"),
        (lambda: Layout.from_device(DEVICE).to_parted(), "the layout of a single device has no sharding"),
        (
            lambda: Layout.from_device(DEVICE).num_shards(0),
            "there is no dimension 0 in a layout of 0 dimensions",
        ),
    ],
)
def test_mistakes(attempt, message):
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        attempt()
    assert isinstance(caught.value, ValueError)


def test_a_device_without_a_full_name():
    with pytest.raises(MeshError, match="is not named in full"):
        Layout.from_device("CPU:0")


# Shapes and places ------------------------------------------------------------------------------------------


def test_shapes():
    layout = Layout(["x", UNSHARDED], MESH)
    assert layout.global_shape_from_local_shape([4, 3]) == (8, 3)
    assert layout.local_shape_from_global_shape([8, 3]) == (4, 3)
    assert layout.local_shape_from_global_shape(np.zeros((8, 0)).shape) == (4, 0)
    assert Layout.replicated(MESH, 2).local_shape_from_global_shape((7, 3)) == (7, 3)
    assert Layout([], MESH).global_shape_from_local_shape(()) == ()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            [7, 3],
            "of the global shape (7, 3) has size 7, which cannot be split into the 2 equal shards of mesh",
        ),
        ([8], "the global shape (8,) has 1 dimensions, but the layout is for 2: ['x', 'unsharded']"),
        ([8, 3, 1], "the global shape (8, 3, 1) has 3 dimensions, but the layout is for 2"),
        ([8, -1], "the global shape (8, -1) has a negative size"),
        ([8, None], "a size in the global shape must be an integer, got None"),
        ([8.0, 3], "a size in the global shape must be an integer, got 8.0"),
    ],
)
def test_shapes_that_do_not_fit(shape, message):
    layout = Layout(["x", UNSHARDED], MESH)
    with pytest.raises(LayoutError, match=re.escape(message)):
        layout.local_shape_from_global_shape(shape)
    if shape != [7, 3]:
        with pytest.raises(LayoutError, match=re.escape(message.replace("global", "local"))):
            layout.global_shape_from_local_shape(shape)


def test_an_uneven_shape_is_told_what_would_fit():
    message = "of mesh dimension 'y'; pad it to 8, or use UNSHARDED"
    with pytest.raises(LayoutError, match=message):
        Layout(["y"], MESH).local_shape_from_global_shape([5])


def test_replicated_layouts_check_the_number_of_dimensions_too():
    with pytest.raises(
        LayoutError, match=r"the global shape \(7,\) has 1 dimensions, but the layout is for 2"
    ):
        Layout.replicated(MESH, 2).local_shape_from_global_shape([7])


def test_shards():
    layout = Layout(["y", UNSHARDED, "x"], grid({"x": 2, "y": 2}))
    assert layout.offset_to_shard() == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert [layout.offset_tuple_to_global_index(shard) for shard in layout.offset_to_shard()] == [0, 2, 1, 3]
    assert Layout.replicated(MESH, 1).offset_to_shard() == [(0,)] * 8
    assert Layout([], MESH).offset_to_shard() == [()] * 8
    assert Layout([], MESH).offset_tuple_to_global_index(()) == 0


@pytest.mark.parametrize("shard", [(2, 0), (-1, 0), (0, 1), (0,), (0, 0, 0)])
def test_shards_that_do_not_exist(shard):
    message = (
        rf"there is no shard {re.escape(str(shard))}: this layout cuts arrays of 2 dimensions into \[2, 1\]"
    )
    with pytest.raises(LayoutError, match=message):
        Layout(["x", UNSHARDED], MESH).offset_tuple_to_global_index(shard)


# Laws -------------------------------------------------------------------------------------------------------


@given(layouts())
def test_round_trips(layout):
    assert Layout.from_string(layout.to_string()) == layout
    assert pickle.loads(pickle.dumps(layout)) == copy.copy(layout) == copy.deepcopy(layout) == layout
    assert hash(Layout.from_string(layout.to_string())) == hash(layout)


@given(layouts(match=False), st.data())
def test_local_and_global_shapes_are_inverse(layout, data):
    local = tuple(data.draw(st.lists(st.integers(0, 5), min_size=layout.rank, max_size=layout.rank)))
    whole = layout.global_shape_from_local_shape(local)
    assert layout.local_shape_from_global_shape(whole) == local
    assert math.prod(whole) == math.prod(local) * math.prod(layout.num_shards(i) for i in range(layout.rank))


@given(layouts(match=False), st.data())
def test_shards_partition_the_global_index_space(layout, data):
    """Every element of the array is in exactly one shard, and each shard is on equally many devices."""
    local = data.draw(st.lists(st.integers(1, 2), min_size=layout.rank, max_size=layout.rank))
    covered = np.zeros(layout.global_shape_from_local_shape(local), int)
    shards = layout.offset_to_shard()
    assert len(shards) == layout.mesh.size
    for shard in set(shards):
        covered[tuple(slice(i * n, (i + 1) * n) for i, n in zip(shard, local, strict=True))] += 1
    assert (covered == 1).all()
    copies = {shards.count(shard) for shard in set(shards)}
    assert copies == {layout.mesh.size // len(set(shards))}
    counts = [range(layout.num_shards(i)) for i in range(layout.rank)]
    numbers = [layout.offset_tuple_to_global_index(shard) for shard in itertools.product(*counts)]
    assert numbers == list(range(len(set(shards))))


@given(layouts(match=False))
def test_a_devices_shard_follows_from_its_place(layout):
    for location, shard in zip(layout.mesh.unravel_index().values(), layout.offset_to_shard(), strict=True):
        assert shard == tuple(location.get(spec, 0) for spec in layout.sharding_specs)


pieces = st.sampled_from(
    ["sharding_specs:", "parted:", "maximal:true,", "x,", "unsharded,", "q,", " mesh:", TEXT, DEVICE, " "]
)


@given(st.one_of(st.text(max_size=40), st.lists(pieces, max_size=8).map("".join)))
def test_any_text_is_a_layout_or_a_layout_error(text):
    try:
        layout = Layout.from_string(text)
    except LayoutError:
        return
    assert Layout.from_string(layout.to_string()) == layout

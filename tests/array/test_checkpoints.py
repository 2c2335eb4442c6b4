"""Checkpoints of sharded arrays: on any mesh, damaged, attacked, and of safetensors files."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import zarr
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.array.worlds import DTYPES, NAMES, WORLDS, World, arrays, lengths, run, specs

import dmesh
from dmesh import Layout
from dmesh.arrays.checkpoint import manifest
from dmesh.errors import ArgumentTypeError, CheckpointError, LayoutError, MeshMismatchError

ONE = World(1, 1, (1,))
FOUR = World(1, 4, (2, 2))
SHORT = ("bfloat16", "float8_e4m3fn", "int4", "float16", "int8", "uint64", "complex64")
EXAMPLES = settings(max_examples=25, phases=(Phase.explicit, Phase.generate))


def bits(array):
    return array.dtype, array.shape, np.asarray(array).tobytes()


def save_all(mesh, directory, made, step=None):
    tree = {
        "made": [one.on(mesh) for one in made],
        "plain": made[0].values,
        "of": {"scalars": [1, "x", None]},
    }
    return dmesh.checkpoint.save(directory, tree, step)


def load_all(mesh, directory, made, layouts):
    chosen = None
    if layouts is not None:
        chosen = {"made": [None if one is None else Layout(list(one), mesh) for one in layouts]}
    tree = dmesh.checkpoint.load(directory, mesh=mesh, layouts=chosen)
    assert tree["of"] == {"scalars": [1, "x", None]}
    assert bits(tree["plain"]) == bits(made[0].values)
    for at, (mine, one) in enumerate(zip(tree["made"], made, strict=True)):
        assert bits(mine.full()) == bits(one.values)
        kept = tuple(name if name in NAMES[: len(mesh.shape())] else "unsharded" for name in one.specs)
        wanted = None if layouts is None else layouts[at]
        assert tuple(mine.layout.sharding_specs) == (kept if wanted is None else wanted)


@EXAMPLES
@given(data=st.data())
def test_what_is_saved_on_one_mesh_is_loaded_on_another(data, tmp_path_factory):
    here, there = data.draw(st.sampled_from(WORLDS)), data.draw(st.sampled_from(WORLDS))
    shapes = data.draw(st.lists(st.lists(lengths, max_size=3), min_size=1, max_size=3))
    made = [data.draw(arrays(here, shape, (*DTYPES, *SHORT), partial=False)) for shape in shapes]
    made.append(data.draw(arrays(here, [5, 3], ("float64", "int32"))))
    layouts = [data.draw(st.none() | specs(there, one.values.ndim)) for one in made]
    directory = tmp_path_factory.mktemp("saved")
    assert run(here, save_all, directory, made) == [1] * here.clients
    run(there, load_all, directory, made, data.draw(st.sampled_from([None, layouts])))


def test_a_client_reads_the_blocks_that_its_devices_need_and_no_others(tmp_path, monkeypatch):
    from dmesh.arrays.checkpoint import zarr as chunks

    def save(mesh):
        x = dmesh.copy_to_mesh(np.arange(64.0).reshape(8, 8), Layout(["x", "y"], mesh))
        dmesh.checkpoint.save(tmp_path, x)

    run(World(4, 2, (4, 2)), save)
    read, plain = [], chunks.read_chunk

    def counted(root, saved, index):
        read.append((dmesh.client_id(), index))
        return plain(root, saved, index)

    monkeypatch.setattr(chunks, "read_chunk", counted)
    run(
        World(2, 1, (2,)),
        lambda mesh: dmesh.checkpoint.load(tmp_path, layouts=Layout(["x", "unsharded"], mesh)),
    )
    assert sorted(read) == [(k, (2 * k + row, column)) for k in (0, 1) for row in (0, 1) for column in (0, 1)]


def test_zarr_alone_reads_it(tmp_path):
    values = np.arange(35.0).reshape(5, 7)

    def save(mesh):
        x = dmesh.copy_to_mesh(values, Layout(["x", "y"], mesh), uneven=True)
        short = dmesh.copy_to_mesh(values.astype(ml_dtypes.bfloat16), Layout(["y", "x"], mesh), uneven=True)
        tree = {
            "a": {"x": x, "sum": x.sum(axis=0), "plain": values, "short": short, "..": x, "A b": x},
            "n": 1,
        }
        dmesh.checkpoint.save(tmp_path, tree, 7)

    run(World(2, 2, (2, 2)), save)
    group = zarr.open_group(tmp_path / "step-7", mode="r")
    assert {name for name, _ in group.members(max_depth=None)} == {
        "a", "a/x", "a/sum", "a/plain", "a/short", "a/..+4", "a/A%20b"
    }  # fmt: skip
    np.testing.assert_array_equal(group["a/x"][:], values)
    np.testing.assert_array_equal(group["a/..+4"][:], values)
    np.testing.assert_array_equal(group["a/sum"][:], values.sum(0))
    assert group["a/x"].chunks == (3, 4)
    assert group["a/short"].attrs["dtype"] == "bfloat16"
    assert bits(group["a/short"][:].view(ml_dtypes.bfloat16)) == bits(values.astype(ml_dtypes.bfloat16))


def test_a_chunk_of_zeros_is_a_file_so_that_a_lost_one_is_noticed(tmp_path):
    run(
        FOUR,
        lambda mesh: dmesh.checkpoint.save(tmp_path, dmesh.zeros((2, 2), layout=Layout(["x", "y"], mesh))),
    )
    lost = tmp_path / "step-1" / "c" / "1" / "0"
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost}, a block of .* cannot be read"):
        run(ONE, lambda mesh: dmesh.checkpoint.load(tmp_path, mesh=mesh))


@pytest.mark.parametrize("damage", ["bit", "short", "long"])
def test_a_damaged_block_is_an_error_on_all_clients_that_names_the_file(tmp_path, damage):
    def save(mesh):
        dmesh.checkpoint.save(tmp_path, {"w": dmesh.arange(8.0, layout=Layout(["x"], mesh))})

    world = World(2, 1, (2,))
    run(world, save)
    path = tmp_path / "step-1" / "w" / "c" / "1"
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes({"bit": content, "short": content[:-1], "long": content + b"x"}[damage])

    def load(mesh):
        with pytest.raises(CheckpointError) as caught:
            dmesh.checkpoint.load(tmp_path, mesh=mesh)
        return caught.value

    alone, other = reversed(run(world, load))
    assert f"{path}, a block of 'w'" in str(alone)
    assert isinstance(alone, OSError)
    assert "failed on rank 1" in str(other)
    assert str(path) in str(other)
    run(FOUR, load)


def test_steps_are_numbers_and_none_is_written_twice(tmp_path):
    directory = tmp_path / "not" / "there yet"
    assert dmesh.checkpoint.steps(directory) == []
    mesh = dmesh.create_mesh([("x", 1)])
    x = dmesh.arange(3.0, layout=Layout(["x"], mesh))
    asked = [None, None, 10, None, 0]
    given = [dmesh.checkpoint.save(directory, x * n, step) for n, step in enumerate(asked)]
    assert given == [1, 2, 10, 11, 0]
    assert dmesh.checkpoint.steps(directory) == [0, 1, 2, 10, 11]
    assert dmesh.checkpoint.load(directory, mesh=mesh).full().tolist() == [0, 3, 6]
    assert dmesh.checkpoint.load(directory, 2, mesh=mesh).full().tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="step 10 exists already: remove"):
        dmesh.checkpoint.save(directory, x, 10)
    with pytest.raises(CheckpointError, match=r"step 3 of .* Existing steps: \[0, 1, 2, 10, 11\]"):
        dmesh.checkpoint.load(directory, 3, mesh=mesh)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        dmesh.checkpoint.load(tmp_path, mesh=mesh)
    (directory / ".saving-12-abc").mkdir()
    (directory / "step-12").mkdir()
    assert dmesh.checkpoint.steps(directory)[-1] == 11
    (directory / "step-12").rmdir()
    assert dmesh.checkpoint.save(directory, x) == 12
    assert not list(directory.glob(".saving*"))


def test_a_tree_comes_back_as_it_was(tmp_path):
    mesh = dmesh.create_mesh([("x", 1)])
    x = dmesh.arange(3, layout=Layout(["x"], mesh))
    keys = [
        "w",
        "W",
        "",
        ".",
        "..",
        "a/b",
        "../../up",
        "zarr.json",
        "c",
        "ü",
        "x" * 300,
        "x" * 300 + "y",
        "\x12",
        "+1",
    ]
    tree = {key: [x + n, {"n": n}] for n, key in enumerate(keys)}
    tree["s"] = (1 << 80, -2.5, float("inf"), float("-inf"), True, None, "ü\0", {}, [], ())
    tree["plain"] = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    tree["number"] = np.float32(3)
    dmesh.checkpoint.save(tmp_path, tree)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1"}
    found = dmesh.checkpoint.load(tmp_path, mesh=mesh)
    assert list(found) == list(tree)
    assert found["s"] == tree["s"]
    assert [type(value) for value in found["s"]] == [type(value) for value in tree["s"]]
    assert [found[key][0].full().tolist() for key in keys] == [
        (x + n).full().tolist() for n in range(len(keys))
    ]
    assert found["plain"].tolist() == [[0, 2], [3, 5]]
    assert found["number"] == np.float32(3)
    assert found["number"].dtype == np.float32
    only = dmesh.checkpoint.save(tmp_path, np.arange(3))
    assert dmesh.checkpoint.load(tmp_path, only).tolist() == [0, 1, 2]
    assert zarr.open_array(tmp_path / f"step-{only}", mode="r")[:].tolist() == [0, 1, 2]


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    mesh = dmesh.create_mesh([("x", 1)])
    x = dmesh.arange(3, layout=Layout(["x"], mesh))
    itself = []
    itself.append(itself)
    for tree, what in [
        ({"a": {1: x}}, "keys of a saved dict must be strings; those of a are"),
        ({"a": object()}, "a is a object"), ({"a": np.array(["s"])}, "a has dtype <U1"),
        ({"a": [1j]}, "a/0 is a complex"), (itself, "contain itself"),
        ({"a": np.ma.ones(3)}, "a is a MaskedArray"), (1 << 5000, "more than 1024 bits"),
    ]:  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=what):
            dmesh.checkpoint.save(tmp_path / "x", tree)
    with pytest.raises(ArgumentTypeError, match="step must be an integer of at least 0, got '5'"):
        dmesh.checkpoint.save(tmp_path / "x", x, "5")
    assert not (tmp_path / "x").exists()


def test_clients_with_different_trees_are_told(tmp_path):
    def save(mesh):
        x = dmesh.arange(4, layout=Layout(["x"], mesh))
        with pytest.raises(
            CheckpointError, match=r"same step and tree, .* those of rank 1 differ from those of rank 0"
        ):
            dmesh.checkpoint.save(tmp_path, {"a": x, "n": dmesh.client_id()})
        with pytest.raises(CheckpointError if dmesh.client_id() == 0 else ArgumentTypeError, match="object"):
            dmesh.checkpoint.save(tmp_path, {"a": x, "n": object() if dmesh.client_id() else 1})
        assert dmesh.checkpoint.save(tmp_path, x) == 1
        with pytest.raises(CheckpointError, match="same step, mesh and layouts"):
            dmesh.checkpoint.load(
                tmp_path, layouts=Layout(["x" if dmesh.client_id() else "unsharded"], mesh)
            )  # fmt: skip

    run(World(2, 1, (2,)), save)


def test_meshes_and_layouts_that_do_not_fit(tmp_path):
    mesh = dmesh.create_mesh([("x", 1)])
    dmesh.checkpoint.save(
        tmp_path, {"a": dmesh.ones((2, 3), layout=Layout(["x", "unsharded"], mesh)), "b": 1}
    )
    with pytest.raises(LayoutError, match="'a' is a sharded array, so loading it needs a mesh"):
        dmesh.checkpoint.load(tmp_path)
    with pytest.raises(LayoutError, match=r"'a' cannot be loaded: the layout .* is for 1 dimensions"):
        dmesh.checkpoint.load(tmp_path, layouts={"a": Layout(["x"], mesh)})
    with pytest.raises(LayoutError, match="layouts has entries for b/c, but no such arrays"):
        dmesh.checkpoint.load(tmp_path, mesh=mesh, layouts={"b": {"c": Layout(["x"], mesh)}})
    with dmesh.default_mesh(mesh):
        assert dmesh.checkpoint.load(tmp_path)["a"].layout.sharding_specs == ["x", "unsharded"]

    def of_one(whole):
        alone = dmesh.create_mesh([("x", 1)])
        with pytest.raises(MeshMismatchError, match="clients"):
            dmesh.checkpoint.load(tmp_path, mesh=whole, layouts=lambda *_: Layout(["x", "unsharded"], alone))

    run(World(2, 1, (2,)), of_one)


ATTACKS = {
    "no JSON": b"{",
    "not ours": b'{"attributes": {}}',
    "deep": b'{"attributes": {"dmesh": {"version": 1, "tree": '
    + b'{"list": [' * 5000
    + b"]}" * 5000
    + b"}}}",
    "very deep": b"[" * 200_000,
    "later": {"version": 2, "tree": {"value": 1}},
    "no part": {"version": 1, "tree": {"pickle": "x"}},
    "two parts": {"version": 1, "tree": {"value": 1, "list": []}},
    "no number": {"version": 1, "tree": {"float": "1"}},
    "no list": {"version": 1, "tree": {"list": "ab"}},
    "no dict": {"version": 1, "tree": {"dict": [1]}},
    "no value": {"version": 1, "tree": {"value": [1]}},
}
ARRAY = {"shape": [4], "dtype": "float64", "chunk": [2], "layout": None}
for _name, _change in {
    "shape": {"shape": [-4]}, "shape of booleans": {"shape": [True]}, "floats": {"shape": [4.0]},
    "dtype": {"dtype": "object"}, "a list as dtype": {"dtype": ["float64"]}, "chunk": {"chunk": [0]},
    "rank": {"chunk": [2, 2]}, "size": {"shape": [1 << 61]}, "layout": {"layout": ["x", "y"]},
    "hidden size": {"shape": [0, 1 << 70], "chunk": [1, 1]}, "names": {"layout": [1]},
    "dimensions": {"shape": [1] * 99, "chunk": [1] * 99},
    "lacking": {"shape": [1 << 50]}, "large blocks": {"shape": [1 << 50], "chunk": [1 << 50]},
    "many blocks": {"shape": [1 << 50], "chunk": [1]},
}.items():  # fmt: skip
    ATTACKS[f"array: {_name}"] = {"version": 1, "tree": {"dict": {"w": {"array": ARRAY | _change}}}}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_manifest_that_lies_is_refused_before_anything_is_allocated(tmp_path, attack):
    mesh = dmesh.create_mesh([("x", 1)])
    dmesh.checkpoint.save(tmp_path, {"w": np.arange(4.0)})
    content = ATTACKS[attack]
    if not isinstance(content, bytes):
        content = json.dumps({"attributes": {"dmesh": content}}).encode()
    path = tmp_path / "step-1" / manifest.FILE
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        dmesh.checkpoint.load(tmp_path, mesh=mesh)


def test_no_key_of_a_manifest_leads_out_of_the_directory(tmp_path):
    (tmp_path / "secret").mkdir()
    dmesh.checkpoint.save(tmp_path / "secret", np.arange(4.0))
    dmesh.checkpoint.save(tmp_path / "a", {"w": np.arange(4.0)})
    for key in ("../../secret/step-1", "..", str(tmp_path / "secret" / "step-1"), "w/../../../secret/step-1"):
        node = {"version": 1, "tree": {"dict": {key: {"array": ARRAY | {"chunk": [4]}}}}}
        path = tmp_path / "a" / "step-1" / manifest.FILE
        path.write_text(json.dumps({"attributes": {"dmesh": node}}))
        with pytest.raises(CheckpointError, match=f"{tmp_path}/a/step-1/[^/]+/c/0, a block of"):
            dmesh.checkpoint.load(tmp_path / "a")


def test_a_large_manifest_is_not_read(tmp_path, monkeypatch):
    dmesh.checkpoint.save(tmp_path, np.arange(4.0))
    monkeypatch.setattr(manifest, "LIMIT", 100)
    with pytest.raises(CheckpointError, match="is larger than the limit of 100 bytes"):
        dmesh.checkpoint.load(tmp_path)


VALUES = {
    "w": np.arange(35, dtype=np.float32).reshape(5, 7), "b": np.arange(7).astype(ml_dtypes.bfloat16),
    "f8": np.arange(6).astype(ml_dtypes.float8_e4m3fn).reshape(2, 3), "n": np.array(3, np.int64),
    "none": np.zeros((0, 3), np.uint8), "flags": np.array([True, False, True]),
}  # fmt: skip


@pytest.mark.parametrize("world", [ONE, FOUR, World(2, 1, (2,)), World(3, 1, (3,))])
def test_safetensors_files_load_by_slices(tmp_path, world):
    first, second = ({k: v for k, v in VALUES.items() if (k in "wb") is part} for part in (True, False))
    safetensors.numpy.save_file(first, tmp_path / "1.safetensors")
    safetensors.numpy.save_file(second, tmp_path / "2.safetensors")
    index = {"weight_map": {k: f"{1 if k in 'wb' else 2}.safetensors" for k in VALUES}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    def load(mesh):
        def rows(name, shape, dtype):
            assert (shape, dtype) == (VALUES[name].shape, VALUES[name].dtype)
            return Layout(["x", *["unsharded"] * (len(shape) - 1)], mesh) if shape else None

        found = dmesh.checkpoint.load_safetensors(tmp_path / "model.safetensors.index.json", rows, mesh=mesh)
        some = dmesh.checkpoint.load_safetensors(
            [tmp_path / "2.safetensors", str(tmp_path / "1.safetensors")],
            {"w": Layout(["unsharded", "x"], mesh)}, mesh=mesh,
        )  # fmt: skip
        assert some["w"].layout.sharding_specs == ["unsharded", "x"]
        assert some["b"].layout.sharding_specs == ["unsharded"]
        for name, values in VALUES.items():
            assert bits(found[name].full()) == bits(some[name].full()) == bits(values)

    run(world, load)


def test_safetensors_files_that_cannot_be_loaded(tmp_path):
    mesh = dmesh.create_mesh([("x", 1)])
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": VALUES["w"]}, path)
    shutil.copy(path, tmp_path / "b.safetensors")
    index = tmp_path / "index.json"
    with pytest.raises(CheckpointError, match="both have 'w'"):
        dmesh.checkpoint.load_safetensors([path, tmp_path / "b.safetensors"], mesh=mesh)
    with pytest.raises(LayoutError, match="'w' is a sharded array, so loading it needs a mesh"):
        dmesh.checkpoint.load_safetensors(path)
    with pytest.raises(LayoutError, match="layouts has entries for v"):
        dmesh.checkpoint.load_safetensors(path, {"v": Layout(["x"], mesh)}, mesh=mesh)
    for name in ("../a.safetensors", "/etc/passwd", "", "..", 3):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointError, match="not a file in the same directory"):
            dmesh.checkpoint.load_safetensors(index, mesh=mesh)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not the index"):
        dmesh.checkpoint.load_safetensors(index, mesh=mesh)
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read"):
        dmesh.checkpoint.load_safetensors(path, mesh=mesh)

"""What holds for sharded arrays: TensorFlow's cases, layouts, uneven shards, writing, and looking inside."""

import numpy as np
import pytest
from tests.array.worlds import World, run

import dmesh
from dmesh import UNSHARDED, Layout
from dmesh.errors import LayoutError, MeshMismatchError, UnshardableError

GRID = World(2, 4, (2, 4))


@pytest.fixture
def on_grid():
    """Runs a program as both clients of a 2x4 mesh, of four devices each."""
    return lambda program: run(GRID, program)


# TensorFlow's ---------------------------------------------------------------------------------------------


def test_pack_takes_the_local_blocks_and_unpack_returns_them(on_grid):
    def program(mesh):
        blocks = [np.full((2, 3), 10 * dmesh.client_id() + i) for i in range(4)]
        x = dmesh.pack(blocks, Layout(["x", "y"], mesh))
        assert dmesh.is_dtensor(x)
        assert not dmesh.is_dtensor(blocks[0])
        assert x.shape == (4, 12)
        for mine, block in zip(dmesh.unpack(x), blocks, strict=True):
            np.testing.assert_array_equal(mine, block)
        return x.full()

    first, second = on_grid(program)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[0], np.repeat([0, 1, 2, 3], 3))
    np.testing.assert_array_equal(first[2], np.repeat([10, 11, 12, 13], 3))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([np.ones((2, 2))] * 3, r"client \d has 4 devices in the mesh, but passed 3 blocks"),
        ([np.ones((2, 2))] * 3 + [np.ones((2, 1))], "pack needs blocks of one shape"),
        ([np.ones(2)] * 4, "the blocks have 1 dimensions, but the layout is for 2"),
    ],
)
def test_pack_refuses_what_does_not_fit(on_grid, blocks, message):
    def program(mesh):
        with pytest.raises(LayoutError, match=message):
            dmesh.pack(blocks, Layout(["x", "y"], mesh))

    on_grid(program)


def test_pack_refuses_blocks_of_different_dtypes(on_grid):
    def program(mesh):
        with pytest.raises(UnshardableError, match="different dtypes"):
            dmesh.pack([np.ones(2)] * 3 + [np.ones(2, int)], Layout(["x"], mesh))

    on_grid(program)


@pytest.mark.parametrize("numbers", [(6,), (6.0,), (0, 6.0), (0, 6, 0.5), (np.float32(1), 5)])
def test_arange_has_the_dtype_and_values_of_numpys(on_grid, numbers):
    def program(mesh):
        x = dmesh.arange(*numbers, layout=Layout(["x"], mesh))
        assert x.dtype == np.arange(*numbers).dtype
        np.testing.assert_array_equal(x.full(), np.arange(*numbers))

    on_grid(program)


def test_relayout_goes_everywhere(on_grid):
    values = np.arange(32.0).reshape(4, 8)

    def program(mesh):
        x = dmesh.copy_to_mesh(values, Layout.replicated(mesh, 2))
        for specs in (
            ["x", UNSHARDED],
            [UNSHARDED, "x"],
            ["y", UNSHARDED],
            ["x", "y"],
            ["y", "x"],
            [UNSHARDED] * 2,
        ):
            x = dmesh.relayout(x, Layout(specs, mesh))
            assert dmesh.fetch_layout(x) == Layout(specs, mesh)
            dmesh.check_layout(x, Layout(specs, mesh))
        return x.numpy()

    for found in on_grid(program):
        np.testing.assert_array_equal(found, values)


def test_relayout_with_match_keeps_a_dimension_and_relayout_like_takes_anothers(on_grid):
    def program(mesh):
        x = dmesh.copy_to_mesh(np.ones((4, 8)), Layout(["x", UNSHARDED], mesh))
        assert dmesh.relayout(x, Layout([dmesh.MATCH, "y"], mesh)).layout.sharding_specs == ["x", "y"]
        other = dmesh.zeros((5, 3), layout=Layout([UNSHARDED, "y"], mesh))
        assert dmesh.relayout_like(x, other).layout == other.layout

    on_grid(program)


def test_relayout_refuses_uneven_lengths_and_another_rank_as_tensorflow_does(on_grid):
    def program(mesh):
        with pytest.raises(
            LayoutError, match="dimension 0 of shape \\(6,\\) has length 6, which mesh dimension 'y' of 4"
        ):
            dmesh.copy_to_mesh(np.arange(6), Layout(["y"], mesh))
        with pytest.raises(LayoutError, match=r"the layout .* is for 2 dimensions, but the array has 1"):
            dmesh.copy_to_mesh(np.arange(6), Layout.replicated(mesh, 2))
        with pytest.raises(LayoutError, match="was expected"):
            dmesh.check_layout(dmesh.zeros(4, layout=Layout(["x"], mesh)), Layout(["y"], mesh))
        with pytest.raises(UnshardableError):
            dmesh.fetch_layout(np.ones(3))

    on_grid(program)


def test_the_products_layout_is_tensorflows(on_grid):
    """`A(x, y) @ B(y, -)` is cut along x, and reduced along y when it is needed."""

    def program(mesh):
        a = dmesh.copy_to_mesh(np.arange(32.0).reshape(4, 8), Layout(["x", "y"], mesh))
        b = dmesh.copy_to_mesh(np.arange(24.0).reshape(8, 3), Layout(["y", UNSHARDED], mesh))
        c = a @ b
        assert c.layout.sharding_specs == ["x", UNSHARDED]
        assert c.partial == ("y",)
        return c.full(), float(np.sum(c))

    for c, total in on_grid(program):
        np.testing.assert_array_equal(c, np.arange(32.0).reshape(4, 8) @ np.arange(24.0).reshape(8, 3))
        assert total == c.sum()


def test_call_with_layout_and_the_default_mesh(on_grid):
    def program(mesh):
        x = dmesh.call_with_layout(np.ones, Layout(["x", UNSHARDED], mesh), (8, 3))
        assert x.layout.sharding_specs == ["x", UNSHARDED]
        assert isinstance(dmesh.call_with_layout(np.ones, None, 3), np.ndarray)
        with dmesh.run_on(mesh):
            assert dmesh.get_default_mesh() == mesh

    on_grid(program)


# Arrays -----------------------------------------------------------------------------------------------------


def test_the_last_blocks_are_shorter_or_empty(on_grid):
    def program(mesh):
        x = dmesh.arange(5, layout=Layout(["y"], mesh))
        return [block.tolist() for block in x.to_local()]

    first, second = on_grid(program)
    assert first == second == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (lambda d, L: d.zeros((3, 5), np.int32, layout=L(2)), np.zeros((3, 5), np.int32)),
        (lambda d, L: d.ones(7, layout=L(1)), np.ones(7)),
        (lambda d, L: d.full((2, 3), 7, layout=L(2)), np.full((2, 3), 7)),
        (lambda d, L: d.arange(2, 17, 3, layout=L(1)), np.arange(2, 17, 3)),
        (lambda d, L: d.arange(0, 1, 0.1, layout=L(1)), np.arange(0, 1, 0.1)),
        (lambda d, L: d.arange(5, 0, -2, layout=L(1)), np.arange(5, 0, -2)),
        (lambda d, L: d.linspace(0, 1, 7, layout=L(1)), np.linspace(0, 1, 7)),
        (lambda d, L: d.linspace(2, -1, 6, False, layout=L(1)), np.linspace(2, -1, 6, False)),
        (lambda d, L: d.eye(4, 6, 1, layout=L(2)), np.eye(4, 6, 1)),
        (lambda d, L: d.from_function(lambda i, j: 10 * i + j, (3, 4), int, layout=L(2)), np.fromfunction(lambda i, j: 10 * i + j, (3, 4), dtype=int)),  # noqa: E501
    ],
)  # fmt: skip
def test_creation(on_grid, mine, theirs):
    def program(mesh):
        return mine(dmesh, lambda ndim: Layout(["x", "y"][:ndim], mesh)).full()

    for found in on_grid(program):
        assert found.dtype == theirs.dtype
        np.testing.assert_array_equal(found, theirs)


def test_without_a_layout_zeros_are_this_clients_own():
    assert isinstance(dmesh.zeros(3), np.ndarray)


def test_from_local_takes_blocks_of_different_lengths(on_grid):
    def program(mesh):
        blocks = [np.arange(n) for n in (2, 2, 1, 0)]
        x = dmesh.from_local(blocks, Layout(["y"], mesh), (5,))
        with pytest.raises(LayoutError, match="block 0 has shape"):
            dmesh.from_local(blocks[::-1], Layout(["y"], mesh), (5,))
        return x.full().tolist()

    assert on_grid(program) == [[0, 1, 0, 1, 0]] * 2


def test_writing_changes_one_array_alone(on_grid):
    def program(mesh):
        x = dmesh.arange(8, layout=Layout(["x"], mesh))
        layout = x.layout
        y, z, local = x[:], x.reshape(2, 4), x.to_local()[0]
        before = local.copy()
        x += 1
        x[3] = 100
        x[x > 50] = -1
        assert x.layout == layout
        assert x.full().tolist() == [1, 2, 3, -1, 5, 6, 7, 8]
        assert y.full().tolist() == z.full().ravel().tolist() == list(range(8))
        np.testing.assert_array_equal(local, before)
        with pytest.raises(ValueError, match="read-only"):
            local[0] = 3
        np.add(y, 1, out=x, where=y > 5)
        assert x.full().tolist() == [1, 2, 3, -1, 5, 6, 7, 8]
        np.multiply(y, 3, out=x)
        assert x.full().tolist() == [0, 3, 6, 9, 12, 15, 18, 21]
        with pytest.raises(TypeError, match=r"[Cc]annot cast"):
            x += 0.5

    on_grid(program)


def test_a_partial_sum_is_reduced_once(on_grid):
    def program(mesh):
        x = dmesh.copy_to_mesh(np.arange(24.0).reshape(8, 3), Layout(["y", UNSHARDED], mesh))
        total = np.sum(x, axis=0)
        assert total.partial == ("y",)
        assert "partial" in repr(total)
        doubled = total * 2 - total
        assert doubled.partial == ("y",)
        with dmesh.debug.bytes_moved() as moved:
            first = total.full()
        assert moved.total > 0
        with dmesh.debug.bytes_moved() as moved:
            second = np.sqrt(total).full()
        assert moved.total == 0
        np.testing.assert_allclose(np.sqrt(first), second)
        np.testing.assert_array_equal(doubled.full(), first)

    on_grid(program)


def test_a_partial_sum_is_scattered_where_the_result_is_cut(on_grid):
    def program(mesh):
        a = dmesh.copy_to_mesh(np.ones((8, 8)), Layout([UNSHARDED, "y"], mesh))
        steps = dmesh.explain(lambda m: dmesh.relayout(m @ m.T, Layout(["y", UNSHARDED], mesh)), a).steps
        assert [step.kind for step in steps if step.kind != "local"][-1] == "reduce-scatter"

    on_grid(program)


def test_scalars_are_read_by_all(on_grid):
    def program(mesh):
        x = dmesh.arange(8, layout=Layout(["y"], mesh))
        assert int(x[5]) == 5
        assert float(x.sum()) == 28.0
        assert bool((x == x).all())
        assert x.item(3) == 3
        assert 6 in x
        assert f"{x.mean():.1f}" == "3.5"
        assert [10, 11, 12][x[1]] == 11
        with pytest.raises(ValueError, match="ambiguous"):
            bool(x)

    on_grid(program)


def test_the_layout_of_elementwise_results_moves_the_fewest_bytes(on_grid):
    def program(mesh):
        a = dmesh.zeros((8, 8), layout=Layout(["x", UNSHARDED], mesh))
        b = dmesh.zeros((8, 8), layout=Layout([UNSHARDED, "y"], mesh))
        row = dmesh.zeros(8, layout=Layout(["x"], mesh))
        assert (a + b).layout.sharding_specs == ["x", "y"]
        assert dmesh.explain(lambda: a + b).bytes == 0
        assert (row + a).layout.sharding_specs == [UNSHARDED, "x"]  # nothing is gathered

    on_grid(program)


def test_what_is_explained_and_drawn_is_asked_by_one_client_alone(on_grid):
    def program(mesh):
        x = dmesh.copy_to_mesh(np.arange(16.0).reshape(4, 4), Layout(["x", UNSHARDED], mesh))
        if dmesh.client_id() == 0:
            told = dmesh.explain(lambda a: (a @ a.T).sum(), x)
            assert told.bytes > 0
            assert "np.matmul" in str(told)
            assert told.peak >= 4 * 4 * 8 // 2
            assert "CPU 0,1,2,3" in dmesh.visualize_sharding(x)
            assert "float64[4, 4] (x, -)" in repr(x)
            assert "<pre>" in x._repr_html_()
        with pytest.raises(UnshardableError, match="depends on the elements"):
            dmesh.explain(lambda a: a[a > 1], x)
        return x.full()

    on_grid(program)


def test_meshes_never_mix():
    def program(mesh):
        other = dmesh.create_distributed_mesh([("a", 8)])
        x = dmesh.zeros(8, layout=Layout(["x"], mesh))
        y = dmesh.zeros(8, layout=Layout(["a"], other))
        with pytest.raises(MeshMismatchError, match=r"x=2, y=4.*a=8"):
            x + y
        with pytest.raises(MeshMismatchError):
            dmesh.relayout(x, Layout(["a"], other))
        again = dmesh.create_distributed_mesh([("x", 2), ("y", 4)])
        assert (x + dmesh.ones(8, layout=Layout(["y"], again))).shape == (8,)

    run(GRID, program)


@pytest.mark.parametrize("kind", "?bBilLefdFD")
def test_powers_by_python_numbers_are_numpys_bit_by_bit(on_grid, kind):
    values = np.arange(1, 9).astype(kind)

    def program(mesh):
        x = dmesh.copy_to_mesh(values, Layout(["x"], mesh))
        for exponent in (2, 2.0, 0.5, 1, 3, 0, -1.0):
            expected, found = values**exponent, (x**exponent).full()
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes(), exponent
        return x.full()

    on_grid(program)


def test_norms_of_integers_do_not_overflow(on_grid):
    values = np.array([[4294967292, 2, 3], [1, 2, 4294967295]], np.uint32)

    def program(mesh):
        x = dmesh.copy_to_mesh(values, Layout(["x", UNSHARDED], mesh), uneven=True)
        for axis in (None, 0, 1):
            np.testing.assert_allclose(np.linalg.norm(x, axis=axis).full(), np.linalg.norm(values, axis=axis))
        return x.full()

    on_grid(program)

"""Random arrays that do not depend on their layout, and functions on the blocks."""

import numpy as np
import pytest
from tests.array.worlds import WORLDS, World, run

import dmesh
from dmesh import UNSHARDED, Layout
from dmesh.errors import CollectiveMismatchError, ConfigurationError, LayoutError

PAIR = World(2, 2, (2, 2))


@pytest.mark.parametrize("world", WORLDS[:9], ids=str)
def test_random_arrays_are_the_same_in_every_layout(world):
    expected = np.random.Generator(np.random.Philox(key=np.array([7, 0], np.uint64))).random((5, 6))

    def program(mesh):
        found = []
        for specs in (
            [mesh.dim_names[0], UNSHARDED],
            [UNSHARDED, mesh.dim_names[-1]],
            [UNSHARDED, UNSHARDED],
        ):
            rng = dmesh.random.Generator(7)
            layout = Layout(specs, mesh)
            found.append(
                [
                    rng.random((5, 6), layout=layout).full(),
                    rng.normal(1.0, 2.0, size=(5, 6), layout=layout).full(),
                    rng.integers(-3, 5, size=(5, 6), layout=layout).full(),
                    rng.uniform(2, 3, size=(5, 6), layout=layout).full(),
                ]
            )
        return found

    for client in run(world, program):
        for random, normal, integers, uniform in client:
            np.testing.assert_array_equal(random, expected)
            np.testing.assert_array_equal(normal, client[0][1])
            np.testing.assert_array_equal(integers, client[0][2])
            assert integers.min() >= -3
            assert integers.max() < 5
            assert 2 <= uniform.min() <= uniform.max() < 3


def test_normal_numbers_are_normal():
    def program(mesh):
        x = dmesh.random.Generator(1).normal(size=20_000, layout=Layout(["x"], mesh))
        return float(x.mean()), float(x.std()), float((x > 1).mean())

    mean, deviation, above = run(PAIR, program)[0]
    assert abs(mean) < 0.03
    assert abs(deviation - 1) < 0.03
    assert abs(above - 0.1587) < 0.01


def test_arguments_are_those_of_numpy_and_dtypes_are_kept():
    def program(mesh):
        rng, rows = dmesh.random.Generator(3), Layout(["x"], mesh)
        return {
            "normal": rng.normal(100.0, 0.1, 1000, layout=rows).full(),
            "uniform": rng.uniform(2, 3, 1000, layout=rows).full(),
            "random": rng.random(1000, np.float32, layout=rows).full(),
            "standard": rng.standard_normal((1000,), dtype="f4", layout=rows).full(),
            "exponential": rng.exponential(3.0, 20_000, layout=rows).full(),
            "ends": rng.integers(0, 3, 1000, np.int8, endpoint=True, layout=rows).full(),
            "one": rng.random(layout=Layout.replicated(mesh, 0)).full(),
        }

    for found in run(PAIR, program):
        assert abs(found["normal"].mean() - 100) < 0.02
        assert 2 <= found["uniform"].min() <= found["uniform"].max() < 3
        assert found["random"].dtype == found["standard"].dtype == np.float32
        assert 0 <= found["random"].min() <= found["random"].max() < 1
        assert abs(found["standard"].mean()) < 0.15
        assert abs(found["exponential"].mean() - 3) < 0.1
        assert abs(np.median(found["exponential"]) - 3 * np.log(2)) < 0.1
        assert np.unique(found["ends"]).tolist() == [0, 1, 2, 3]
        assert found["ends"].dtype == np.int8
        assert found["one"].shape == ()


@pytest.mark.parametrize("n", [0, 1, 10, 257])
def test_a_permutation_is_the_same_in_every_layout(n):
    def program(mesh):
        layouts = [Layout([name], mesh) for name in ("x", "y", UNSHARDED)]
        return [dmesh.random.Generator(5).permutation(n, layout=layout).full() for layout in layouts]

    for found in run(PAIR, program):
        np.testing.assert_array_equal(np.sort(found[0]), np.arange(n))
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])
        assert n < 10 or not np.array_equal(found[0], np.arange(n))


def test_parameters_that_cannot_be_are_refused_before_a_call_is_counted():
    def program(mesh):
        rng, rows = dmesh.random.Generator(0), Layout(["x"], mesh)
        for wrong in (
            lambda: rng.normal(np.zeros(4), size=4, layout=rows),
            lambda: rng.random(4, np.float16, layout=rows),
            lambda: rng.integers(0.5, 4, 4, layout=rows),
        ):
            with pytest.raises(TypeError):
                wrong()
        for wrong in (
            lambda: rng.normal(0, -1, 4, layout=rows),
            lambda: rng.integers(3, 3, 4, layout=rows),
            lambda: rng.integers(0, 300, 4, np.int8, layout=rows),
            lambda: rng.random((4, 4), layout=rows),
        ):
            with pytest.raises(ValueError):
                wrong()
        return rng.calls

    assert run(PAIR, program) == [0, 0]


def test_a_seed_that_cannot_be_is_refused():
    with pytest.raises(ConfigurationError):
        dmesh.random.Generator(-1)


def test_shard_map_calls_a_function_for_each_device_with_collectives_by_name():
    values = np.arange(40.0).reshape(8, 5)

    def program(mesh):
        layout = Layout(["x", "y"], mesh)
        x = dmesh.copy_to_mesh(values, layout, uneven=True)

        def centered(block):
            total = dmesh.axes.psum(dmesh.axes.psum(block.sum(), "x"), "y")
            assert 0 <= dmesh.axes.index("x") < dmesh.axes.size("x") == 2
            return block - total / values.size

        return dmesh.shard_map(centered, in_layouts=layout, out_layouts=layout)(x).full()

    for found in run(PAIR, program):
        np.testing.assert_allclose(found, values - values.mean())


def test_blocks_are_gathered_and_passed_on_by_name():
    def program(mesh):
        layout = Layout(["x", "y"], mesh)
        x = dmesh.copy_to_mesh(np.arange(16.0).reshape(4, 4), layout)

        def work(block):
            rows = dmesh.axes.all_gather(block, "y", concat_axis=1)
            assert rows.shape == (2, 4)
            assert dmesh.axes.all_gather(block, "x").shape == (2, 2, 2)
            assert dmesh.axes.pmax(block.max(), "x") >= block.max() >= dmesh.axes.pmin(block.min(), "y")
            return dmesh.axes.permute(block, "x", [(0, 1), (1, 0)]), rows

        swapped, rows = dmesh.shard_map(
            work, in_layouts=[layout], out_layouts=[layout, Layout(["x", UNSHARDED], mesh)]
        )(x)
        return swapped.full(), rows.full()

    for swapped, rows in run(PAIR, program):
        np.testing.assert_array_equal(swapped, np.roll(np.arange(16.0).reshape(4, 4), 2, 0))
        np.testing.assert_array_equal(rows, np.arange(16.0).reshape(4, 4))


@pytest.mark.parametrize("boundary", ["clip", "wrap"])
@pytest.mark.parametrize("length", [4, 7, 9])
def test_a_stencil_with_a_halo(boundary, length):
    values = np.arange(float(length)) ** 2
    last = (length - 1) // -(-length // 4)  # the last device that has a block

    def program(mesh):
        layout = Layout(["x"], mesh)
        x = dmesh.copy_to_mesh(values, layout, uneven=True)

        def smooth(block):
            if not block.size:
                return block
            if boundary == "clip":
                block = np.pad(
                    block,
                    (int(dmesh.axes.index("x") == 0), int(dmesh.axes.index("x") == last)),
                    mode="edge",
                )
            return (block[:-2] + block[1:-1] + block[2:]) / 3

        return dmesh.shard_map(smooth, in_layouts=layout, out_layouts=layout, halo=[(1,)], boundary=boundary)(
            x
        ).full()

    padded = np.pad(values, 1, mode="edge" if boundary == "clip" else "wrap")
    for found in run(World(2, 2, (4,)), program):
        np.testing.assert_allclose(found, (padded[:-2] + padded[1:-1] + padded[2:]) / 3)


def test_results_that_do_not_fit_and_calls_that_differ_are_errors():
    def program(mesh):
        layout = Layout(["x", UNSHARDED], mesh)
        x = dmesh.zeros((4, 4), layout=layout)
        with pytest.raises(LayoutError, match="but the layout needs"):
            dmesh.shard_map(lambda b: b[: 1 + dmesh.axes.index("x")], in_layouts=layout, out_layouts=layout)(
                x
            )
        with pytest.raises(CollectiveMismatchError, match=r"psum.*and.*psum"):
            dmesh.shard_map(
                lambda b: b + dmesh.axes.psum(b, "x" if dmesh.axes.index("y") else "y"),
                in_layouts=layout,
                out_layouts=layout,
            )(x)
        with pytest.raises(ZeroDivisionError):
            dmesh.shard_map(lambda b: 1 // 0, in_layouts=layout, out_layouts=layout)(x)

    run(PAIR, program)


def test_a_result_of_shard_map_that_does_not_fit_its_layout_says_how():
    def program(mesh):
        layout = Layout(["x"], mesh)
        x = dmesh.arange(8.0, layout=layout)
        results = iter(range(100))
        for function, message in [
            (lambda block: block.sum(), r"is float64\[\], of 0 dimensions; its layout is for 1"),
            (
                lambda block: block.astype([int, float][next(results) % 2]),
                r"float64\[.*int64|int64\[.*float64",
            ),
        ]:
            with pytest.raises(LayoutError, match=message):
                dmesh.shard_map(function, in_layouts=layout, out_layouts=layout)(x)

    run(World(1, 2, (2,)), program)


@pytest.mark.parametrize("dtype", [float, "f4", complex, int, bool])
def test_blocks_that_differ_where_the_layout_has_copies_are_refused(dtype):
    def program(mesh):
        rows, copies = Layout(["x", UNSHARDED], mesh), Layout.replicated(mesh, 1)
        x = dmesh.copy_to_mesh(np.arange(24).reshape(8, 3).astype(dtype), rows)
        y = dmesh.copy_to_mesh(np.arange(3).astype(dtype), copies)
        forgotten = dmesh.shard_map(lambda block: block[0], in_layouts=rows, out_layouts=copies)
        if dtype is bool:
            x = x & (dmesh.arange(8, layout=Layout(["x"], mesh)) > 3)[:, None]
        with pytest.raises(LayoutError, match=r"devices 0 and \d of the mesh returned different blocks"):
            forgotten(x)
        summed = dmesh.shard_map(
            lambda block: dmesh.axes.psum(block.sum(axis=0, dtype=block.dtype), "x"),
            in_layouts=rows,
            out_layouts=copies,
        )
        same = dmesh.shard_map(
            lambda block: block * np.nan if block.dtype.kind == "f" else block,
            in_layouts=copies,
            out_layouts=copies,
        )
        return summed(x).full().shape, same(y).full().shape

    assert run(PAIR, program) == [((3,), (3,))] * 2

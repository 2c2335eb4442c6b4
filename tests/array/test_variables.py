"""Variables, datasets and users' operations on sharded arrays."""

import numpy as np
import pytest
from tests.array.worlds import World, assert_same, run

import dmesh
from dmesh import UNSHARDED, ArraySpec, DTensorDataset, DVariable, Layout
from dmesh.arrays.dispatch.registry import FUNCTIONS, NOTES
from dmesh.data import Dataset, TensorSpec
from dmesh.errors import (
    ArgumentTypeError,
    DatasetError,
    ImplicitGatherError,
    InputModeError,
    LayoutError,
    UnshardableError,
)

FOUR = World(2, 2, (4,))
GRID = World(2, 2, (2, 2))


# Variables --------------------------------------------------------------------------------------------------


def test_a_variable_is_assigned_to_and_keeps_its_layout():
    def program(mesh):
        rows = Layout(["x", UNSHARDED], mesh)
        values = np.arange(12.0).reshape(4, 3)
        v = DVariable(dmesh.copy_to_mesh(values, rows), name="w")
        before = v.value()
        assert (v.layout, v.shape, v.dtype, v.name) == (rows, (4, 3), np.float64, "w")
        assert v.assign_add(v * 2) is v
        assert_same(v.full(), values * 3)
        v.assign_sub(dmesh.ones((4, 3), layout=Layout([UNSHARDED, "x"], mesh)))  # of another layout
        v.assign_sub(1)
        assert_same(v.read_value().full(), values * 3 - 2)
        v.assign(dmesh.copy_to_mesh(values, Layout.replicated(mesh, 2)))
        assert_same(v.full(), values)
        v.assign(7.0)
        assert v.layout == rows
        assert_same(v.full(), np.full((4, 3), 7.0))
        assert_same(before.full(), values)  # what was read stays

    run(FOUR, program)


def test_a_variable_is_read_by_operators_and_functions():
    def program(mesh):
        values = np.arange(12.0).reshape(4, 3)
        x = dmesh.copy_to_mesh(values, Layout(["x", "y"], mesh), uneven=True)
        v = DVariable(lambda: values, layout=Layout(["x", UNSHARDED], mesh))
        for mine, theirs in (
            (x + v, values * 2), (v - x, values * 0), (np.concatenate([x, v]), np.concatenate([values] * 2)),
            (np.sum(v, axis=0), values.sum(0)), (v @ v[0], values @ values[0]), (-v, -values),
            (np.where(v > 3, v, x), values), (v.T if hasattr(v, "T") else np.transpose(v), values.T),
        ):  # fmt: skip
            assert isinstance(mine, dmesh.DTensor)
            assert_same(mine.full(), theirs)

    run(GRID, program)


def test_a_variable_has_a_layout_and_its_value_goes_to_others():
    def program(mesh):
        rows, whole = Layout(["x"], mesh), Layout.replicated(mesh, 1)
        v = DVariable(np.arange(8.0), layout=rows)
        assert dmesh.is_dtensor(v)
        assert dmesh.fetch_layout(v) == rows
        dmesh.check_layout(v, rows)
        with pytest.raises(ValueError, match="was expected"):
            dmesh.check_layout(v, whole)
        like = DVariable(np.zeros(8), layout=whole)
        for there in (
            dmesh.relayout(v, whole), dmesh.copy_to_mesh(v, whole), dmesh.relayout_like(v, like),
            dmesh.call_with_layout(lambda: v, whole),
        ):  # fmt: skip
            assert isinstance(there, dmesh.DTensor)
            assert there.layout == whole
            assert_same(there.full(), np.arange(8.0))
        same = dmesh.relayout(v, rows)
        v.assign(0.0)
        assert_same(same.full(), np.arange(8.0))  # a copy
        assert v.layout == rows

    run(FOUR, program)


def test_assignments_to_a_variable_take_tensorflows_arguments():
    def program(mesh):
        v = DVariable(dmesh.ones((4,), layout=Layout(["x"], mesh)))
        assert v.assign(v * 2, use_locking=True, name="set", read_value=True) is v
        assert v.assign_add(v, False, "add", False) is v
        v.assign_sub(1, read_value=False)
        assert_same(v.full(), np.full(4, 3.0))

    run(FOUR, program)


def test_a_variable_refuses_what_tensorflow_refuses():
    def program(mesh):
        x = dmesh.ones((4, 4), layout=Layout(["x", UNSHARDED], mesh))
        with pytest.raises(LayoutError, match="needs a layout"):
            DVariable(np.ones(4))
        with pytest.raises(LayoutError, match="Omit layout="):
            DVariable(x, layout=Layout([UNSHARDED, "x"], mesh))
        v = DVariable(x, dtype=np.float32)
        with pytest.raises(UnshardableError, match="copy_to_mesh"):
            v.assign(np.ones((4, 4)))
        with pytest.raises(ArgumentTypeError, match="float64 to a variable of float32"):
            v.assign_add(x)
        with pytest.raises(ValueError, match="shape"):
            v.assign(x[0].astype(np.float32))
        whole = DVariable(np.ones(2), layout=Layout.replicated(mesh, 1))
        with pytest.raises(TypeError, match="pack takes blocks, and no variables"):
            dmesh.pack([whole] * 2, whole.layout)
        for read in (lambda: v.numpy(), lambda: np.asarray(v), lambda: list(v)):
            with pytest.raises(ImplicitGatherError):
                read()
        assert_same(v.full(), np.ones((4, 4), np.float32))

    run(FOUR, program)


# Datasets ---------------------------------------------------------------------------------------------------


def test_batches_are_sharded_arrays():
    images, labels = np.arange(60.0).reshape(20, 3), np.arange(20)

    def program(mesh):
        layouts = {"image": Layout(["x", "y"], mesh), "label": Layout(["x"], mesh)}
        data = Dataset.from_tensor_slices({"image": images, "label": labels})
        batches = DTensorDataset(
            data, mesh=mesh, layouts=layouts, global_batch_size=8, batch_dim="x", prefetch=1
        )
        assert len(batches) == 2
        found = list(batches)
        assert [one["image"].layout for one in found] == [layouts["image"]] * 2
        assert_same(np.concatenate([one["label"] for one in found]).full(), labels[:16])
        assert_same(found[1]["image"].full(), images[8:16])
        halves = data.batch(4, drop_remainder=True)
        again = DTensorDataset(
            halves,
            mesh=mesh,
            layouts=layouts,
            global_batch_size=8,
            batch_dim="x",
            dataset_already_batched=True,
        )
        assert_same(list(again)[1]["image"].full(), images[8:16])
        reader = iter(again)
        assert reader.element_spec == again.element_spec
        assert again.element_spec["image"].shape == (8, *images.shape[1:])
        next(reader)
        resumed = iter(again)
        resumed.restore(reader.state())
        assert_same(next(resumed)["image"].full(), images[8:16])
        with pytest.raises(StopIteration):
            next(resumed)

    run(GRID, program)


def test_datasets_that_do_not_fit_are_refused():
    def program(mesh):
        data = Dataset.from_tensor_slices(np.arange(60.0).reshape(20, 3))
        rows = Layout(["x", UNSHARDED], mesh)
        usual = {"mesh": mesh, "layouts": rows, "global_batch_size": 8, "batch_dim": "x"}
        for changed, error, message in (
            ({"tf_data_service_config": 1}, InputModeError, "no tf.data service"),
            ({"mesh": None}, ArgumentTypeError, "must be a dmesh.Mesh"),
            ({"layouts": (rows,)}, LayoutError, "in the structure of the elements"),
            ({"layouts": Layout(["x"], mesh)}, LayoutError, "layout for 2 dimensions"),
            ({"layouts": Layout([UNSHARDED, "x"], mesh)}, LayoutError, "does not cut its first dimension"),
            ({"global_batch_size": 7}, LayoutError, "multiple of the 2 devices"),
            ({"dataset_already_batched": True, "layouts": Layout(["x"], mesh)}, DatasetError, "size 3"),
        ):  # fmt: skip
            with pytest.raises(error, match=message):
                DTensorDataset(data, **{**usual, **changed})
        with pytest.raises(DatasetError, match="drop_remainder=True"):
            DTensorDataset(data.batch(4), **usual, dataset_already_batched=True)
        ragged = Dataset.from_generator(lambda: iter([1, [2]]), TensorSpec(None, float))
        with pytest.raises(DatasetError, match=r"number of dimensions .* is not known"):
            DTensorDataset(ragged, **usual)

    run(GRID, program)


# Operations of users ----------------------------------------------------------------------------------------


def count_rule(x, length):
    return [x.layout, None], ArraySpec((length,), np.intp, Layout.replicated(x.layout.mesh, 1), ("x",))


def scale_rule(x, weights):
    """Rows as they are cut, the weights on all devices; the sums of the rows, too."""
    mesh, (rows, _) = x.layout.mesh, x.layout.sharding_specs
    needed = [Layout([rows, UNSHARDED], mesh), Layout([UNSHARDED], mesh)]
    return needed, [
        ArraySpec(x.shape, x.dtype, needed[0]),
        ArraySpec(x.shape[:1], x.dtype, Layout([rows], mesh)),
    ]


def test_an_operation_has_a_rule_and_a_kernel():
    count = dmesh.register_op(lambda block, n: np.bincount(block, minlength=n), count_rule, name="count")
    scale = dmesh.register_op(lambda block, w: (block * w, (block * w).sum(1)), scale_rule, name="scale")
    values, weights = np.arange(24.0).reshape(8, 3), np.array([1.0, 2.0, 3.0])

    def program(mesh):
        numbers = dmesh.copy_to_mesh(np.arange(9) % 4, Layout(["x"], mesh), uneven=True)
        found = count(numbers, 5)
        assert found.partial == ("x",)
        assert_same(found.full(), np.bincount(np.arange(9) % 4, minlength=5))
        x = dmesh.copy_to_mesh(values, Layout(["x", UNSHARDED], mesh))
        w = dmesh.copy_to_mesh(weights, Layout(["y"], mesh), uneven=True)
        with pytest.raises(ImplicitGatherError, match="scale needs"):
            scale(x, w)
        with dmesh.implicit_gather("allow"):
            explained = dmesh.explain(scale, x, w)
            with dmesh.debug.bytes_moved() as moved:
                scaled, sums = scale(x, w)
        assert moved.total == explained.bytes_by_client[dmesh.client_id()]
        assert {step.operation for step in explained.steps} == {"scale"}
        assert_same(scaled.full(), values * weights)
        assert_same(sums.full(), (values * weights).sum(1))

    run(GRID, program)


def test_an_operation_can_be_numpys():
    def rule(a, v):
        return [a.layout, v.layout], ArraySpec(a.shape, a.dtype, a.layout)

    try:
        dmesh.register_op(lambda a, v: np.convolve(a, v, "same"), rule, function=np.convolve)

        def program(mesh):
            everywhere = Layout.replicated(mesh, 1)
            x, v = (dmesh.copy_to_mesh(np.arange(n) * 1.0, everywhere) for n in (9, 3))
            assert_same(np.convolve(x, v).full(), np.convolve(np.arange(9.0), np.arange(3.0), "same"))

        run(FOUR, program)
    finally:
        FUNCTIONS.pop(np.convolve)
        NOTES.pop(np.convolve)
    with pytest.raises(ArgumentTypeError, match="a NumPy function"):
        dmesh.register_op(len, rule, function=len)


def test_a_rule_and_a_kernel_that_disagree_are_refused():
    def program(mesh):
        x = dmesh.ones((8, 3), layout=Layout(["x", UNSHARDED], mesh))
        same = ArraySpec(x.shape, x.dtype, x.layout)
        for kernel, rule, message in (
            (lambda b: b[:1], lambda a: ([a.layout], same), r"block of shape \(1, 3\)"),
            (lambda b: b[0], lambda a: ([a.layout], same), "block of 1 dimensions"),
            (lambda b: b, lambda a: ([], same), "0 layouts for 1 operands"),
            (lambda b: b, lambda a: ([None], same), "returned None for operand 0"),
            (
                lambda b: b,
                lambda a: ([a.layout], same._replace(reduction="mean")),
                "returned an unknown reduction",
            ),
        ):
            with pytest.raises(UnshardableError, match=message):
                dmesh.register_op(kernel, rule)(x)

    run(FOUR, program)

"""The complaints about other sharded arrays, each excluded: no silent gather, no plain array, no hang."""

import copy
import pickle

import numpy as np
import pytest
from tests.array.worlds import World, run

import dmesh
from dmesh import UNSHARDED, Layout
from dmesh.errors import CollectiveMismatchError, ConfigurationError, ImplicitGatherError, UnshardableError
from dmesh.testing import FakeCluster

PAIR = World(2, 2, (4,))


@pytest.mark.parametrize(
    "operation",
    [
        np.asarray,
        lambda x: list(x) and x,
        lambda x: x.numpy(),
        np.unwrap,
        np.fft.fft,
        lambda x: np.subtract.accumulate(x),
    ],
)  # fmt: skip
def test_nothing_is_gathered_without_being_told(operation):
    def program(mesh):
        x = dmesh.arange(9.0, layout=Layout(["x"], mesh))
        with pytest.raises(
            ImplicitGatherError, match=r"72 bytes on each device, where the layout says 24\. Call"
        ):
            operation(x)
        with dmesh.implicit_gather("warn"), pytest.warns(dmesh.ImplicitGatherWarning, match="72 bytes"):
            operation(x)
        with dmesh.implicit_gather("allow"):
            operation(x)
        assert isinstance(
            operation(dmesh.relayout(x, Layout([UNSHARDED], mesh))), (np.ndarray, dmesh.DTensor)
        )

    run(PAIR, program)


@pytest.mark.parametrize("operation", [np.asarray, lambda x: x.numpy()])
def test_what_wants_the_whole_array_is_told_how_to_get_it(operation):
    def program(mesh):
        with pytest.raises(ImplicitGatherError, match=r"Call x\.full\(\) for the whole array, or allow"):
            operation(dmesh.arange(9.0, layout=Layout(["x"], mesh)))

    run(PAIR, program)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_array_is_of_its_own(copied):
    def program(mesh):
        x = dmesh.arange(9.0, layout=Layout(["x"], mesh))
        y = copied(x)
        y += 1
        np.testing.assert_array_equal((y - x).full(), np.ones(9))
        assert y.layout == x.layout

    run(PAIR, program)


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="'perhaps'"), dmesh.implicit_gather("perhaps"):
        pass


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + np.arange(9.0),
        lambda x: np.arange(9.0) * x,
        lambda x: np.where([True] * 9, x, 0),
        lambda x: np.concatenate([x, np.ones(3)]),
        lambda x: np.add(np.ones(9), 1, out=x) and np.add(x, 1, out=np.zeros(9)),
        lambda x: x @ np.ones(9),
    ],
)
def test_plain_arrays_do_not_mix(operation):
    def program(mesh):
        x = dmesh.arange(9.0, layout=Layout(["x"], mesh))
        with pytest.raises(UnshardableError):
            operation(x)
        assert (x + np.float64(1)).shape == (x + np.array(1.0)).shape == (9,)

    run(PAIR, program)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda x: np.packbits(x), r"np\.packbits is refused"),
        (lambda x: np.apply_along_axis(np.sum, 0, x), r"np\.apply_along_axis is refused"),
        (lambda x: np.add.at(x, [0], 1), r"np\.add\.at is not supported"),
        (lambda x: np.add.reduceat(x, [0]), r"np\.add\.reduceat is not supported"),
        (lambda x: x.tolist(), r"x\.full\(\)\.tolist\(\)"),
        (lambda x: dmesh.copy_to_mesh(np.array([None]), x.layout), "their elements are Python objects"),
        (lambda x: dmesh.zeros(3, layout=x.layout, shared=True), "layout= or shared="),
        (lambda x: dmesh.axes.psum(1, "x"), "dmesh.shard_map runs"),
        (pickle.dumps, r"only this client's blocks: .* x\.full\(\)"),
        (lambda x: pickle.dumps({"x": dmesh.DVariable(x)}), "only this client's blocks"),
    ],
)  # fmt: skip
def test_what_is_not_built_says_so(operation, message):
    def program(mesh):
        with pytest.raises(UnshardableError, match=message):
            operation(dmesh.arange(9.0, layout=Layout(["x"], mesh)))

    run(PAIR, program)


def test_one_client_that_reads_alone_is_an_error_on_all_that_names_both_lines():
    def program():
        mesh = dmesh.create_distributed_mesh([("x", 2)])
        x = dmesh.arange(8.0, layout=Layout(["x"], mesh))
        if dmesh.client_id() == 0:
            return x.full()  # alone
        return np.sort(dmesh.relayout(x, Layout([UNSHARDED], mesh))).full()

    with FakeCluster(2) as cluster:
        outcomes = cluster.run(program, check=False)
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveMismatchError), outcome
        assert "full: all_gather" in str(outcome)
        assert "relayout: all_gather" in str(outcome)
        assert str(outcome).count("@ test_refusals.py:") == 2


def test_the_same_call_at_two_lines_is_the_same_call():
    def program():
        mesh = dmesh.create_distributed_mesh([("x", 2)])
        x = dmesh.arange(8.0, layout=Layout(["x"], mesh))
        if dmesh.client_id() == 0:
            return float(x.sum())
        return float(x.sum())

    with FakeCluster(2) as cluster:
        assert cluster.run(program) == [28.0, 28.0]


def test_a_mesh_of_gpus_is_refused():
    mesh = dmesh.Mesh.from_string(
        "m|x=2|0,1|0,1|/job:localhost/replica:0/task:0/device:GPU:0,/job:localhost/replica:0/task:0/device:GPU:1"
    )
    with pytest.raises(UnshardableError, match="host_mesh"):
        dmesh.zeros(4, layout=Layout(["x"], mesh))

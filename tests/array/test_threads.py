"""The devices of one client work in threads, where blocks are large; nothing else shows it."""

import os
import threading

import numpy as np
import pytest
from tests.array.worlds import World, run

import dmesh
from dmesh import Layout
from dmesh.arrays import grid
from dmesh.arrays.dispatch import threads as device_threads

LARGE, SMALL = 1 << 19, 1 << 10  # elements
FOUR = World(1, 4, (4,))


@pytest.fixture(autouse=True)
def _four_cpus(monkeypatch):
    """Makes meshes of clients that have four CPUs."""
    monkeypatch.setattr(grid, "own_cpus", lambda: frozenset(range(4)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for known in grid._known.values():
        known.__dict__.pop("threads", None)
    yield
    for known in list(grid._known.values()):
        known.__dict__.pop("threads", None)


def unary(kernel):
    def rule(x):
        return [x.layout], dmesh.ArraySpec(x.shape, x.dtype, x.layout)

    return dmesh.register_op(kernel, rule, name="kernel")


def on(mesh, n):
    return dmesh.arange(float(n), layout=Layout(["x"], mesh))


def rows(mesh):
    return Layout(["x", "unsharded"], mesh)


def threaded_and_alone(monkeypatch, program):
    (threaded,) = run(FOUR, program)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for known in grid._known.values():
        known.__dict__.pop("threads", None)
    (alone,) = run(FOUR, program)
    return threaded, alone


def test_large_blocks_are_worked_on_at_once():
    def program(mesh):
        meeting = threading.Barrier(4)

        def kernel(block):
            meeting.wait(60)  # breaks unless all four are there
            return block + 1

        return unary(kernel)(on(mesh, LARGE)).full()

    (found,) = run(FOUR, program)
    np.testing.assert_array_equal(found, np.arange(1.0, LARGE + 1))


def test_small_blocks_are_worked_on_by_the_caller():
    def program(mesh):
        threads = []

        def kernel(block):
            threads.append(threading.get_ident())
            return block

        unary(kernel)(on(mesh, SMALL))
        return set(threads) == {threading.get_ident()}, len(threads)

    assert run(FOUR, program) == [(True, 4)]


@pytest.mark.parametrize("serial", [True, False])
def test_products_have_threads_of_the_devices_or_of_the_library(monkeypatch, serial):
    monkeypatch.setattr(device_threads, "SERIAL_BLAS", serial)
    monkeypatch.setattr(device_threads, "LARGE", 1)
    tensordot = np.tensordot
    meeting = threading.Barrier(4)

    def program(mesh):
        caller, seen = threading.get_ident(), []

        def watched(function):
            def call(*args, **kwargs):
                if serial:
                    meeting.wait(60)  # breaks unless all four are there
                seen.append(threading.get_ident() == caller)
                return function(*args, **kwargs)

            return call

        a = dmesh.ones((4 * 8, 8), layout=rows(mesh))
        monkeypatch.setattr(np, "tensordot", watched(tensordot))
        product = np.dot(a, a[:8])
        monkeypatch.setattr(np, "tensordot", tensordot)
        return seen, product[0, 0].item()

    ((seen, value),) = run(FOUR, program)
    assert value == 8
    assert seen.count(True) == (1 if serial else 4)
    assert len(seen) == 4


@pytest.mark.parametrize(("threads", "most"), [("1", 1), ("2,1", 2), ("999", 4), ("nonsense", 4)])
def test_omp_num_threads_limits_them(monkeypatch, threads, most):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert run(FOUR, lambda mesh: on(mesh, SMALL).spec.grid.threads) == [most]


def test_clients_of_a_host_share_the_cpus():
    assert run(World(2, 2, (4,)), lambda mesh: on(mesh, SMALL).spec.grid.threads) == [2, 2]


def test_threads_inherit_errstate():
    def program(mesh):
        x = on(mesh, LARGE)
        with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
            1 / x
        with np.errstate(divide="raise", invalid="raise"), pytest.raises(FloatingPointError):
            np.sum(x / (x - x[LARGE - 1].item()))
        with np.errstate(divide="ignore"):
            return (1 / x)[0].item()

    assert run(FOUR, program) == [np.inf]


def test_the_first_error_is_raised():
    def program(mesh):
        def kernel(block):
            raise ValueError(f"block {block[0]:.0f}")

        with pytest.raises(ValueError, match=r"^block 0$"):
            unary(kernel)(on(mesh, LARGE))

    run(FOUR, program)


def test_results_are_those_of_one_thread(monkeypatch):
    def program(mesh):
        x = np.sin(on(mesh, LARGE))
        made = [x + x, np.sum(x), np.sort(x), np.divmod(x, 0.3)[1], np.cumsum(x), x @ x, np.std(x)]
        positive, changed = x > 0, x + 0
        changed[positive] = x[positive] * 2
        changed[x > 0.9] = 3
        made += [x[positive], *np.nonzero(positive), np.unique(np.round(x, 3)), changed]
        return [one.full() for one in made]

    threaded, alone = threaded_and_alone(monkeypatch, program)
    for a, b in zip(threaded, alone, strict=True):
        np.testing.assert_array_equal(a, b)


def test_factorizations_are_those_of_one_thread(monkeypatch):
    monkeypatch.setattr(device_threads, "SERIAL_BLAS", True)
    monkeypatch.setattr(device_threads, "LARGE", 1)  # of matrices that OpenBLAS multiplies in one thread

    def program(mesh):
        a = np.reshape(np.sin(on(mesh, 40 * 40)), (40, 40)) + 30 * dmesh.eye(40, layout=rows(mesh))
        made = [np.linalg.solve(a, a[:, :3]), np.linalg.inv(a), np.linalg.cholesky(a @ a.T)]
        made += [*np.linalg.qr(a), *np.linalg.qr(a[:, :3]), *np.linalg.svd(a[:, :3])]
        return [one.full() for one in made]

    threaded, alone = threaded_and_alone(monkeypatch, program)
    for a, b in zip(threaded, alone, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_operation_within_a_kernel_does_not_wait_for_itself():
    def program(mesh):
        x = on(mesh, LARGE)
        inner = unary(np.negative)

        def kernel(block):
            inner(x)
            return block

        return unary(kernel)(x)[-1].item()

    assert run(FOUR, program) == [LARGE - 1.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    def program(mesh):
        x = on(mesh, LARGE)
        x + x
        child = os.fork()
        if not child:
            os._exit(0 if (x + x)._shards[-1][-1] == 2 * LARGE - 2 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run(FOUR, program) == [0]

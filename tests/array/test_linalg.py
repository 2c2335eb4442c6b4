"""Linear algebra of a matrix that is cut: against NumPy's, to within rounding, and nothing is gathered."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.array.test_operations import EXAMPLES
from tests.array.worlds import WORLDS, World, run, specs

import dmesh
from dmesh import UNSHARDED, Layout
from dmesh.errors import ImplicitGatherError, UnshardableError

FEW = settings(EXAMPLES, max_examples=8)
KINDS = ("float64", "float32", "complex128")


def made(kind, m, n, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((m, n))
    if kind == "complex128":
        values = values + 1j * rng.standard_normal((m, n))
    return values.astype(kind)


def close(found, expected, kind, condition=1.0):
    """Compares with NumPy's result: within 200 roundings of the largest element, times a condition number."""
    mine = found.full() if isinstance(found, dmesh.DTensor) else np.asarray(found)
    assert mine.dtype == np.asarray(expected).dtype
    assert mine.shape == np.shape(expected)
    bound = 200 * np.finfo(kind).eps * condition * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(mine, expected, rtol=0, atol=bound)


@FEW
@given(data=st.data())
def test_square_matrices(data):
    world = data.draw(st.sampled_from(WORLDS))
    kind = data.draw(st.sampled_from(KINDS))
    n, m = data.draw(st.sampled_from([1, 2, 3, 5, 8, 13])), data.draw(st.sampled_from([0, 1, 2, 7]))
    seed = data.draw(st.integers(0, 1 << 16))
    a = made(kind, n, n, seed)
    spd = (a @ a.conj().T + n * np.eye(n)).astype(kind)
    b = made(kind, n, m, seed + 1)
    layout, other = data.draw(specs(world, 2)), data.draw(specs(world, 2))
    condition = np.linalg.cond(a)

    def program(mesh):
        with dmesh.implicit_gather("allow"):
            x = dmesh.copy_to_mesh(a, Layout(list(layout), mesh), uneven=True)
            p = dmesh.copy_to_mesh(spd, Layout(list(layout), mesh), uneven=True)
            y = dmesh.copy_to_mesh(b, Layout(list(other), mesh), uneven=True)
            close(np.linalg.cholesky(p), np.linalg.cholesky(spd), kind)
            close(np.linalg.cholesky(p, upper=True), np.linalg.cholesky(spd, upper=True), kind)
            close(np.linalg.solve(x, y), np.linalg.solve(a, b), kind, condition)
            close(
                np.linalg.solve(p, y[:, 0] if m else p[0]),
                np.linalg.solve(spd, b[:, 0] if m else spd[0]),
                kind,
                n,
            )
            close(np.linalg.inv(x), np.linalg.inv(a), kind, condition)
            close(np.linalg.det(x), np.linalg.det(a), kind)
            mine, theirs = np.linalg.slogdet(x), np.linalg.slogdet(a)
            close(mine.sign, theirs.sign, kind)
            close(mine.logabsdet, theirs.logabsdet, kind, condition)
            close(np.linalg.matrix_power(p, -2), np.linalg.matrix_power(spd, -2), kind, n)
            close(np.linalg.matrix_power(x, 0), np.linalg.matrix_power(a, 0), kind)
            close(np.linalg.cond(p, 1), np.linalg.cond(spd, 1), kind)
            explained = dmesh.explain(np.linalg.cholesky, p).bytes_by_client.get(dmesh.client_id(), 0)
            with dmesh.debug.bytes_moved() as moved:
                np.linalg.cholesky(p)
            assert moved.total == explained

    run(world, program)


@FEW
@given(data=st.data())
def test_tall_and_wide_matrices(data):
    world = data.draw(st.sampled_from(WORLDS))
    kind = data.draw(st.sampled_from(KINDS))
    m, n = data.draw(st.sampled_from([5, 8, 17, 40])), data.draw(st.sampled_from([1, 2, 4]))
    a = made(kind, m, n, data.draw(st.integers(0, 1 << 16)))
    if data.draw(st.booleans()) and n > 1:
        a[:, -1] = a[:, 0]  # of lower rank
    b = made(kind, m, 2, 5)
    layout, other = data.draw(specs(world, 2)), data.draw(specs(world, 2))
    rank = int(np.linalg.matrix_rank(a))
    condition = np.linalg.cond(a) if rank == n else 10.0

    def program(mesh):
        with dmesh.implicit_gather("allow"):
            x = dmesh.copy_to_mesh(a, Layout(list(layout), mesh), uneven=True)
            y = dmesh.copy_to_mesh(b, Layout(list(other), mesh), uneven=True)
            q, r = np.linalg.qr(x)
            close(q @ r, a, kind)
            close(np.conjugate(q.T) @ q, np.eye(n, dtype=kind), kind)
            close(np.abs(r)[:rank], np.abs(np.linalg.qr(a, "r"))[:rank], kind, condition)
            q, r = np.linalg.qr(x, "complete")
            close(q @ r, a, kind)
            close(np.conjugate(q.T) @ q, np.eye(m, dtype=kind), kind)
            for one, values in ((x, a), (x.T, a.T)):
                u, s, v = np.linalg.svd(one, full_matrices=False)
                close(s, np.linalg.svd(values, compute_uv=False), kind)
                close((u * s) @ v, values, kind)
                whole_u, whole_s, whole_v = np.linalg.svd(one)
                close(whole_s, np.linalg.svd(values, compute_uv=False), kind)
                for square in (whole_u, whole_v):
                    close(np.conjugate(square.T) @ square, np.eye(len(square), dtype=kind), kind)
                close((whole_u[:, :n] * whole_s) @ whole_v[:n], values, kind)
                close(np.linalg.svdvals(one), np.linalg.svdvals(values), kind)
                close(np.linalg.pinv(one), np.linalg.pinv(values), kind, condition**2)
                for order in (2, "nuc", "fro", 1, np.inf):
                    close(np.linalg.norm(one, order), np.linalg.norm(values, order), kind)
            assert int(np.linalg.matrix_rank(x)) == rank
            for right, values in ((y, b), (y[:, 0], b[:, 0])):
                found, left, number, s = np.linalg.lstsq(x, right)
                expected = np.linalg.lstsq(a, values)
                assert number == expected[2] == rank
                close(found, expected[0], kind, condition**2)
                assert left.shape == expected[1].shape or values.ndim == 1
                close(np.sum(left), np.sum(expected[1]), kind, condition**2)
                close(s, expected[3], kind)

    run(world, program)


@FEW
@given(data=st.data())
def test_qr_of_matrices_that_are_not_tall(data):
    world = data.draw(st.sampled_from(WORLDS))
    kind = data.draw(st.sampled_from([*KINDS, "int64"]))
    m, n = data.draw(st.sampled_from([(1, 1), (3, 3), (8, 8), (13, 13), (5, 11), (3, 1), (9, 8), (2, 40)]))
    a = np.ceil(made("float64", m, n, 7) * 9).astype(kind) if kind == "int64" else made(kind, m, n, 7)
    layout = data.draw(specs(world, 2))

    def program(mesh):
        x = dmesh.copy_to_mesh(a, Layout(list(layout), mesh), uneven=True)
        expected = np.linalg.qr(a)
        real = expected.R.dtype
        q, r = np.linalg.qr(x)
        few = min(m, n)
        close(q @ r, expected.Q @ expected.R, real)
        close(np.conjugate(q.T) @ q, np.eye(few, dtype=real), real)
        close(np.tril(r, -1), np.zeros((few, n), real), real)
        condition = np.linalg.cond(a[:, :few])
        close(np.abs(r), np.abs(expected.R), real, condition)
        close(np.linalg.qr(x, "r"), r.full(), real)
        q, r = np.linalg.qr(x, "complete")
        assert (q.shape, r.shape) == ((m, m), (m, n))
        close(q @ r, expected.Q @ expected.R, real)
        close(np.conjugate(q.T) @ q, np.eye(m, dtype=real), real)
        close(np.tril(r, -1), np.zeros((m, n), real), real)
        explained = dmesh.explain(np.linalg.qr, x).bytes_by_client.get(dmesh.client_id(), 0)
        with dmesh.debug.bytes_moved() as moved:
            np.linalg.qr(x)
        assert moved.total == explained

    run(world, program)


FOUR = World(2, 2, (4,))


def test_pseudo_inverses_and_condition_numbers_of_singular_matrices():
    small = np.zeros((40, 2), np.float32)
    small[0, 0], small[1, 1] = 1, 1e-9  # more than NumPy's default tolerance, whatever the dtype

    def program(mesh):
        def on(values):
            return dmesh.copy_to_mesh(values, Layout(["x", "unsharded"], mesh), uneven=True)

        np.testing.assert_allclose(np.linalg.pinv(on(small)).full(), np.linalg.pinv(small), rtol=1e-5)
        assert not np.linalg.pinv(on(small), rtol=None).full()[1, 1]
        assert float(np.linalg.cond(on(np.zeros((40, 2))))) == np.inf
        assert np.isnan(float(np.linalg.cond(on(np.full((6, 6), np.nan)), 1)))
        for p in (1, "fro"):
            assert (
                float(np.linalg.cond(on(np.ones((6, 6))), p)) == np.linalg.cond(np.ones((6, 6)), p) == np.inf
            )
            with pytest.raises(np.linalg.LinAlgError):
                np.linalg.cond(on(small), p)

    run(FOUR, program)


GRID = World(2, 2, (2, 2))


def test_qr_of_a_square_matrix_is_as_stable_as_numpys_and_no_device_gets_it():
    n = 120
    a = made("float64", n, n, 1)
    hilbert = 1 / (np.arange(n)[:, None] + np.arange(n) + 1)
    ones = np.ones((n, n))

    def program(mesh):
        dims = ["x", mesh.dim_names[1] if len(mesh.dim_names) > 1 else UNSHARDED]
        for layout in (Layout(dims, mesh), Layout(dims[::-1], mesh)):
            for values in (a, hilbert, ones):
                x = dmesh.copy_to_mesh(values, layout)
                q, r = np.linalg.qr(x)
                assert q.layout == r.layout == layout
                theirs = np.linalg.qr(values).Q
                error = np.abs((q.T @ q).full() - np.eye(n)).max()
                assert error < max(1e-14, 4 * np.abs(theirs.T @ theirs - np.eye(n)).max())
                assert np.abs((q @ r).full() - values).max() < 1e-14 * n
            x = dmesh.copy_to_mesh(a, layout)
            close(np.linalg.qr(x).Q, np.linalg.qr(a).Q, "float64", 100.0)  # signs, too
            assert dmesh.explain(np.linalg.qr, x).peak <= x.spec.largest * 1.5

    for world in (FOUR, GRID):
        run(world, program)


def test_qr_of_matrices_of_extreme_size():
    def program(mesh):
        layout = Layout(["x", UNSHARDED], mesh)
        for scale in (1e-300, 1e300):
            values = made("float64", 8, 8, 3) * scale
            q, r = np.linalg.qr(dmesh.copy_to_mesh(values, layout))
            close(q, np.linalg.qr(values).Q, "float64", 50.0)
            np.testing.assert_allclose((q @ r).full() / scale, values / scale, rtol=0, atol=1e-13)
        assert np.isnan(np.linalg.qr(dmesh.full((8, 8), np.nan, layout=layout)).R.full()).any()

    run(FOUR, program)


def test_a_large_matrix_is_factored_by_panels_and_no_device_gets_it():
    n = 160
    a = made("float64", n, n, 1)
    spd = a @ a.T + n * np.eye(n)

    def program(mesh):
        for layout in (Layout(["x", UNSHARDED], mesh), Layout([UNSHARDED, "x"], mesh)):
            p = dmesh.copy_to_mesh(spd, layout)
            steps = dmesh.explain(np.linalg.cholesky, p)
            assert steps.peak <= p.spec.largest
            factor = np.linalg.cholesky(p)
            assert factor.layout == layout
            close(factor, np.linalg.cholesky(spd), "float64")
            close(np.linalg.solve(p, p[0]), np.linalg.solve(spd, spd[0]), "float64")
            close(np.linalg.inv(p), np.linalg.inv(spd), "float64")

    run(FOUR, program)


def test_full_factors_are_cut_as_the_matrix_is_and_nothing_is_gathered_for_them():
    a = made("float64", 64, 3, 2)

    def program(mesh):
        x = dmesh.copy_to_mesh(a, Layout(["x", UNSHARDED], mesh))
        u, s, v = np.linalg.svd(x)
        assert u.layout == x.layout
        close((u[:, :3] * s) @ v, a, "float64")
        close(u.T @ u, np.eye(64), "float64")
        u, s, v = np.linalg.svd(x.T)
        assert v.layout.sharding_specs == [UNSHARDED, "x"]
        close((u * s) @ v[:3], a.T, "float64")
        q, r = np.linalg.qr(x, "complete")
        assert q.layout == x.layout
        close(q @ r, a, "float64")
        assert dmesh.explain(np.linalg.svd, x).peak >= u.nbytes
        for function in (np.linalg.svd, lambda x: np.linalg.qr(x, "complete")):
            explained = dmesh.explain(function, x).bytes_by_client.get(dmesh.client_id(), 0)
            with dmesh.debug.bytes_moved() as moved:
                function(x)
            assert moved.total == explained

    run(FOUR, program)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_tolerances_of_a_stack_of_matrices(dim):
    a = made("float32", 8, 5 * 3, 3).reshape(8, 5, 3)
    tolerances = np.linspace(0, 1, 8)
    column = np.array([[0.1], [0.4], [0.9]])

    def program(mesh):
        layout = Layout(["x" if d == dim else UNSHARDED for d in range(3)], mesh)
        x = dmesh.copy_to_mesh(a, layout, uneven=True)
        for cut in ("x", UNSHARDED):
            t = dmesh.copy_to_mesh(tolerances, Layout([cut], mesh))
            for key in ("rtol", "rcond"):
                close(np.linalg.pinv(x, **{key: t}), np.linalg.pinv(a, **{key: tolerances}), "float32")
            close(np.linalg.pinv(x, t), np.linalg.pinv(a, tolerances), "float32")
            for key in ("rtol", "tol"):
                found = np.linalg.matrix_rank(x, **{key: t})
                close(found, np.linalg.matrix_rank(a, **{key: tolerances}), "float32")
            close(np.linalg.matrix_rank(x, t), np.linalg.matrix_rank(a, tolerances), "float32")
        several = dmesh.copy_to_mesh(column, Layout([UNSHARDED, UNSHARDED], mesh))
        close(np.linalg.matrix_rank(x, rtol=several), np.linalg.matrix_rank(a, rtol=column), "float32")
        with pytest.raises(ValueError, match=r"rtol= has shape \(3, 1\)"):
            np.linalg.pinv(x, rtol=several)
        with pytest.raises(UnshardableError, match="plain one of shape"):
            np.linalg.pinv(x, rtol=tolerances)

    run(FOUR, program)


def test_tolerances_of_a_matrix_that_is_cut():
    a = made("float64", 16, 3, 4)
    tolerances = np.linspace(0, 1, 4)

    def program(mesh):
        x = dmesh.copy_to_mesh(a, Layout(["x", UNSHARDED], mesh))
        one = dmesh.copy_to_mesh(np.float64(0.8), Layout([], mesh))
        t = dmesh.copy_to_mesh(tolerances, Layout(["x"], mesh))
        for value, of in ((x, a), (x.T, a.T), (dmesh.relayout(x, Layout([UNSHARDED] * 2, mesh)), a)):
            close(np.linalg.pinv(value, rtol=one), np.linalg.pinv(of, rtol=0.8), "float64")
            close(np.linalg.matrix_rank(value, rtol=one), np.linalg.matrix_rank(of, rtol=0.8), "float64")
            close(np.linalg.matrix_rank(value, rtol=t), np.linalg.matrix_rank(of, rtol=tolerances), "float64")
            close(np.linalg.matrix_rank(value, t), np.linalg.matrix_rank(of, tolerances), "float64")
            with pytest.raises(ValueError, match="does not match a stack"):
                np.linalg.pinv(value, rtol=t)

    run(FOUR, program)


def test_what_cannot_be_done_says_so():
    def program(mesh):
        layout = Layout(["x", UNSHARDED], mesh)
        singular = dmesh.ones((8, 8), layout=layout)
        with pytest.raises(np.linalg.LinAlgError, match="Singular"):
            np.linalg.solve(singular, singular)
        assert float(np.linalg.det(singular)) == 0
        assert float(np.linalg.slogdet(singular).logabsdet) == -np.inf
        with pytest.raises(np.linalg.LinAlgError, match="positive definite"):
            np.linalg.cholesky(-singular)
        with pytest.raises(np.linalg.LinAlgError, match="square"):
            np.linalg.inv(dmesh.ones((8, 3), layout=layout))
        with pytest.raises(ImplicitGatherError, match="eigh needs"):
            np.linalg.eigh(singular)
        with pytest.raises(ImplicitGatherError, match="svd needs"):
            np.linalg.svd(singular)
        with pytest.raises(UnshardableError, match="mode='reduced'"):
            np.linalg.qr(dmesh.ones((8, 1), layout=layout), "raw")

    run(FOUR, program)

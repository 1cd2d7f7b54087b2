"""Sparse matrices by rows beside dense ones, linear programs by highspy beside scipy's."""

import numpy as np
import pytest

from autoshard.solvers.linprog import SparseRows, highest, linprog

optimize = pytest.importorskip("scipy.optimize")


def dense(matrix: SparseRows, num_columns: int) -> np.ndarray:
    out = np.zeros((len(matrix.start) - 1, num_columns))
    for k, (a, b) in enumerate(zip(matrix.start, matrix.start[1:])):
        assert (np.diff(matrix.index[a:b]) > 0).all()  # HiGHS takes no column twice
        out[k, matrix.index[a:b]] = matrix.values[a:b]
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (4, 9), (3, 0), (0, 4)])
def test_entries_at_one_place_add_up_and_rows_may_be_empty(shape, seed):
    rng = np.random.default_rng(seed)
    count = 12 if min(shape) else 0
    rows, columns, values = rng.integers(0, max(shape[0], 1), count), rng.integers(0, max(shape[1], 1), count), rng.normal(size=count)
    expected = np.zeros(shape)
    np.add.at(expected, (rows, columns), values)
    matrix = SparseRows.of(rows, columns, values, shape)
    np.testing.assert_allclose(dense(matrix, shape[1]), expected, atol=1e-12)
    np.testing.assert_allclose(dense(SparseRows.dense(expected).below(matrix), shape[1]), np.vstack([expected, expected]), atol=1e-12)
    prices = rng.normal(size=shape[0])
    np.testing.assert_allclose(matrix.priced(prices, shape[1]), prices @ expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_optima_and_prices_are_those_of_scipy(seed):
    rng = np.random.default_rng(seed)
    m, n = rng.integers(2, 8, 2)
    matrix, cost, high = rng.normal(size=(m, n)), rng.normal(size=n), rng.normal(size=m)
    expected = optimize.linprog(cost, A_ub=matrix[1:], b_ub=high[1:], A_eq=matrix[:1], b_eq=high[:1], bounds=(-3, 5), method="highs")
    low = np.append(high[:1], np.full(m - 1, -np.inf))
    optimum = linprog(cost, SparseRows.dense(matrix), low, high, np.full(n, -3.0), np.full(n, 5.0))
    assert (optimum is None) == (expected.x is None)
    if optimum is not None:
        assert optimum.value == pytest.approx(expected.fun, abs=1e-7) == cost @ optimum.x
        np.testing.assert_allclose(optimum.prices, np.append(expected.eqlin.marginals, expected.ineqlin.marginals), atol=1e-7)


def test_a_program_without_an_answer_or_without_an_end_has_no_optimum():
    one, inf = SparseRows.dense(np.ones((1, 1))), np.full(1, np.inf)
    assert linprog(np.ones(1), one, np.ones(1), inf, np.zeros(1), np.full(1, 0.5)) is None
    assert linprog(-np.ones(1), one, -inf, inf, np.zeros(1), inf) is None


@pytest.mark.parametrize("seed", range(12))
def test_the_highest_point_below_lines_is_where_two_of_them_meet_or_at_an_end(seed):
    """Of one number up to 3, and of two whose sum is 3."""
    rng = np.random.default_rng(seed)
    costs, slopes = rng.normal(size=4), rng.normal(size=(4, 2)) - 0.5 * (seed % 2)

    def expected(at, along):
        meet = [(at[i] - at[j]) / (along[j] - along[i]) for i in range(4) for j in range(i)]
        return max(min(at + along * t) for t in (0.0, 3.0, *(t for t in meet if 0 < t < 3)))

    (t,), value = highest(costs, slopes[:, :1], most=3.0)
    assert value == pytest.approx(expected(costs, slopes[:, 0])) == pytest.approx(min(costs + slopes[:, 0] * t)) and 0 <= t <= 3
    y, value = highest(costs, slopes, total=3.0)
    assert value == pytest.approx(expected(costs + 3 * slopes[:, 1], slopes[:, 0] - slopes[:, 1]))
    assert y.sum() == pytest.approx(3) and (y >= 0).all() and value == pytest.approx(min(costs + slopes @ y))

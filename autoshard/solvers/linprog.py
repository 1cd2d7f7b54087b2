"""Linear programs by HiGHS, and sparse matrices by rows as it takes them.

minimise  cost . x      where  low <= matrix x <= high,  least <= x <= most                                  -> linprog
"""

from dataclasses import dataclass

import highspy
import numpy as np


@dataclass(frozen=True)
class SparseRows:
    """A sparse matrix: row k has `values[start[k] : start[k + 1]]` in the columns `index[...]`, which ascend."""

    start: np.ndarray
    index: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> "SparseRows":
        """The matrix of these entries; entries at the same place add up."""
        place = rows * shape[1] + columns
        order = np.argsort(place, kind="stable")  # entries come in a few ascending runs, which a stable sort merges
        place = place[order]
        first = np.flatnonzero(np.diff(place, prepend=-1))
        row, index = np.divmod(place[first], shape[1])
        values = np.add.reduceat(values[order], first) if len(first) else np.zeros(0)
        return cls(np.searchsorted(row, np.arange(shape[0] + 1)), index, values)

    @classmethod
    def dense(cls, matrix: np.ndarray) -> "SparseRows":
        rows, columns = np.nonzero(matrix)
        return cls.of(rows, columns, matrix[rows, columns], matrix.shape)

    def below(self, other: "SparseRows") -> "SparseRows":
        """Our rows and after them those of the other."""
        start = np.concatenate([self.start, self.start[-1] + other.start[1:]])
        return SparseRows(start, np.concatenate([self.index, other.index]), np.concatenate([self.values, other.values]))

    def priced(self, prices: np.ndarray, num_columns: int) -> np.ndarray:
        """Per column, the sum of its entries times the prices of their rows."""
        return np.bincount(self.index, self.values * np.repeat(prices, np.diff(self.start)), num_columns)


@dataclass(frozen=True)
class Optimum:
    x: np.ndarray
    value: float
    prices: np.ndarray  # per row: what its bound adds to the value, per unit


def linprog(cost: np.ndarray, matrix: SparseRows, low: np.ndarray, high: np.ndarray, least: np.ndarray, most: np.ndarray) -> Optimum | None:
    """The optimum; None where HiGHS finds none. Bounds may be infinite."""
    highs = quiet_highs()
    highs.passModel(model_of(cost, matrix, low, high, least, most))
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = highs.getSolution()
    return Optimum(np.array(solution.col_value), highs.getObjectiveValue(), np.array(solution.row_dual))


def highest(costs: np.ndarray, slopes: np.ndarray, most: float = np.inf, total: float | None = None) -> tuple[np.ndarray, float] | None:
    """The y at which the smallest of costs + slopes @ y is largest, and that value; 0 <= y <= most, of the sum `total` if there is one."""
    count = slopes.shape[1]
    rows, low, high = np.hstack([np.ones((len(costs), 1)), -slopes]), np.full(len(costs), -np.inf), costs  # value - slopes @ y <= costs
    if total is not None:
        rows, low, high = np.vstack([rows, [0.0] + [1.0] * count]), np.append(low, total), np.append(high, total)
    objective = np.concatenate([[-1.0], np.zeros(count)])
    bounds = np.append(-np.inf, np.zeros(count)), np.append(np.inf, np.full(count, most))
    solved = linprog(objective, SparseRows.dense(rows), low, high, *bounds)
    return None if solved is None else (solved.x[1:], float(solved.x[0]))


def model_of(
    cost: np.ndarray, matrix: SparseRows, low: np.ndarray, high: np.ndarray, least: np.ndarray, most: np.ndarray
) -> highspy.HighsLp:
    """The linear program in HiGHS's record."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(low)
    lp.col_cost_, lp.col_lower_, lp.col_upper_, lp.row_lower_, lp.row_upper_ = cost, least, most, low, high
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.start, matrix.index, matrix.values
    return lp


class _Highs(highspy.Highs):
    def enableCallbacks(self) -> None:  # HiGHS 1.16 calls this in __init__ and prints its banner to stdout there
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def quiet_highs(**options: float) -> highspy.Highs:
    """HiGHS with these options, silent, on one thread."""
    highs = _Highs()
    for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, **options}.items():
        highs.setOptionValue(name, value)
    return highs

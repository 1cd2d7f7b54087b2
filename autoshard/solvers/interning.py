"""Interning of arrays: equal arrays are replaced by one object, so that a function of them is computed once.

A 32-layer model repeats a block's tables 32 times; the contest's instance A has 54801 edges and 1560 different tables.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import loops

SAMPLE = 64  # entries of an array that tell it from others before all are compared
SEPARABLE = 1e-13  # relative to the table's largest entry: a[i] + b[j] up to rounding


class Pool:
    """Interned arrays. They are kept alive, so an id stands for the same array throughout."""

    def __init__(self) -> None:
        self._by_id: dict[int, np.ndarray] = {}
        self._by_value: dict[tuple, list[np.ndarray]] = {}
        self._originals: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._results: dict[tuple, Any] = {}

    def intern(self, array: np.ndarray) -> np.ndarray:
        if self._by_id.get(id(array)) is array:
            return array
        array = np.ascontiguousarray(array)
        key = fingerprint(array)
        alike = self._by_value.setdefault(key, [])
        known = next((x for x in alike if array.size <= SAMPLE or np.array_equal(_bits(x), _bits(array))), None)
        if known is None:
            alike.append(known := array)
        self._by_id[id(known)] = known
        return known

    def original(self, array: np.ndarray) -> np.ndarray:
        """Intern an array of the caller's, which is likely to be passed again."""
        if id(array) not in self._originals:
            self._originals[id(array)] = (self.intern(array), array)  # the caller's array is kept alive with its id
        return self._originals[id(array)][0]

    def of(self, function: Callable, *arrays: np.ndarray):
        """function(*arrays) for interned arrays, computed once; a resulting array is interned, and so are the arrays of a tuple."""
        key = (function, *map(id, arrays))
        if key in self._results:
            return self._results[key]
        result = function(*arrays)
        if isinstance(result, np.ndarray):
            result = self.intern(result)
        elif isinstance(result, tuple):
            result = tuple(self.intern(r) for r in result)
        self._results[key] = result
        return result


def fingerprint(array: np.ndarray) -> tuple:
    """Equal for equal contiguous arrays: all bytes of a small one; of a large one a sum and some entries, as hashing all takes longer than
    comparing arrays for which these are equal."""
    if array.size <= SAMPLE:
        return array.shape, array.dtype.char, array.tobytes()
    bits = _bits(array)
    return array.shape, array.dtype.char, int(bits.sum(dtype=np.uint64)), bits[:: len(bits) // SAMPLE].tobytes()


def _bits(array: np.ndarray) -> np.ndarray:
    """The bits of a contiguous array as integers, so that they are equal exactly where the bits are."""
    return array.reshape(-1).view(f"u{array.itemsize}")


def supported(table: np.ndarray) -> np.ndarray:
    """Mask of the rows that have a finite entry."""
    return np.isfinite(table).any(axis=1)


def separate(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(a, b) with table = a[i] + b[j], or None."""
    if not np.isfinite(table).all():
        return None
    a = table[:, 0].copy()
    b = table[0] - table[0, 0]
    return (a, b) if np.abs(table - (a[:, None] + b)).max() <= SEPARABLE * np.abs(table).max() else None


def function_of(table: np.ndarray) -> np.ndarray | None:
    """f with table[i, j] finite iff j = f[i], or None."""
    allowed = np.isfinite(table)
    return allowed.argmax(axis=1) if (allowed.sum(axis=1) == 1).all() else None


def graph_values(table: np.ndarray, f: np.ndarray) -> np.ndarray:
    """table[i, f[i]]"""
    return table[np.arange(len(f)), f]


def worst_loss(table: np.ndarray) -> np.ndarray:
    """[i, k]: the largest cost of row k in place of row i, max_j table[k, j] - table[i, j] where table[i, j] is finite."""
    if loop := loops.compiled(loops.worst_loss, loops.CALL + len(table) * table.size):
        return loop(table)
    loss = np.full((len(table), *table.shape), -np.inf)
    np.subtract(table[None, :, :], table[:, None, :], out=loss, where=np.isfinite(table)[:, None, :])
    return loss.max(axis=2, initial=-np.inf)


def eliminate_leaf(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[j]: min_i costs[i] + table[i, j]"""
    return (costs[:, None] + table).min(axis=0)


def eliminate_link(costs: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[a, b]: min_i costs[i] + left[i, a] + right[i, b]"""
    if loop := loops.compiled(loops.eliminate_link, loops.CALL + left.size * right.shape[1]):
        return loop(costs, left, right)
    return ((costs[:, None] + left)[:, :, None] + right[:, None, :]).min(axis=0, initial=np.inf)

"""Linear programs by scipy's HiGHS, which is loaded when the first is solved: it takes a tenth of a second."""

from typing import Any


def linprog(objective: Any, **constraints: Any) -> Any:
    """scipy.optimize.linprog by HiGHS: `x` is None where it finds no answer."""
    from scipy.optimize import linprog as solve  # here: see above

    return solve(objective, **constraints, method="highs")

"""The default solver, which combines the others.

limit    Where memory is limited and moves between layouts hold bytes, layers repeat and answers are dense near the limit: a search
         over prices per byte comes first (price_search.py)
settle   Then reductions, dual ascent, and branch and bound on the choices that are still affordable (settle.py)
"""

from dataclasses import dataclass

from ..problem import Problem
from .incumbent import Incumbent, Solver
from .price_search import search_prices
from .settle import reduce_and_settle


@dataclass(frozen=True)
class Auto(Solver):
    """The solver to use when nothing else is asked for."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        if problem.usage_limit is not None and any(u.edge is not None for u in problem.usages):
            search_prices(problem, incumbent, incumbent.record.messages)
            incumbent.note_carried()
        if not incumbent.done:
            reduce_and_settle(problem, incumbent)

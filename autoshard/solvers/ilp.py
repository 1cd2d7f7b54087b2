"""HiGHS on the marginal form (linear_program.py): first the relaxation, then branch and bound; memory rows are added when violated.

With 1e18 in the place of forbidden pairs instead of no column, or with the textbook products e <= x, the same problems take 10 to 100
times longer; on planning problems the relaxation is integral unless memory binds. Only a few memory rows are ever violated (12 to 15 of
139 to 15152 on the contest's instances).
"""

import math
import threading
import time
from dataclasses import dataclass

import highspy
import numpy as np

from ..problem import Problem, anchored
from .answer import TOLERANCE, lowered
from .incumbent import Incumbent, Solver
from .linear_program import LinearProgram
from .linprog import SparseRows, model_of, quiet_highs

NANOSECONDS = 1e9  # of a second
OBJECTIVE = 1e5  # costs are scaled so that answers cost about this: HiGHS's tolerances are absolute
FEASIBILITY = 1e-9  # HiGHS's tolerances; its defaults of 1e-6 and 1e-7 are too loose for proofs to 1e-9
ROUNDING = TOLERANCE / 2  # relative; by this much a bound that HiGHS reports is rounded down
LONGEST_SLICE = 1e6  # seconds
LISTEN = 0.2  # seconds until Ctrl-C is noticed
CANCELLATIONS = 5
GRACE = 1.0  # seconds: HiGHS looks at its clock and at a cancellation only from time to time


@dataclass(frozen=True)
class ILP(Solver):
    """HiGHS on the marginal form, nothing reduced before."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        program = LinearProgram(problem)
        if program.empty:
            incumbent.raise_bound(math.inf)
            return
        memory = relax(program, incumbent)
        if not incumbent.done:
            branch(program, incumbent, memory)


def relax(program: LinearProgram, incumbent: Incumbent) -> list[int]:
    """Solve the relaxation and add memory rows until none is violated; returns those rows."""
    memory: list[int] = []
    model = Model(program, incumbent, memory, integer=False)
    while model.run(incumbent) == highspy.HighsModelStatus.kOptimal:
        solution = model.highs.getSolution()
        z, prices = np.array(solution.col_value), np.array(solution.row_dual) / model.scale
        num_rows = len(program.rhs)
        incumbent.raise_bound_below(program.bound(prices[:num_rows], memory, prices[num_rows:]))
        incumbent.offer(program.round(z))
        more = [row for row in program.exceeded(z) if row not in memory]
        if incumbent.done or not more:
            break
        for row in more:
            columns, amounts = program.memory_row(row)
            model.highs.addRow(-highspy.kHighsInf, program.scaled_limit, len(columns), columns, amounts)
        memory += more
    if model.status == highspy.HighsModelStatus.kInfeasible:
        incumbent.close()
    return memory


def branch(program: LinearProgram, incumbent: Incumbent, memory: list[int], most_nodes: int | None = None) -> None:
    """Branch and bound; repeated with more memory rows while the answer violates some, until an answer fits or time is up."""
    while not incumbent.done:
        model = Model(program, incumbent, memory, integer=True)
        if most_nodes is not None:
            model.highs.setOptionValue("mip_max_nodes", most_nodes)
        status = model.run(incumbent)
        if status is None:
            return
        if status == highspy.HighsModelStatus.kInfeasible:
            incumbent.close()
            return
        info = model.highs.getInfo()
        if math.isfinite(info.mip_dual_bound):
            bound = info.mip_dual_bound / model.scale + program.constant
            incumbent.raise_bound_below(lowered(bound, ROUNDING))
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return
        choice = program.round(np.array(model.highs.getSolution().col_value))
        incumbent.offer(choice)
        more = [row for row in program.exceeded_by(choice) if row not in memory]
        if not more:
            return
        memory = memory + more


def write_program(problem: Problem, path: str) -> None:
    """The integer program with every memory row, `.mps` or `.lp`: a column x_V_I for choice I of node V, e_K_I_J for pairs of edge K. Costs
    are in nanoseconds, so that they are far above the tolerances of solvers."""
    problem = anchored(problem)
    program = LinearProgram(problem)
    if program.empty:
        raise ValueError("no choice of some node or edge is allowed, so there is no program to write")
    program.cost, program.constant = program.cost * NANOSECONDS, program.constant * NANOSECONDS
    lp = program_of(program, list(range(len(program.rows.times))), 1.0, integer=True)
    lp.offset_ = program.constant
    nodes = [f"x_{v}_{i}" for v, c in enumerate(problem.node_costs) for i in np.flatnonzero(np.isfinite(c))]
    pairs = [f"e_{k}_{i}_{j}" for k, e in enumerate(problem.edges) for i, j in zip(*np.nonzero(np.isfinite(e.table)))]
    lp.col_names_ = [*nodes, *pairs]
    highs = quiet_highs()
    highs.passModel(lp)
    if highs.writeModel(path) == highspy.HighsStatus.kError:
        raise ValueError(f"HiGHS can't write {path}; is its folder there, and does it end in .mps or .lp?")


class Model:
    """A LinearProgram in HiGHS, its costs scaled."""

    def __init__(self, program: LinearProgram, incumbent: Incumbent, memory: list[int], *, integer: bool) -> None:
        self.scale = OBJECTIVE / _magnitude(program, incumbent)
        self.highs = quiet_highs(
            mip_rel_gap=max(incumbent.gap, TOLERANCE / 10), mip_abs_gap=0.0, primal_feasibility_tolerance=FEASIBILITY,
            dual_feasibility_tolerance=FEASIBILITY, mip_feasibility_tolerance=FEASIBILITY,
        )  # fmt: skip
        self.highs.HandleUserInterrupt = True
        self.highs.passModel(program_of(program, memory, self.scale, integer=integer))
        if integer and incumbent.choice is not None:
            start = highspy.HighsSolution()
            start.col_value = program.columns_of(incumbent.choice)
            self.highs.setSolution(start)

    def run(self, incumbent: Incumbent) -> highspy.HighsModelStatus | None:
        """Solve in the time left; None where HiGHS did not return in time (it was cancelled and will stop some time later)."""
        left = min(max(incumbent.time_left(), 0.01), LONGEST_SLICE)
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + left)  # HiGHS counts all runs of a model together
        # a thread, so that Ctrl-C and the time limit take effect meanwhile; no daemon: HiGHS aborts a process that ends before it does
        done = threading.Event()
        until = time.monotonic() + left + GRACE / 10
        try:
            threading.Thread(target=self._work, args=(done,)).start()  # Ctrl-C inside start() leaves a thread without a reference
            while not done.is_set() and time.monotonic() < until:
                done.wait(min(LISTEN, max(until - time.monotonic(), 0.0)))  # a signal just before a wait takes effect after it
        finally:
            for _ in range(CANCELLATIONS):  # repeated: a run that is just starting loses a cancellation
                if not done.is_set():
                    self.highs.cancelSolve()
                    done.wait(GRACE / CANCELLATIONS)
        self.status = self.highs.getModelStatus() if done.is_set() else None
        return self.status

    def _work(self, done: threading.Event) -> None:
        try:
            self.highs.run()
        finally:
            done.set()


def program_of(program: LinearProgram, memory: list[int], scale: float, *, integer: bool) -> highspy.HighsLp:
    """The program with these memory rows, its costs times `scale`."""
    rows = [program.memory_row(row) for row in memory]
    ends = np.cumsum([0, *(len(columns) for columns, _ in rows)])
    columns, amounts = (np.concatenate(one) for one in zip((ends[:0], np.zeros(0)), *rows))
    matrix = program.matrix.below(SparseRows(ends, columns, amounts))
    low = np.concatenate([program.rhs, np.full(len(rows), -highspy.kHighsInf)])
    high = np.concatenate([program.rhs, np.full(len(rows), program.scaled_limit)])
    # at most 1 is implied by the rows; without it the presolve of HiGHS 1.15.1 never ends on some programs of twenty columns
    bounds = np.zeros(program.num_columns), np.ones(program.num_columns)
    lp = model_of(program.cost * scale, matrix, low, high, *bounds)
    if integer:
        kinds = [highspy.HighsVarType.kInteger] * program.num_x
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (program.num_columns - program.num_x)
    return lp


def _magnitude(program: LinearProgram, incumbent: Incumbent) -> float:
    """The approximate cost of an answer above the constant; only the scaling depends on it."""
    if math.isfinite(incumbent.cost) and incumbent.cost - program.constant > 0:
        return incumbent.cost - program.constant
    total = float(np.mean(program.cost)) * (len(program.first_x) + len(program.first_e) - 2)
    return total if total > 0 else 1.0

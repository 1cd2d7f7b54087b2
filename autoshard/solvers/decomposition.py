"""Lagrangian decomposition: each part of a problem is solved exactly, equal parts once, and multipliers make them agree.

    D(L) = sum over parts P of   min over x of E_P(x) + sum over boundary nodes v of P of  L_Pv(x_v)      -> PartSolver.minimum
           where the L_Pv of a node add up to its costs: then D(L) <= the cost of every answer            -> Decomposition.evaluate
    L starts as what the messages of dual ascent (dual_ascent.py) leave to each part, averaged over equal parts    -> start
    Every answer x of a part is a plane: D_P(L') <= E_P(x) + sum of L'_Pv(x_v). The next L maximises the planes within a
    box around the best one; the box grows where that was right, and shrinks where not (Marsten, Hogan and Blankenship 1975)  -> climb
    Parts that are solved one after the other, given the boundaries that are decided, are an answer       -> decode
    Each part beside all others as they are: the answer gets better, or stays                             -> improve

Where a layer has an integrality gap, dual ascent leaves a gap as many times as there are layers, and branching can't close that. One
layer by itself is settled in a tenth of a second (settle.narrow), and the layers in the middle are equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..problem import Problem, evaluate
from .dual_ascent import SLOW, Messages, ascend
from .incumbent import Incumbent, Record
from .linprog import SparseRows, linprog
from .parts import Parts, divide
from .reduce import Reduced, reduce

SWEEPS = 600  # of dual ascent on a part
PART_GAP = 0.25  # of the gap that is asked for: to which a part is solved
ROUNDS = 10  # of new multipliers
MOST_CLASSES, MOST_SOLVED = 40, 120  # different parts, and how often one of them is solved for new multipliers: each time takes 0.05 s
PROMISING = 0.02  # of the gap: a smaller promise of the planes ends the climb
RIGHT = 0.2  # of what the planes promised
FIRST_WIDTH = 0.02  # of the gap per part: the first box
WIDER, NARROWER = 2.0, 0.4
IMPROVEMENTS = 6  # sweeps over all parts
SHARED = 8  # a node that more parts have is not changed with one of them
ROUNDING = 1e-12  # relative to the sum of the sizes of all terms

Settle = Callable[[Incumbent, Messages | None], None]  # settles a part, with the messages of dual ascent on it if there are some


def decompose(problem: Problem, homes: np.ndarray, incumbent: Incumbent, message: np.ndarray, settle: Settle) -> None:
    """Raise the bound, and look for answers, until the incumbent is done or multipliers promise no more.

    message: of dual ascent on the problem, which has no memory limit: per edge, into its first end and its second.
    """
    parts = divide(problem, homes)
    if not 1 < len(parts.edges) or len(parts.examples) > MOST_CLASSES:
        return
    steps = Decomposition(parts, incumbent, settle)
    steps.start(message)
    steps.best = steps.evaluate(steps.multipliers)
    if incumbent.choice is not None and not incumbent.done:
        incumbent.offer(steps.improve(np.array(incumbent.choice)))
    for rounds in (min(ROUNDS, MOST_SOLVED // len(parts.examples)), 0):
        if not incumbent.done and (decoded := steps.decode()) is not None:
            incumbent.offer(steps.improve(decoded))
        steps.climb(rounds)


@dataclass(frozen=True)
class PartAnswer:
    """A choice for the nodes of a part, its costs without multipliers, and a bound with them."""

    choice: tuple[int, ...] | None
    energy: float
    bound: float


INFEASIBLE = PartAnswer(None, math.inf, math.inf)


@dataclass(eq=False)
class PartSolver:
    """Equal parts: reduced once, solved for many multipliers."""

    problem: Problem
    boundary: tuple[int, ...]
    scale: float  # seconds: costs are moved to at least this, because solvers prove relative gaps
    outer: Incumbent
    settle: Settle
    known: dict[tuple[int, ...], None] = field(default_factory=dict)  # choices of the reduced problem
    last: list[np.ndarray] = field(default_factory=list)  # the messages of dual ascent on one of the parts: a class begins with another's

    def __post_init__(self) -> None:
        self.reduced: Reduced = reduce(self.problem, stop=lambda: self.outer.time_left() <= 0, kept=self.boundary)
        if self.reduced.problem is not None:
            number = {v: k for k, v in enumerate(self.reduced.nodes)}
            self.at = [number[v] for v in self.boundary]
            self.left = [self.reduced.choices_left(v, len(self.problem.node_costs[v])) for v in self.boundary]

    def minimum(self, multipliers: Sequence[np.ndarray], message: list[np.ndarray] | None = None) -> PartAnswer:
        """The best choice at these multipliers, one array per boundary node; inf forbids a choice.

        message: of dual ascent at other multipliers, or none; it is replaced by that at these.
        """
        core = self.reduced.problem
        if core is None:
            return INFEASIBLE
        costs = list(core.node_costs)
        for k, left, extra in zip(self.at, self.left, multipliers, strict=True):
            costs[k] = costs[k] + extra[left]
        least = math.fsum(float(x.min()) for x in (*costs, *(e.table for e in core.edges)))
        if least == math.inf:
            return INFEASIBLE
        offset = self.scale - least
        costs[-1] = costs[-1] + offset  # of the base
        inner = self._solved(replace(core, node_costs=tuple(costs)), message)
        bound = inner.bound - offset
        bound -= ROUNDING * (abs(offset) + abs(inner.bound)) if math.isfinite(bound) else 0.0
        if inner.record.choice is None:
            return PartAnswer(None, math.inf, bound)
        choice = tuple(self.reduced.lift(inner.record.choice))
        return PartAnswer(choice, evaluate(self.problem, choice).cost, bound)

    def _solved(self, priced: Problem, message: list[np.ndarray] | None) -> Incumbent:
        outer = self.outer.record
        record = Record(priced, self.outer.until, PART_GAP * outer.gap, outer.clock, most_work=outer.most_work - outer.work)
        inner = Incumbent(priced, record)
        if message is None:
            self.settle(inner, None)
        else:
            self._continued(inner, message)
        outer.work += record.work
        return inner

    def _continued(self, inner: Incumbent, message: list[np.ndarray]) -> None:
        """Settle a part from the message of dual ascent at other multipliers."""
        for choice in self.known:
            inner.offer(choice)
        messages = Messages(inner.problem)
        if start := message or self.last:
            messages.message[:] = start.pop()
        ascend(messages, inner, SWEEPS, SLOW)
        message.append(messages.message)
        self.last = [messages.message]
        if not inner.proven:
            self.settle(inner, messages)
        if inner.record.choice is not None:
            self.known[inner.record.choice] = None


class Decomposition:
    """The best multipliers so far, in one flat array by slots, and the planes of all answers of parts."""

    def __init__(self, parts: Parts, incumbent: Incumbent, settle: Settle) -> None:
        self.parts, self.incumbent = parts, incumbent
        self.count = np.bincount(parts.class_of)
        self.slots = [parts.boundary_slots(p) for p in parts.examples]
        self.first = np.cumsum([0, *parts.slot_sizes])
        scale = max((abs(x) for x in (incumbent.cost, incumbent.bound) if math.isfinite(x)), default=1.0) / len(parts.edges)
        solvers: dict[int, PartSolver] = {}
        for p in parts.examples:
            if (kind := int(parts.kind_of[p])) not in solvers:
                solvers[kind] = PartSolver(parts.part(p), tuple(parts.boundary(p).tolist()), scale, incumbent, settle)
        self.solvers = [solvers[int(parts.kind_of[p])] for p in parts.examples]
        self.messages: list[list[np.ndarray]] = [[] for _ in self.solvers]
        self.planes: list[tuple[int, float, np.ndarray]] = []  # class, energy, places in the multipliers
        self.multipliers = np.zeros(self.first[-1])
        self.best = -math.inf

    # -- multipliers

    def start(self, message: np.ndarray) -> None:
        """Multipliers from the messages of dual ascent on the problem: a share of what is left to a node, less what was sent to it."""
        parts, problem = self.parts, self.parts.problem
        sizes = np.array([e.table.shape for e in problem.edges], dtype=np.int64).reshape(-1)
        place = (np.cumsum(sizes) - sizes).tolist()
        sums, counts = np.zeros(self.first[-1]), np.zeros(self.first[-1])
        for v, sharing in parts.sharing.items():
            costs = problem.node_costs[v]
            sent = {p: np.zeros(len(costs)) for p, _ in sharing}
            edges = dict.fromkeys(sent, 0)
            for k in parts.edges_of[v]:
                begin = place[2 * k + (problem.edges[k].b == v)]
                values = message[begin : begin + len(costs)]
                sent[int(parts.part_of[k])] += np.where(np.isfinite(values), values, 0.0)
                edges[int(parts.part_of[k])] += 1
            left = np.where(np.isfinite(costs), costs, 0.0) + sum(sent.values())
            for p, slot in sharing:
                where = slice(self.first[slot], self.first[slot + 1])
                sums[where] += left * (edges[p] / len(parts.edges_of[v])) - sent[p]
                counts[where] += 1
        self.multipliers = self._agreed(sums / np.maximum(counts, 1))

    def _agreed(self, multipliers: np.ndarray) -> np.ndarray:
        """The multipliers nearest to the given ones that add up to the costs of the nodes."""
        out = multipliers.copy()
        for size in sorted({len(joint.costs) for joint in self.parts.joints}):
            joints = [joint for joint in self.parts.joints if len(joint.costs) == size]
            slots = sorted({s for joint in joints for s in joint.slots})
            number = {s: k for k, s in enumerate(slots)}
            matrix = np.zeros((len(joints), len(slots)))
            for row, joint in enumerate(joints):
                np.add.at(matrix[row], [number[s] for s in joint.slots], 1.0)
            places = self.first[slots][:, None] + np.arange(size)
            costs = np.array([np.where(np.isfinite(joint.costs), joint.costs, 0.0) for joint in joints])
            out[places] += np.linalg.pinv(matrix) @ (costs - matrix @ out[places])
        return out

    def _remainder(self, multipliers: np.ndarray) -> float:
        """The least that the nodes cost beyond the sums of their multipliers: 0 but for rounding."""
        rest = []
        for joint in self.parts.joints:
            places = self.first[list(joint.slots)][:, None] + np.arange(len(joint.costs))
            left = joint.costs - multipliers[places].sum(axis=0)
            rest.append(joint.count * float(left.min()))
        return math.fsum(rest)

    def _of_class(self, c: int, multipliers: np.ndarray) -> list[np.ndarray]:
        return [multipliers[self.first[s] : self.first[s + 1]] for s in self.slots[c].tolist()]

    # -- the bound

    def evaluate(self, multipliers: np.ndarray) -> float:
        """D(L). The incumbent's bound is raised to it, and the answers of the parts become planes."""
        terms = []
        for c, solver in enumerate(self.solvers):
            answer = solver.minimum(self._of_class(c, multipliers), self.messages[c])
            terms.append(int(self.count[c]) * answer.bound)
            if answer.choice is not None:
                chosen = np.array([answer.choice[k] for k in solver.boundary], dtype=np.int64)
                self.planes.append((c, answer.energy, self.first[self.slots[c]] + chosen))
        total = math.fsum([*terms, self._remainder(multipliers)])
        if math.isfinite(total):
            total -= ROUNDING * math.fsum(map(abs, terms))
        self.incumbent.raise_bound(total)
        return total

    def climb(self, rounds: int) -> None:
        """Raise the bound, until the planes promise little more or the incumbent is done."""
        width = FIRST_WIDTH * self._gap() / len(self.parts.edges)
        for _ in range(rounds):
            if self.incumbent.done or not math.isfinite(self.best) or not self.planes:
                return
            wanted, promise = self._best_by_planes(width)
            if promise - self.best <= PROMISING * self._gap():
                return
            bound = self.evaluate(wanted)
            right = (bound - self.best) / (promise - self.best)
            width *= WIDER if right > 1 - RIGHT else 1.0 if right > RIGHT else NARROWER
            if bound > self.best:
                self.best, self.multipliers = bound, wanted

    def _gap(self) -> float:
        gap = self.incumbent.cost - self.best
        return max(gap, 1e-9 * abs(self.best)) if math.isfinite(gap) else 0.01 * abs(self.best)

    def _best_by_planes(self, width: float) -> tuple[np.ndarray, float]:
        """The multipliers within the box for which the planes are highest, and their value. Lengths are counted in widths."""
        n, classes = int(self.first[-1]), np.array([c for c, _, _ in self.planes])
        rhs = np.array([(energy + self.multipliers[places].sum()) / width for _, energy, places in self.planes])
        levels = np.full(len(self.solvers), math.inf)
        np.minimum.at(levels, classes, rhs)
        columns = [np.append(places, n + c) for c, _, places in self.planes]
        values = [np.append(np.full(len(places), -1.0), 1.0) for _, _, places in self.planes]
        planes = _sparse(columns, values, n + len(levels))
        slots = [[self.first[list(joint.slots)] + i for i in range(len(joint.costs))] for joint in self.parts.joints]
        columns = [entries for joint in slots for entries in joint]
        equal = _sparse(columns, [np.ones(len(entries)) for entries in columns], n + len(levels))
        objective = np.concatenate([np.zeros(n), -self.count.astype(float)])
        most = np.concatenate([np.ones(n), np.full(len(levels), np.inf)])
        high, even = rhs - levels[classes], np.zeros(len(columns))
        low = np.append(np.full(len(high), -np.inf), even)
        solved = linprog(objective, planes.below(equal), low, np.append(high, even), -most, most)
        if solved is None or not np.isfinite(levels).all():
            return self.multipliers, self.best
        return self.multipliers + width * solved.x[:n], float((self.count @ levels - solved.value) * width)

    # -- answers

    def decode(self) -> np.ndarray | None:
        """An answer: the parts in their order, each given what is decided on its boundary; None where that doesn't work out."""
        parts = self.parts
        choice = np.full(len(parts.problem.node_costs), -1)
        known: dict[tuple, PartAnswer] = {}
        for p, c in enumerate(parts.class_of.tolist()):
            decided = choice[parts.of(p)[parts.boundary(p)]]
            key = (c, decided.tobytes())
            if key not in known:
                multipliers = self._of_class(c, self.multipliers)
                known[key] = self.solvers[c].minimum([_only(m, i) for m, i in zip(multipliers, decided.tolist(), strict=True)])
            if (chosen := known[key].choice) is None or self.incumbent.time_left() <= 0:
                return None
            choice[parts.of(p)] = chosen
        return choice

    def improve(self, choice: np.ndarray) -> np.ndarray:
        """The parts one after the other, each the best one beside all others, until nothing changes."""
        parts, choice = self.parts, choice.copy()
        known: dict[tuple, PartAnswer] = {}
        for sweep in range(IMPROVEMENTS):
            changed = False
            for p in range(len(parts.edges))[:: 1 if sweep % 2 == 0 else -1]:
                if self.incumbent.time_left() <= 0:
                    return choice
                solver, nodes, boundary = self.solvers[parts.class_of[p]], parts.of(p), parts.boundary(p)
                beside = [self._beside(p, int(v), choice) for v in nodes[boundary]]
                key = (solver, *(costs.tobytes() for costs in beside))
                if key not in known:
                    known[key] = solver.minimum(beside)
                new, old = known[key].choice, choice[nodes]
                if new is None or (old == new).all():
                    continue
                trial, moved = choice.copy(), nodes[boundary[(old != new)[boundary]]].tolist()
                trial[nodes] = new
                before = evaluate(solver.problem, old).cost + self._around(p, moved, choice)
                if known[key].energy + self._around(p, moved, trial) < before - 1e-9 * solver.scale:
                    choice, changed = trial, True
            if not changed:
                break
        return choice

    def _around(self, p: int, nodes: Sequence[int], choice: np.ndarray) -> float:
        """What nodes of part p cost, and their edges outside it, of which one may join two of them."""
        parts, problem = self.parts, self.parts.problem
        edges = [problem.edges[k] for k in {k for v in nodes for k in parts.edges_of[v] if parts.part_of[k] != p}]
        return math.fsum([*(problem.node_costs[v][choice[v]] for v in nodes), *(e.table[choice[e.a], choice[e.b]] for e in edges)])

    def _beside(self, p: int, v: int, choice: np.ndarray) -> np.ndarray:
        """What the choices of a node cost beside the choices of all nodes outside part p."""
        parts, problem = self.parts, self.parts.problem
        costs = problem.node_costs[v]
        if len(parts.sharing[v]) > SHARED:
            return _only(np.zeros(len(costs)), int(choice[v]))
        for k in parts.edges_of[v]:
            if parts.part_of[k] != p:
                e = problem.edges[k]
                costs = costs + (e.table[:, choice[e.b]] if e.a == v else e.table[choice[e.a]])
        return costs


def _only(costs: np.ndarray, i: int) -> np.ndarray:
    """The costs with only choice i allowed; all of them where i < 0."""
    return costs if i < 0 else np.where(np.arange(len(costs)) == i, costs, np.inf)


def _sparse(columns: list[np.ndarray], values: list[np.ndarray], width: int) -> SparseRows:
    """The matrix whose row k has these values in these columns; values of equal columns add up."""
    rows = np.repeat(np.arange(len(columns)), [len(entries) for entries in columns])
    index = np.concatenate([np.zeros(0, np.int64), *columns])
    return SparseRows.of(rows, index, np.concatenate([np.zeros(0), *values]), (len(columns), width))

"""Recomputation and offloading per tensor, chosen together with the layouts (formulate.saved_values).

    question(context, e)     the problem of all alternatives, in which a share e of the transfers to and from the host costs
    selected(...)            the graph of an answer to it, with the answer's layouts, judged as any other
    best_selected(context)   the best of these, with a bound on all of them:
                             1. nothing is offloaded; if that is as fast as the best plan without a memory limit, it is the answer
                             2. else e = 0, which is right where the forward's kernels hide all transfers
                             3. else e where the lines cost + 2 e (H - W) of the known answers cross: max over e of their minimum
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.cost import host_bandwidth
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, SavedValues, chosen_of, hidden_seconds, transfer_seconds_of, with_pins, with_saved_values
from autoshard.graph import OFFLOADED, RELOADED, SUFFIX, Alternatives, Chosen, Graph, alternatives, selective
from autoshard.planning.context import Context, Instance, formulate_for, stepped
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.shallow import Shallow, completed, correspondence
from autoshard.planning.solving import solve_instance
from autoshard.problem import Evaluation, evaluate, without_limit
from autoshard.solvers import Answer, Status
from autoshard.strategies import candidates

MOST_SHARES = 4  # e: each takes as long as a plan
LEAST_GAIN = 1e-9  # relative: a bound above a cost by less is rounding


@dataclass(frozen=True, eq=False)
class Question:
    """The problem of all alternatives of a context."""

    instance: Instance
    formulated: SavedValues
    exposed: float | None  # the share of transfers that costs


@dataclass(frozen=True, eq=False)
class Selected:
    """An answer as a graph with layouts: what it recomputes and offloads, and its choice in that graph's formulation."""

    chosen: Chosen
    formulated: Formulation
    choice: tuple[int, ...]
    judged: Evaluation
    asked: tuple[int, ...]  # the choice in the problem of all alternatives


def best_selected(context: Context) -> tuple[Selected, Answer] | None:
    """The fastest way to get the saved values that was found, and its certificate; None where nothing fits in memory."""
    gap, search = context.options.gap, _Search(context)
    search.ask(None)
    if host_bandwidth(context.mesh.device) is None or search.met_without_limit(gap):
        return search.best()
    share: float | None = 0.0
    for _ in range(MOST_SHARES):
        if share is None or not search.ask(share) or search.is_met(gap):
            break
        share = search.crossing()
    return search.best()


class _Search:
    """The answers known so far, and the best bound on all plans."""

    def __init__(self, context: Context):
        self.context = context
        self.known: list[Selected] = []
        self.lines: set[tuple[float, float]] = set()
        self.bounds: dict[float | None, float] = {}
        self.answer: Answer | None = None
        self.prices: Mapping[int, float] | None = None  # of a byte, in the last answer
        self.starts: list[tuple[SavedValues, Sequence[int]]] = []  # answers, within the limit or not
        self.asker = _Asker(context)

    def ask(self, exposed: float | None) -> bool:
        """Solve one question; whether it has an answer."""
        asked = self.asker.question(exposed)
        starts = [asked.formulated.carried(before, choice) for before, choice in self.starts]
        answer = solve_instance(self.context, asked.instance, starts, self.prices).in_passing()
        hidden = 2 * (exposed or 0.0) * hidden_seconds(asked.formulated)
        self.bounds[exposed] = answer.bound - hidden
        if answer.choice is None:
            return False
        self.answer, self.prices = answer, answer.prices
        self.starts.append((asked.formulated, answer.choice))
        lines = _lines(asked, answer)
        self.lines |= set(lines.values())
        fastest = min(lines, key=lambda choice: (lines[choice][0] + max(0.0, lines[choice][1]), choice != answer.choice, choice))
        self.known.append(selected(self.context, asked, fastest))
        self.first = asked
        return True

    @property
    def bound(self) -> float:
        """On all plans; those that offload nothing have a bound of their own."""
        offloading = [bound for e, bound in self.bounds.items() if e is not None]
        return max(offloading, default=self.bounds.get(None, -math.inf))

    def fastest(self) -> Selected | None:
        fitting = [s for s in self.known if s.judged.fits]
        return min(fitting, key=lambda s: (s.judged.cost, len(s.chosen.recomputed), len(s.chosen.offloaded)), default=None)

    def met_without_limit(self, gap: float) -> bool:
        """Whether the answer is as fast as any plan without a memory limit, where nothing is gained by offloading."""
        best = self.fastest()
        if best is None:
            return False
        if self.context.options.memory_limit is None:
            return True
        free = replace(self.first.instance, problem=without_limit(self.first.instance.problem))
        answer = solve_instance(self.context, free, [], preferred=False).in_passing()
        self.bounds[-math.inf] = answer.bound
        if answer.choice is not None:
            self.starts.append((self.first.formulated, answer.choice))
        return self.is_met(gap)

    def is_met(self, gap: float) -> bool:
        best = self.fastest()
        return best is not None and best.judged.cost <= self.bound * (1 + gap)

    def crossing(self) -> float | None:
        """The share at which the least of the known lines is largest; None where it was asked already."""
        lines = self.lines
        shares = {0.0, 1.0} | {(c - a) / (b - d) for a, b in lines for c, d in lines if b > d and 0 < (c - a) / (b - d) < 1}
        best = max(sorted(shares), key=lambda e: min(a + e * b for a, b in lines))
        return None if any(e is not None and abs(best - e) < 1e-6 for e in self.bounds) else best

    def best(self) -> tuple[Selected, Answer] | None:
        best = self.fastest()
        if best is None or self.answer is None:
            return None
        cost, bound = best.judged.cost, min(self.bound, best.judged.cost)
        gap = self.context.options.gap
        status = Status.OPTIMAL if cost - bound <= gap * abs(cost) + LEAST_GAIN * abs(cost) else Status.FEASIBLE
        return best, replace(self.answer, status=status, choice=best.choice, cost=cost, bound=bound, peak=best.judged.peak)


def _lines(question: Question, answer: Answer) -> dict[tuple[int, ...], tuple[float, float]]:
    """Of each answer that was found: cost without exposed transfers, and 2 (H - W), both in seconds."""
    assert answer.choice is not None
    saved, hidden = question.formulated, hidden_seconds(question.formulated)
    lines = {}
    for choice, cost in {**answer.fitting, answer.choice: answer.cost}.items():
        offloads = transfer_seconds_of(saved, choice)
        lines[choice] = (cost - 2 * (question.exposed or 0.0) * offloads, 2 * (offloads - hidden))
    return lines


def question(context: Context, exposed: float | None) -> Question:
    """exposed: the share of transfers that costs; None: nothing is offloaded. ValueError where a pin names no tensor."""
    return _Asker(context).question(exposed)


class _Asker:
    """Questions of one context: what they have in common is built once."""

    def __init__(self, context: Context):
        self.context, self.graph = context, context.graph
        formulated, self.alternatives = _formulated(context, context.graph)
        self.pinned = replace(formulated, problem=with_pins(formulated, allowed_by_pins(formulated, context.options)))
        self.small: tuple[Formulation, Alternatives] | None = None
        if context.shallow is not None and context.options.solver == "auto":
            self.small = _formulated(context, context.shallow)
            try:
                self.correspondence = correspondence(formulated, self.small[0])
            except ValueError:  # some op has no corresponding one: the deep problem is solved without the shallow one
                self.small = None

    def question(self, exposed: float | None) -> Question:
        saved, shallow = with_saved_values(self.pinned, self.alternatives, self.graph, exposed=exposed), None
        if self.small is not None and self.context.shallow is not None:
            shallow = Shallow(with_saved_values(*self.small, self.context.shallow, exposed=exposed), self.correspondence)
        return Question(Instance(saved, saved.problem, shallow), saved, exposed)


def _formulated(context: Context, graph: Graph) -> tuple[Formulation, Alternatives]:
    known = alternatives(graph)
    all_of_them = stepped(known.graph, context.options)
    with no_search_for_cycles():
        return formulate_for(all_of_them, candidates(all_of_them, context.mesh), context.mesh, context.options), known


def selected(context: Context, question: Question, choice: Sequence[int]) -> Selected:
    """The graph of an answer, with the answer's layouts; without copies of views whose storage is kept, where those change nothing."""
    saved = question.formulated
    offloads, hidden = transfer_seconds_of(saved, choice), hidden_seconds(saved)
    exposed = max(0.0, 1 - hidden / offloads) if offloads else 0.0
    chosen = chosen_of(saved, choice, exposed)
    spare = {name for name in chosen.recomputed if _is_view_of_kept(context.graph, chosen, name)}
    if spare:
        less = _as_graph(context, saved, choice, replace(chosen, recomputed=chosen.recomputed - spare))
        own = evaluate(saved.problem, choice).cost - 2 * (question.exposed or 0.0) * offloads  # seconds of the answer without transfers
        if less.judged.fits and less.judged.cost <= (own + 2 * max(0.0, offloads - hidden)) * (1 + LEAST_GAIN):
            return less
    return _as_graph(context, saved, choice, chosen)


def _is_view_of_kept(graph: Graph, chosen: Chosen, name: str) -> bool:
    i = graph.index[name]
    if graph.ops[i].alias is None:
        return False
    owner, k = graph.storage((i, 0))
    owned = graph.ops[owner].name
    return owned not in chosen.recomputed and f"{owned}.{k}" not in chosen.offloaded


def _as_graph(context: Context, saved: SavedValues, choice: Sequence[int], chosen: Chosen) -> Selected:
    graph = stepped(selective(context.graph, chosen), context.options)
    with no_search_for_cycles():
        formulated = formulate_for(graph, candidates(graph, context.mesh), context.mesh, context.options)
    full = _carried_over(saved, choice, formulated)
    judged = evaluate(formulated.problem, full)
    return Selected(chosen, formulated, full, judged, tuple(choice))


def _carried_over(saved: SavedValues, choice: Sequence[int], formulated: Formulation) -> tuple[int, ...]:
    """The answer's layouts in the formulation of its own graph."""
    graph, index = formulated.graph, saved.graph.index
    select = {value: index[name] for name, value in saved.alternatives.selected.items()}
    known: dict[int, int] = {}

    def layout_of(node: int, layouts: Sequence) -> object:
        at = saved.layout_index(node, choice)
        return None if at is None else layouts[at]

    for i, op in enumerate(graph.ops):
        if op.kind in (OFFLOADED, RELOADED):
            value = saved.graph.ops[select[op.name.removesuffix(f".{op.kind}")]].inputs[0]
            held = saved.hub(value, choice) if value in saved.hubs else saved.candidate(value[0], choice).outputs[value[1]]
            known[i] = next(k for k, c in enumerate(formulated.candidates.of[i]) if c.outputs[0] == held)
        else:
            at = saved.layout_index(index[op.name], choice)
            assert at is not None, f"{op.name} runs in the graph of an answer in which it is absent"
            known[i] = at
    for (i, k), node in formulated.hubs.items():
        op = graph.ops[i]
        name = op.name.removesuffix(f".{RELOADED}") if op.kind == RELOADED else f"{op.name.removesuffix(SUFFIX)}.{k}"
        old = None if op.kind == RELOADED else saved.hubs.get((index[op.name], k))
        layout = layout_of(old, saved.hub_layouts[index[op.name], k]) if old is not None else None
        if layout is None and name in select and (op.backward or old is None):
            layout = layout_of(select[name], [c.outputs[0] for c in saved.candidates.of[select[name]]])
        if layout in formulated.hub_layouts[i, k]:
            known[node] = formulated.hub_layouts[i, k].index(layout)  # type: ignore[arg-type]
    for k, node in formulated.results.items():
        if node >= len(graph.ops):
            layout = saved.result(k, choice)
            known[node] = formulated.result_layouts[k].index(layout)
    return completed(formulated, known)

"""Recomputation and offloading per tensor, chosen together with the layouts (formulate.saved_values).

_AllWays         the problem of all ways to get the saved values, in which a share e of the transfers to and from the host costs
_selected        the graph of an answer to it, with the answer's layouts, judged as any other; what is offloaded comes back in turn
_in_few_layers   the same of few layers, from which the search for the shortest time line begins at every price
_Search.best     the best of these, with a bound on all of them:
                 1. nothing is offloaded, roughly at first; if that is as fast as the best plan without a memory limit, it is the answer
                 2. else e = 0, roughly, and well where the forward's kernels hide all transfers
                 3. else e where the lines cost + 2 e (H - W) of the known answers cross: max over e of their minimum; in a hurry,
                    which is where the first takes so much of the time left, roughly before well
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from autoshard.cost import host_bandwidth, host_seconds
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, SavedValues, chosen_of, hidden_seconds, transfer_seconds_of, with_pins, with_saved_values
from autoshard.graph import (
    OFFLOADED,
    RELOADED,
    SUFFIX,
    Chosen,
    Graph,
    Offload,
    alternatives,
    constants,
    forward_blocks,
    repeated_blocks,
    selective,
)
from autoshard.layout import local_numel
from autoshard.planning.baselining import solve_baselines
from autoshard.planning.batches import align_batches
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.few_layers import FewLayers, completed, corresponding_ops
from autoshard.planning.instance import Instance, extended_from, formulate_for, instance_of
from autoshard.planning.options import Infeasible, NoAnswer
from autoshard.planning.question import ModelGraphs, Question, stepped
from autoshard.planning.refusal import smallest_limit
from autoshard.planning.solving import solve_instance
from autoshard.planning.variants import Answered
from autoshard.problem import Evaluation, evaluate, usage_profile, without_limit
from autoshard.solution import noted_choice
from autoshard.solvers import Answer, Status
from autoshard.strategies import candidates

MOST_SHARES = 4  # e: each takes as long as a plan
NEAR = 0.01  # of such a share
LINE_GAP = 0.03, 0.06  # relative: at e = 0, which is hard where much is offloaded; the crossing of its line is what counts; in a hurry
ROUGH = 0.03  # relative: in a hurry, until the shares of crossings change little; a quarter of the seconds
LEAD = 1.1  # a value is copied back so many times its transfer's seconds before the next one is
LEAST_GAIN = 1e-9  # relative: a bound above a cost by less is rounding


def answered_per_tensor(question: Question) -> Answered:
    """The fastest way to get the saved values that was found, with its proof; `Infeasible` where none is known to fit in memory."""
    clock, options = question.clock, question.options
    ways = _AllWays(question)
    with clock.phase("solve", "choosing what to keep, recompute and offload", 0.4):
        search = _Search(question, ways)
        selected = search.best()
    if selected is None:
        kind = Infeasible if search.is_proven and not search.known else NoAnswer
        raise kind("no way to keep, recompute and offload single tensors was found that fits in memory", search.smallest_limit)
    best, answer = selected
    rows: dict[str, dict] = {}
    if options.baselines:
        plain = question.stepped()
        with clock.phase("solve", "solving the baselines", 0.8):
            rows, _ = solve_baselines(plain, instance_of(plain))
    problem = with_pins(best.formulated, allowed_by_pins(best.formulated, options))
    answer = align_batches(best.formulated, problem, answer, options.gap)
    noted = {**question.assumptions, **noted_choice(best.chosen, question.graph)}
    asked = replace(question, model=ModelGraphs(best.formulated.graph), assumptions=noted)
    return Answered(asked, Instance(best.formulated, problem, _few_layers(question, best)), answer, rows)


@dataclass(frozen=True, eq=False)
class _Selected:
    """An answer as a graph with layouts: what it recomputes and offloads, and its choice in that graph's formulation."""

    chosen: Chosen
    formulated: Formulation
    choice: tuple[int, ...]
    judged: Evaluation


class _AllWays:
    """The problems of all ways to get the saved values, which differ in the share of transfers that costs. What is equal is built once."""

    def __init__(self, question: Question):
        self.model = question.model
        self.alternatives = {id(graph): alternatives(graph) for graph in (self.model.graph, self.model.few_layers) if graph is not None}
        self.instance = instance_of(question.map(lambda graph: self.alternatives[id(graph)].graph).stepped())

    def exposing(self, exposed: float | None) -> tuple[SavedValues, Instance]:
        """The problem in which this share of transfers costs; None: nothing is offloaded."""

        def extended(formulated: Formulation, graph: Graph | None) -> SavedValues:
            assert graph is not None
            return with_saved_values(formulated, self.alternatives[id(graph)], graph, exposed=exposed)

        one, few_layers = self.instance, self.instance.few_layers
        saved = extended(replace(one.formulated, problem=one.problem), self.model.graph)
        if few_layers is not None:
            few_layers = FewLayers(extended(few_layers.formulated, self.model.few_layers), few_layers.correspondence)
        return saved, Instance(saved, saved.problem, few_layers)


class _Search:
    """The answers known so far, and the best bound on all plans."""

    def __init__(self, question: Question, ways: _AllWays):
        self.question, self.ways = question, ways
        self.known: list[tuple[float, SavedValues, tuple[int, ...]]] = []  # the fastest answers of the problems: seconds as a plan, about
        self.selected: dict[int, _Selected] = {}  # the plans of some of these
        self.lines: set[tuple[float, float]] = set()
        self.bounds: dict[float | None, float] = {}
        self.asked: list[float] = []  # shares, as roughly as now
        self.answer: Answer | None = None
        self.smallest_limit: tuple[float, float] | None = None  # in which nothing need be offloaded; less may do, if not what was asked for
        self.prices: Mapping[int, float] | None = None  # of a byte, in the last answer
        self.starts: list[tuple[SavedValues, Sequence[int]]] = []  # answers, within the limit or not
        self.is_proven = True  # that problems without an answer have none

    def best(self) -> tuple[_Selected, Answer] | None:
        """The fastest way that was found, and its certificate; None where nothing fits in memory."""
        clock = self.question.clock
        began = clock.now()
        may_offload = self.question.options.memory_limit is not None and host_bandwidth(self.question.mesh.device) is not None
        self.ask(None, ROUGH if may_offload else 0.0)
        hurried = (MOST_SHARES + 1) * (clock.now() - began) > self.question.seconds_left()
        if may_offload and not self.question.is_over and not self.met_without_limit():
            goes_on = self.ask(0.0, LINE_GAP[hurried])
            for gap in (ROUGH, 0.0) if hurried else (0.0,):
                self.asked = []
                for _ in range(MOST_SHARES):
                    if not goes_on or self.question.is_over or self.is_met() or (share := self.crossing()) is None:
                        break
                    goes_on = self.ask(share, gap)
        best = self.fastest()
        if best is None or self.answer is None:
            return None
        cost, bound = best.judged.cost, min(self.bound, best.judged.cost)
        status = Status.OPTIMAL if cost - bound <= (self.question.options.gap + LEAST_GAIN) * abs(cost) else Status.FEASIBLE
        return best, replace(self.answer, status=status, choice=best.choice, cost=cost, bound=bound, peak=best.judged.peak)

    def ask(self, exposed: float | None, gap: float = 0.0) -> bool:
        """Solve one problem, to within this gap at least; whether it has an answer."""
        saved, instance = self.ways.exposing(exposed)
        starts = [saved.carried(before, choice) for before, choice in self.starts]
        question = self.question.with_options(gap=max(self.question.options.gap, gap))
        answer = solve_instance(question, instance, starts, self.prices).in_passing()
        self.bounds[exposed] = max(self.bounds.get(exposed, -math.inf), answer.bound - 2 * saved.exposed * hidden_seconds(saved))
        if exposed is not None:
            self.asked.append(exposed)
        if answer.choice is None:
            self.is_proven &= answer.status is Status.INFEASIBLE
            if exposed is None and (known := smallest_limit(answer)) is not None:
                self.smallest_limit = self.question.options.memory_limit or 0.0, known[1]
            return False
        self.answer, self.prices = answer, answer.prices
        self.starts.append((saved, answer.choice))
        lines = _lines(saved, answer)
        self.lines |= set(lines.values())
        fastest = min(lines, key=lambda choice: (lines[choice][0] + max(0.0, lines[choice][1]), choice != answer.choice, choice))
        self.known.append((lines[fastest][0] + max(0.0, lines[fastest][1]), saved, fastest))
        self.first = saved, instance
        return True

    @property
    def bound(self) -> float:
        """On all plans; those that offload nothing have a bound of their own."""
        offloading = [bound for e, bound in self.bounds.items() if e is not None]
        return max(offloading, default=self.bounds.get(None, -math.inf))

    def fastest(self) -> _Selected | None:
        """The plan of the fastest answer; of the next one where that does not fit."""
        for k, (_, saved, choice) in sorted(enumerate(self.known), key=lambda item: item[1][0]):
            if k not in self.selected:
                self.selected[k] = _selected(self.question, saved, choice)
            if self.selected[k].judged.fits:
                return self.selected[k]
        return None

    def met_without_limit(self) -> bool:
        """Whether the answer is as fast as any plan without a memory limit, where nothing is gained by offloading."""
        if not self.known:
            return False
        saved, instance = self.first
        free = replace(instance, problem=without_limit(instance.problem))
        answer = solve_instance(self.question, free, [], preferred=False).in_passing()
        self.bounds[-math.inf] = answer.bound
        if answer.choice is not None:
            self.starts.append((saved, answer.choice))
            if evaluate(saved.problem, answer.choice).fits:
                self.known.append((answer.cost, saved, answer.choice))
        if not self.is_met() and min(seconds for seconds, _, _ in self.known) <= self.bound * (1 + ROUGH):
            self.ask(None)
        return self.is_met()

    def is_met(self) -> bool:
        """Whether the fastest answer is within the gap that was asked for."""
        enough = self.bound * (1 + self.question.options.gap)
        if min((seconds for seconds, _, _ in self.known), default=math.inf) > enough * (1 + LEAST_GAIN):
            return False
        best = self.fastest()
        return best is not None and best.judged.cost <= enough

    def crossing(self) -> float | None:
        """The share at which the least of the known lines is largest; None where one near it was asked already."""
        lines = self.lines
        shares = {0.0, 1.0} | {(c - a) / (b - d) for a, b in lines for c, d in lines if b > d and 0 < (c - a) / (b - d) < 1}
        best = max(sorted(shares), key=lambda e: min(a + e * b for a, b in lines))
        return None if any(abs(best - e) < NEAR for e in self.asked) else best


def _lines(saved: SavedValues, answer: Answer) -> dict[tuple[int, ...], tuple[float, float]]:
    """Of each answer that was found: cost without exposed transfers, and 2 (H - W), both in seconds."""
    assert answer.choice is not None
    hidden, lines = hidden_seconds(saved), {}
    for choice, cost in {**answer.fitting, answer.choice: answer.cost}.items():
        offloads = transfer_seconds_of(saved, choice)
        lines[choice] = (cost - 2 * saved.exposed * offloads, 2 * (offloads - hidden))
    return lines


def _selected(question: Question, saved: SavedValues, choice: Sequence[int]) -> _Selected:
    """The graph of an answer, with the answer's layouts; with all values kept, or without copies of views whose storage is kept and with
    values copied back in turn, where that fits and costs no more."""
    offloads, hidden = transfer_seconds_of(saved, choice), hidden_seconds(saved)
    chosen = chosen_of(saved, choice, max(0.0, 1 - hidden / offloads) if offloads else 0.0)
    plain = _as_graph(question, saved, choice, chosen) if chosen.offloaded else None
    own = evaluate(saved.problem, choice).cost - 2 * saved.exposed * offloads  # seconds of the answer without transfers
    in_turn = chosen if plain is None else replace(chosen, offloaded=_in_turn(question, plain))
    spare = {name for name in chosen.recomputed if _is_view_of_kept(question.graph, chosen, name)}
    for better in (Chosen(), replace(in_turn, recomputed=chosen.recomputed - spare), in_turn):
        if better != chosen:
            one = _as_graph(question, saved, choice, better)
            if one.judged.fits and one.judged.cost <= (own + 2 * max(0.0, offloads - hidden)) * (1 + LEAST_GAIN):
                return one
    return plain or _as_graph(question, saved, choice, chosen)


def _in_turn(question: Question, one: _Selected) -> dict[str, Offload]:
    """Where offloaded values are copied back, one after the other on the link: each in time for the next one, where its bytes fit from
    then on."""
    graph, problem, mesh = one.formulated.graph, one.formulated.problem, question.mesh
    runs = [op.backward and op.kind not in (OFFLOADED, RELOADED) for op in graph.ops]
    seconds = [float(cost[i]) if run else 0.0 for run, cost, i in zip(runs, problem.node_costs, one.choice)]
    begins = np.concatenate([[0.0], np.cumsum(seconds)])  # of each op
    times, total = usage_profile(problem, one.choice)
    held = np.append(total, 0.0)[np.searchsorted(times, np.arange(len(graph.ops)), side="right") - 1]
    spare = (math.inf if problem.usage_limit is None else problem.usage_limit) - held
    moved = constants(question.graph)
    names = {op.name for i, op in enumerate(question.graph.ops) if i not in moved}
    usable = [i for i, op in enumerate(graph.ops) if runs[i] and not op.is_placeholder and op.name in names]
    reader = {i: min(j for j, _ in graph.users[i, 0]) for i, op in enumerate(graph.ops) if op.kind == RELOADED and (i, 0) in graph.users}
    offloaded, free = dict(one.chosen.offloaded), math.inf
    for i, at in sorted(reader.items(), key=lambda item: (-item[1], -item[0])):
        output, layout = graph.ops[i].output, one.formulated.candidate(i, one.choice).outputs[0]
        assert layout is not None
        size = local_numel(output.shape, layout, mesh) * output.itemsize
        free = min(free, begins[at]) - LEAD * one.formulated.microbatches * host_seconds(size, mesh.device)
        first = usable[max(bisect_right(usable, free, key=begins.__getitem__) - 1, 0)]
        full = np.flatnonzero(spare[first:i] < size)
        place = next(iter(usable[bisect_right(usable, first + full[-1]) :][:1]), i) if len(full) else first
        if place < i:
            spare[place:i] -= size
            name = graph.ops[i].name.removesuffix(f".{RELOADED}")
            offloaded[name] = replace(offloaded[name], before=graph.ops[place].name)
    return offloaded


def _is_view_of_kept(graph: Graph, chosen: Chosen, name: str) -> bool:
    i = graph.index[name]
    if graph.ops[i].alias is None:
        return False
    owner, k = graph.storage((i, 0))
    owned = graph.ops[owner].name
    return owned not in chosen.recomputed and f"{owned}.{k}" not in chosen.offloaded


def _as_graph(question: Question, saved: SavedValues, choice: Sequence[int], chosen: Chosen) -> _Selected:
    graph = stepped(selective(question.graph, chosen), question.options)
    with no_search_for_cycles():
        formulated = formulate_for(graph, candidates(graph, question.mesh), question.mesh, question.options)
    full = _carried_over(saved, choice, formulated)
    return _Selected(chosen, formulated, full, evaluate(formulated.problem, full))


def _few_layers(question: Question, best: _Selected) -> FewLayers | None:
    deep, few = question.model.graph, question.model.few_layers
    if few is None or question.options.solver != "auto":
        return None
    try:
        graph = _in_few_layers(deep, few, best.chosen)
    except ValueError:  # as in `extended_from`
        return None
    return extended_from(graph and stepped(graph, question.options), best.formulated, question.options)


def _in_few_layers(deep: Graph, few: Graph, chosen: Chosen) -> Graph | None:
    """The graph of few layers in which each gets its saved values as a layer of the deep graph does: of each run of layers that do so alike
    three, and more of the longest. None where they are too few for that."""
    of, places, few_places = corresponding_ops(deep, few), repeated_blocks(deep).places, repeated_blocks(few).places
    at, few_at = ({place: i for i, place in enumerate(known) if place is not None} for known in (places, few_places))
    n, m = (len(forward_blocks(graph)) for graph in (deep, few))
    values = {f"{op.name}.{k}": i for i, op in enumerate(deep.ops) for k in range(len(op.outputs))}
    kinds: list[set] = [set() for _ in range(n)]
    for name in (*chosen.recomputed, *chosen.offloaded):
        if (place := places[values.get(name, deep.index.get(name, 0))]) is not None and place.instance < n:
            kinds[place.instance].add((place.block, place.position, name in values and name[name.rindex(".") :]))
    runs = [list(run) for _, run in groupby(range(n), key=kinds.__getitem__)]
    counts = [min(len(run), 3) for run in runs]
    if sum(counts) > m:
        return None
    while sum(counts) < m:
        counts[max(range(len(runs)), key=lambda k: len(runs[k]) - counts[k])] += 1
    layers = [layer for run, count in zip(runs, counts) for layer in (*run[: -(-count // 2)], *run[len(run) - count // 2 :])]
    layers += range(n, n + 1 + max(place.instance for place in few_at))  # the first ops of a further layer
    first = {f: i for i, f in reversed(list(enumerate(of)))}
    recomputed, offloaded = set(), {}
    for f, place in enumerate(few_places):
        i = first.get(f, -1) if place is None else at.get(place._replace(instance=layers[place.instance]), -1)
        if i >= 0 and deep.ops[i].name in chosen.recomputed:
            recomputed.add(few.ops[f].name)
        for k in range(len(deep.ops[i].outputs) if i >= 0 else 0):
            if (offload := chosen.offloaded.get(f"{deep.ops[i].name}.{k}")) is not None:
                b = deep.index[offload.before]
                if (reader := places[b]) is not None and place is not None:
                    instance = min(max(place.instance + reader.instance - layers[place.instance], 0), m - 1)
                    before = few_at.get(reader._replace(instance=instance), of[b])
                else:
                    before = of[b]
                offloaded[f"{few.ops[f].name}.{k}"] = replace(offload, before=few.ops[before].name)
    return selective(few, Chosen(frozenset(recomputed), offloaded))


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

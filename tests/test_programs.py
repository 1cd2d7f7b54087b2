"""Several programs on one set of weights: the joined problem against enumeration, its plan, its record."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from autoshard import Mesh
from autoshard.capture import capture
from autoshard.cost import optimizer_state_bytes
from autoshard.formulate import Piece, Training, formulate, join
from autoshard.layout import local_numel
from autoshard.problem import Edge, evaluate, usage_profile
from autoshard.routes import Routes, buffer_table
from autoshard.solvers import Status, solve
from autoshard.strategies import candidates
from tests.helpers import rng

FEW, RANDOM = 10, 200  # instances


class Chain(nn.Module):
    """x w_0 w_1 ..."""

    def __init__(self, depth):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(depth))

    def forward(self, x):
        for w in self.weights:
            x = x @ w
        return x


@cache
def graph(depth, batch, training=False):
    return capture(Chain(depth), (torch.empty(batch, 4, device="meta"),), training=training)


# -- enumeration -----------------------------------------------------------------------------------------------------------------------


@cache
def all_choices(sizes):
    return np.indices(sizes).reshape(len(sizes), -1).T


def judged(problem, parameters):
    """By the choices of the parameters: (cost, peak) of every choice of the program with them."""
    choices = all_choices(tuple(len(c) for c in problem.node_costs))
    cost = sum(c[choices[:, v]] for v, c in enumerate(problem.node_costs))
    cost = cost + sum(e.table[choices[:, e.a], choices[:, e.b]] for e in problem.edges)
    peak = np.zeros(len(choices))
    for time in sorted({u.start for u in problem.usages}):
        live = [u.bytes[tuple(choices[:, v] for v in u.ends)] for u in problem.usages if u.start <= time < u.end]
        peak = np.maximum(peak, sum(live))
    groups = {}
    for key in np.ndindex(*(len(problem.node_costs[i]) for i in parameters)):
        rows = (choices[:, list(parameters)] == key).all(axis=1)
        groups[key] = cost[rows], peak[rows]
    return groups


def within(costs, peaks, limit):
    return float(costs[peaks <= limit].min(initial=math.inf))


class Reference:
    """Every choice of both programs, put together by what the docstring of `formulate.joined` says, not by its code."""

    def __init__(self, a, b, problems, mesh, weights, switches, limit):
        self.weights, self.switches, self.mesh, self.routes = weights, switches, mesh, Routes(mesh)
        self.owned = [(i, b.graph.index[name], a.graph.tensor((i, 0))) for name, i in a.graph.parameters.items()]
        self.layouts = [[[c.outputs[0] for c in f.candidates.of[row[k]]] for row in self.owned] for k, f in enumerate((a, b))]
        self.groups = [judged(p, [row[k] for row in self.owned]) for k, p in enumerate(problems)]
        self.trains = a.graph.trains

    def bytes(self, tensor, layout):
        return local_numel(tensor.shape, layout, self.mesh) * 4.0

    def shared(self, x, y):
        """(seconds of copies, bytes of home beside, bytes of copies, most bytes while copies are made) for choices of the parameters."""
        seconds = beside = copied = making = most = 0.0
        for (_, _, tensor), s, t in zip(self.owned, *([some[k] for some, k in zip(self.layouts[n], z)] for n, z in enumerate((x, y)))):
            route = self.routes.route(tensor.shape, 4, s, t)
            seconds += math.inf if s != t and self.switches is None else (self.switches or 0.0) * route.seconds
            beside += self.bytes(tensor, s) if s != t else 0.0
            copied += self.bytes(tensor, t) if s != t else 0.0
            making += self.bytes(tensor, t)
            needed = float(buffer_table(self.routes, tensor.shape, 4, [s], [t])[0, 0])
            most = max(most, needed - (self.bytes(tensor, t) if s != t else 0.0))
            beside += optimizer_state_bytes(local_numel(tensor.shape, s, self.mesh), "adamw") if self.trains else 0.0
        return seconds, beside, copied, 0.0 if self.switches is None else making + beside + most

    def least(self, limit):
        """The least cost of both programs within the limit."""
        best = math.inf
        for x, (cost_a, peak_a) in self.groups[0].items():
            for y, (cost_b, peak_b) in self.groups[1].items():
                seconds, beside, copied, making = self.shared(x, y)
                if making <= limit and math.isfinite(seconds):
                    own = within(cost_a, peak_a + (copied if self.switches == 0 else 0.0), limit), within(cost_b, peak_b + beside, limit)
                    best = min(best, self.weights[0] * own[0] + self.weights[1] * own[1] + seconds)
        return best

    def limits(self):
        """Peaks of pairs of programs, ascending."""
        a, b = self.groups
        pairs = [(pa.min(), pb.min() + self.shared(x, y)[1]) for x, (_, pa) in a.items() for y, (_, pb) in b.items()]
        return sorted({max(pair) for pair in pairs} | {float(p) for _, peaks in a.values() for p in np.unique(peaks)[:3]})


def randomized(formulated, generator):
    """The program's problem with other costs, and bytes as they are."""
    costs = tuple(generator.integers(1, 9, len(c)).astype(float) for c in formulated.problem.node_costs)
    tables = [np.where(np.isinf(e.table), math.inf, generator.integers(0, 6, e.table.shape)) for e in formulated.problem.edges]
    edges = tuple(Edge(e.a, e.b, table) for e, table in zip(formulated.problem.edges, tables))
    return type(formulated.problem)(formulated.problem.names, costs, edges, formulated.problem.usages)


def instance(seed):
    """Two programs, as home and other: their formulations, random problems and weights, switches, and a limit that often binds."""
    generator = rng(seed)
    mesh = Mesh.from_bandwidths((2,), intra_node_bandwidth=float(generator.integers(4, 40)), intra_node_latency=0.1, device="cpu")
    training = bool(generator.integers(2))
    graphs = (graph(1, 2, True), graph(1, 4)) if training else (graph(2, 2), graph(2, int(generator.integers(2, 6))))
    a, b = (formulate(g, candidates(g, mesh), mesh, training=Training() if k == 0 and training else None) for k, g in enumerate(graphs))
    problems = [randomized(f, generator) for f in (a, b)]
    weights = [float(generator.integers(1, 5)), float(generator.integers(1, 5))]
    switches = (None, 0.0, 0.5, 2.0)[generator.integers(4)]
    limits = Reference(a, b, problems, mesh, weights, switches, None).limits()
    limit = None if generator.integers(4) == 0 else limits[generator.integers(max(len(limits) // 2, 1))]
    return a, b, problems, mesh, weights, switches, limit


def joined_of(a, b, problems, mesh, weights, switches, limit):
    pieces = [Piece("a", a, problems[0], weights[0]), Piece("b", b, problems[1], weights[1], switches=switches)]
    return join(pieces, mesh, limit)


@pytest.mark.parametrize("number", [FEW, pytest.param(RANDOM, marks=pytest.mark.slow)])
def test_random_pairs_of_programs_cost_what_enumeration_says(number):
    kinds, bound = set(), 0
    for seed in range(number):
        *_, switches, limit = drawn = instance(seed)
        joined = joined_of(*drawn)
        reference = Reference(*drawn)
        least, free = reference.least(math.inf if limit is None else limit), reference.least(math.inf)
        answer = solve(joined.problem)
        bound += least > free * (1 + 1e-9)
        if math.isinf(least):
            assert answer.status is Status.INFEASIBLE
            continue
        assert answer.status is Status.OPTIMAL and answer.cost == pytest.approx(least, rel=1e-9), seed
        kinds.add((switches, any(c.differ[answer.choice[c.node], answer.choice[c.other]] for c in joined.copies), limit is None))
    assert bound >= number / 10  # memory decides often
    copied = {switches for switches, differs, _ in kinds if differs}
    assert None not in copied and (copied == {0.0, 0.5, 2.0} if number == RANDOM else copied)
    assert {limited for _, _, limited in kinds} == {True, False}


def test_a_program_writes_what_it_trains_and_buffers_that_it_changes():
    mesh = Mesh.from_bandwidths((2,))
    for training in (True, False):
        one = graph(1, 4, training)
        piece = Piece("a", formulate(one, candidates(one, mesh), mesh, training=Training() if training else None), None, 1.0)
        assert piece.written() == (set(one.parameters) if training else set()) and set(piece.owned()) == set(one.parameters)


class Buffered(nn.Module):
    """A matmul with a table, to which it adds where it `writes`."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self, x):
        if self.writes:
            self.table.add_(1)
        return x @ self.table


@pytest.mark.parametrize(("writes", "keeps", "stays"), [(True, False, 0), (True, True, 1), (False, False, 1), (False, True, 1)])
def test_own_buffers_stay_in_memory_where_they_are_constant_or_kept(writes, keeps, stays):
    mesh, pieces = Mesh.from_bandwidths((2,)), []
    for name, one in (("home", graph(1, 4)), ("other", capture(Buffered(writes), (torch.ones(4, 4),), training=False))):
        formulated = formulate(one, candidates(one, mesh), mesh)
        pieces.append(Piece(name, formulated, formulated.problem, 1.0, keeps_state=keeps and name == "other"))
    joined = join(pieces, mesh, None)
    choice = joined.joined_choice({piece.name: tuple(0 for _ in piece.problem.node_costs) for piece in pieces})
    times, held = usage_profile(joined.problem, choice)
    alone = evaluate(pieces[0].problem, choice[: len(pieces[0].problem.node_costs)]).peak
    i = pieces[1].owned()["table"]
    layout = pieces[1].layouts(i)[choice[joined.nodes["other"][i]]]
    assert held[times < joined.begins["other"]].max() == alone + stays * 4 * local_numel((4, 4), layout, mesh)


def test_a_wrong_reference_is_seen():
    """The negative control: copies that cost nothing, or memory that forgets what stays beside."""
    wrong = 0
    for seed in range(8):
        *parts, switches, limit = drawn = instance(seed)
        answer = solve(joined_of(*drawn).problem)
        least = Reference(*parts, 0.0 if switches else switches, limit).least(math.inf if limit is None else limit)
        wrong += not math.isclose(answer.cost, least, rel_tol=1e-9)
    assert wrong > 0


def test_a_program_is_in_the_joined_problem_as_it_is_alone():
    a, b, problems, mesh, weights, _, _ = instance(3)
    joined = joined_of(a, b, problems, mesh, weights, 1.0, None)
    own = {"a": tuple(0 for _ in problems[0].node_costs), "b": tuple(0 for _ in problems[1].node_costs)}
    choice = joined.joined_choice(own)
    assert joined.begins["a"] == 0
    assert {name: joined.choice_of(name, choice) for name in own} == own
    moves = sum(float(joined.problem.edges[c.edge].table[choice[c.node], choice[c.other]]) for c in joined.copies)
    parts = [w * evaluate(p, own[name]).cost for w, p, name in zip(weights, problems, own)]
    assert evaluate(joined.problem, choice).cost == pytest.approx(math.fsum([*parts, moves]))
    times, held = usage_profile(joined.problem, choice)
    assert held[times < joined.begins["b"]].max() == evaluate(problems[0], own["a"]).peak

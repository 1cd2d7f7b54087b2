"""A Graph and the layouts of a Solution as a Formulation with one choice: what is simulated has the prices that were planned with.

Candidates of an op are then only the layouts that the plan gives to ops of its signature, so nothing is enumerated, and
the cost of the choice is that of the plan (`problem.evaluate` of both agrees).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autoshard.formulate import Formulation, Training, formulate
from autoshard.graph import Graph
from autoshard.layout import Layout, is_legal, parse
from autoshard.mesh import Mesh
from autoshard.solution import Placed, Solution, misfits
from autoshard.strategies import Candidate, Candidates

_parsed = lru_cache(maxsize=4096)(parse)


def planned(graph: Graph, solution: Solution, mesh: Mesh | None = None) -> tuple[Formulation, tuple[int, ...]]:
    """The Formulation of the plan's layouts and the choice that is the plan. mesh: other prices than the plan's, same shape.

    ValueError where the plan is not of this graph.
    """
    mesh = mesh or solution.mesh
    if solution.mesh.shape != mesh.shape or solution.layouts.keys() != graph.index.keys() | dict(graph.tied).keys():
        _refuse(graph, solution, mesh)
    tied = dict(graph.tied)
    placed = [solution.layouts[tied.get(op.name, op.name)] for op in graph.ops]
    found, picked = _candidates(graph, placed)
    if not all(_is_legal(graph, i, of[k], mesh) for (i, k), of in _distinct(found, picked).items()):
        _refuse(graph, solution, mesh)
    training = Training(solution.optimizer, solution.master_weights) if any(r.kind == "gradient" for r in graph.results) else None
    formulated = formulate(graph, found, mesh, training=training)
    choice = [*picked, *[0] * (len(formulated.problem.node_costs) - len(picked))]
    for (i, k), node in formulated.hubs.items():
        choice[node] = _place(formulated.hub_layouts[i, k], placed[i].hubs[k], graph.ops[i].name)
    for k, node in formulated.results.items():
        result = graph.results[k]
        if node >= len(graph.ops):
            key = f"{result.kind}:{result.name}"
            choice[node] = _place(formulated.result_layouts[k], solution.results.get(key), key)
    return formulated, tuple(choice)


def _candidates(graph: Graph, placed: Sequence[Placed]) -> tuple[Candidates, list[int]]:
    """Per signature the different candidates that its ops were given, and which of them each op has."""
    made: dict[tuple, dict[tuple, int]] = {}
    known: dict[tuple, dict[tuple, int]] = {}  # by the identity of the records, which the layers of a tiled graph share: hashed once
    given, picked = [], []
    for i, (op, one) in enumerate(zip(graph.ops, placed)):
        inputs = tuple([id(graph.ops[a].outputs[k]) for a, k in op.inputs])
        key = (op.target, id(op.literals), id(op.outputs), op.kind, op.alias, inputs)
        if key not in known:
            known[key] = made.setdefault(graph.signature(i), {})
        of = known[key]
        picked.append(of.setdefault((one.inputs, one.outputs), len(of)))
        given.append(of)
    lists = {id(of): tuple(_candidate(*key) for key in of) for of in made.values()}
    return Candidates(tuple(lists[id(of)] for of in given), (), len(made)), picked


def _distinct(found: Candidates, picked: Sequence[int]) -> dict[tuple[int, int], tuple[Candidate, ...]]:
    """One op of each pair of signature and candidate, with the candidates."""
    first: dict[tuple[int, int], int] = {}
    for i, k in enumerate(picked):
        first.setdefault((id(found.of[i]), k), i)
    return {(i, k): found.of[i] for (_, k), i in first.items()}


def _is_legal(graph: Graph, i: int, candidate: Candidate, mesh: Mesh) -> bool:
    op = graph.ops[i]
    tensors, layouts = (*graph.input_tensors(i), *op.outputs), (*candidate.inputs, *candidate.outputs)
    if len(tensors) != len(layouts) or any((t is None) != (layout is None) for t, layout in zip(tensors, layouts)):
        return False
    return all(t is None or layout is None or is_legal(t.shape, layout, mesh) for t, layout in zip(tensors, layouts))


def _refuse(graph: Graph, solution: Solution, mesh: Mesh) -> None:
    reasons = misfits(solution, graph, mesh)
    if reasons:
        raise ValueError(f"the plan does not fit this model: {'; '.join(reasons)}")


def _candidate(inputs: tuple[str, ...], outputs: tuple[str | None, ...]) -> Candidate:
    return Candidate(tuple(_parsed(x) for x in inputs), tuple(None if x is None else _parsed(x) for x in outputs))


def _place(layouts: Sequence[Layout], written: str | None, name: str) -> int:
    if written is None:
        raise ValueError(f"the plan says nothing about how {name} is left, although several ops read it; plan again")
    if _parsed(written) not in layouts:
        raise ValueError(f"{name}: the plan leaves it as {written}, which none of its readers takes; plan again")
    return list(layouts).index(_parsed(written))

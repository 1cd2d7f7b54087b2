"""The layouts of a Solution as a Formulation of its graph and a choice in it, so that a simulation has the costs of the plan.

The candidates of an op are only those layouts that the plan has for ops of the same signature, so no candidates are enumerated. The cost
of the choice is the cost of the plan (`problem.evaluate` agrees for both).
"""

from collections.abc import Sequence

from autoshard.formulate import Formulation, Training, formulate
from autoshard.graph import Graph, Value
from autoshard.layout import Layout, has_partial, is_legal
from autoshard.mesh import Mesh
from autoshard.solution import Placed, Solution, misfits, parsed
from autoshard.strategies import Candidate, Candidates, fused


def formulation_of_solution(graph: Graph, solution: Solution, mesh: Mesh | None = None) -> tuple[Formulation, tuple[int, ...]]:
    """The Formulation of the plan's layouts and the choice that is the plan. mesh: of the plan's shape, with other prices.

    ValueError where the plan is of another graph.
    """
    mesh = mesh or solution.mesh
    if solution.mesh.shape != mesh.shape or solution.layouts.keys() != graph.index.keys() | dict(graph.tied).keys():
        _refuse(graph, solution, mesh)
    tied = dict(graph.tied)
    placed = [solution.layouts[tied.get(op.name, op.name)] for op in graph.ops]
    candidates, picked = _candidates(graph, placed)
    if not all(_is_legal(graph, i, of[k], mesh) for (i, k), of in _distinct(candidates, picked).items()):
        _refuse(graph, solution, mesh)
    training = Training(solution.optimizer, solution.master_weights, solution.microbatches) if graph.trains else None
    hubs = _hubs(graph, placed, mesh)
    graph, limit = fused(graph) if solution.compiled else graph, solution.memory_limit
    formulated = formulate(graph, candidates, mesh, training=training, memory_limit=limit, hubs=hubs)
    choice = [*picked, *[0] * (len(formulated.problem.node_costs) - len(picked))]
    for (i, k), node in formulated.hubs.items():
        choice[node] = _index_of(formulated.hub_layouts[i, k], placed[i].hubs[k], graph.ops[i].name)
    for k, node in formulated.results.items():
        result = graph.results[k]
        if node >= len(graph.ops):
            key = f"{result.kind}:{result.name}"
            choice[node] = _index_of(formulated.result_layouts[k], solution.results.get(key), key)
    return formulated, tuple(choice)


def _candidates(graph: Graph, placed: Sequence[Placed]) -> tuple[Candidates, list[int]]:
    """Per signature the different candidates that the plan has for its ops, and which of them each op has."""
    by_signature: dict[tuple, dict[tuple, int]] = {}
    known: dict[tuple, dict[tuple, int]] = {}  # by the identity of the records, which the layers of a tiled graph share: hashed once
    of_op, picked = [], []
    for i, (op, one) in enumerate(zip(graph.ops, placed)):
        inputs = tuple([id(graph.ops[a].outputs[k]) for a, k in op.inputs])
        key = (op.target, id(op.literals), id(op.outputs), op.kind, op.alias, inputs)
        if key not in known:
            known[key] = by_signature.setdefault(graph.signature(i), {})
        of = known[key]
        picked.append(of.setdefault((one.inputs, one.outputs), len(of)))
        of_op.append(of)
    lists = {id(of): tuple(_candidate(*key) for key in of) for of in by_signature.values()}
    return Candidates(tuple(lists[id(of)] for of in of_op), (), len(by_signature)), picked


def _hubs(graph: Graph, placed: Sequence[Placed], mesh: Mesh) -> dict[Value, Layout]:
    """The whole layouts of values with several readers: where memory is short one that none of them reads, with fewer bytes."""
    hubs = {(i, k): parsed(text) for i, one in enumerate(placed) for k, text in enumerate(one.hubs) if text is not None}
    for (i, k), layout in hubs.items():
        if not is_legal(graph.tensor((i, k)).shape, layout, mesh):
            name, written = graph.ops[i].name, placed[i].hubs[k]
            raise ValueError(f"{name}: its layout in the plan, {written}, is none that the tensor can have; plan again")
    return {value: layout for value, layout in hubs.items() if not has_partial(layout)}


def _distinct(candidates: Candidates, picked: Sequence[int]) -> dict[tuple[int, int], tuple[Candidate, ...]]:
    """One op of each pair of signature and candidate, with the candidates."""
    first: dict[tuple[int, int], int] = {}
    for i, k in enumerate(picked):
        first.setdefault((id(candidates.of[i]), k), i)
    return {(i, k): candidates.of[i] for (_, k), i in first.items()}


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
    return Candidate(tuple(parsed(x) for x in inputs), tuple(None if x is None else parsed(x) for x in outputs))


def _index_of(layouts: Sequence[Layout], written: str | None, name: str) -> int:
    if written is None:
        raise ValueError(f"the plan has no layout for the result {name}, although several ops read it; plan again")
    if parsed(written) not in layouts:
        raise ValueError(f"{name}: its layout in the plan, {written}, is that of none of its readers; plan again")
    return list(layouts).index(parsed(written))

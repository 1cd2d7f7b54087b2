"""Converts a solver's answer to a Solution: layouts by name, certificate, fingerprint, and the assumptions behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from autoshard.formulate import Formulation
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning.describe import breakdown, drawn_per_shard, layouts_of, parameters_of, peak_of, replicated_ops, results_of
from autoshard.planning.keeping import packed
from autoshard.planning.options import Options
from autoshard.solution import VERSION, Solution, price_errors
from autoshard.solvers import Answer
from autoshard.strategies import is_experts


def describe(formulated: Formulation, answer: Answer, options: Options, baselines: Mapping[str, dict], assumptions: Mapping) -> Solution:
    """The answer by name: layouts, certificate, baselines, ops without rules, and the assumptions."""
    assert answer.choice is not None
    graph, mesh, problem, choice = formulated.graph, formulated.mesh, formulated.problem, answer.choice
    noted = {
        **options.noted(),
        "torch_version": torch.__version__.split("+")[0],
        "autoshard_version": VERSION,
        "axes": [axis.link_dict() for axis in mesh.axes],
        "device": mesh.device.name,
        "inputs": {op.name: list(op.output.shape) for op in graph.ops if op.kind == "input"},  # global shapes
        **({"expert_imbalance": mesh.expert_imbalance} if any(map(is_experts, graph.ops)) else {}),
        **({"random_numbers_per_shard": drawn} if (drawn := drawn_per_shard(formulated, choice)) else {}),
        **assumptions,
    }
    layouts, results = layouts_of(formulated, choice), results_of(formulated, choice)
    return Solution(
        layouts=layouts,
        results=results,
        mesh=mesh,
        cost=answer.cost,
        bound=min(answer.bound, answer.cost),
        status=answer.status.value,
        solver=answer.solver,
        peak_bytes=float(answer.peak or 0.0),
        peak=peak_of(formulated, choice),
        training=any(r.kind == "gradient" for r in graph.results),
        baselines=dict(baselines),
        replicated_ops=replicated_ops(formulated, choice),
        parameters=parameters_of(formulated, choice),
        breakdown=breakdown(formulated, choice),
        counts={
            "nodes": len(problem.node_costs),
            "choices": sum(len(c) for c in problem.node_costs),
            "edges": len(problem.edges),
            "distinct_signatures": formulated.candidates.num_signatures,
        },
        fingerprint={**fingerprint(graph, mesh, options), "layouts": packed(layouts, results)},
        assumptions=noted,
        prices=price_errors(mesh),
    )


def fingerprint(graph: Graph, mesh: Mesh, options: Options) -> dict[str, str]:
    """Hashes of what a plan depends on; equal on every machine."""
    prices = mesh.to_dict()
    return {
        "graph": graph.fingerprint(),
        "structure": graph.structure(),
        "mesh": _hash(list(mesh.shape)),
        "prices": _hash(prices),
        "options": _hash(options.compared()),
    }


def _hash(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()

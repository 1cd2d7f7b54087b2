"""Solve another planner's complete optimisation problems (meta-pytorch/autoparallel) and compare with its proven optimum.

    python benchmarks/planning_problems.py DIR [--solver auto] [--json]

DIR holds NAME.npz and NAME.json.gz as the data set `peer_problems` does. Seconds are CPU seconds from tables in memory, imports and
reading left out. The peer's own solve step took 19.0 s for llama2_8x8 (CBC).
"""

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

import numpy as np

from autoshard.problem import Edge, NodeUsage, Problem
from autoshard.solvers import solve


def read_peer(path: Path) -> Problem:
    """Node costs and edge tables as stored; ties and pair constraints become tables of 0 and inf, memory one live set."""
    z = np.load(path)
    sizes = z["n_strategies"].tolist()
    node_costs = np.split(z["unary_peer"], np.cumsum(sizes)[:-1])
    edges, at = [], 0
    for a, b, _ in z["edges"].tolist():
        table = z["edges_cost"][at : at + sizes[a] * sizes[b]].reshape(sizes[a], sizes[b])
        at += table.size
        if a == b:
            node_costs[a] = node_costs[a] + np.diagonal(table)
        else:
            edges.append(Edge(a, b, table))
    for a, b in z["equal_index"].tolist():
        edges.append(Edge(a, b, np.where(np.eye(sizes[a], sizes[b], dtype=bool), 0.0, np.inf)))
    allowed: dict[tuple[int, int], np.ndarray] = {}
    for a, i, b, j in z["pairs"].tolist():
        allowed.setdefault((a, b), np.full((sizes[a], sizes[b]), np.inf))[i, j] = 0.0
    edges += [Edge(a, b, table) for (a, b), table in allowed.items()]
    ratios = np.split(z["mem_ratio"], np.cumsum([sizes[v] for v in z["mem_nodes"]])[:-1])
    usages = [NodeUsage(v, 0, 1, r) for v, r in zip(z["mem_nodes"].tolist(), ratios, strict=True)]
    return Problem(tuple(map(str, range(len(sizes)))), tuple(node_costs), tuple(edges), tuple(usages), float(z["mem_low_high"][1]))


def measure(path: Path, solver: str) -> dict:
    problem = read_peer(path)
    with gzip.open(path.with_suffix(".json.gz"), "rt") as file:
        peer = json.load(file)["objective_peer_us"]
    began = time.process_time()
    answer = solve(problem, solver=solver)
    cpu = time.process_time() - began
    return {
        "problem": path.stem,
        "nodes": len(problem.names),
        "cells": sum(e.table.size for e in problem.edges),
        "status": answer.status.value,
        "cost": answer.cost,
        "bound": answer.bound,
        "peer": peer,
        "relative_difference": abs(answer.cost - peer) / peer,
        "cpu_seconds": round(cpu, 3),
        **{f"reduced_{k}": v for k, v in answer.reduced.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    paths = sorted(arguments.directory.glob("*.npz"))
    if not paths:
        sys.exit(f"{arguments.directory} holds no .npz files; expected the peer's problems")
    results = [measure(path, arguments.solver) for path in paths]
    if arguments.json:
        print(json.dumps({"problems": results}))
        return
    print(f"{'problem':<12} {'nodes':>6} {'cells':>8} {'status':>9} {'cost us':>14} {'peer us':>14} {'difference':>10} {'CPU s':>7}")
    for r in results:
        print(
            f"{r['problem']:<12} {r['nodes']:>6} {r['cells']:>8} {r['status']:>9} {r['cost']:>14.4f} {r['peer']:>14.4f} "
            f"{r['relative_difference']:>10.1e} {r['cpu_seconds']:>7.3f}"
        )


if __name__ == "__main__":
    main()

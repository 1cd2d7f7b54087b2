"""DDP, ZeRO and HSDP by name: the bytes that they send and hold are those of the literature (Rajbhandari et al. 2020, section 7).

Psi: bytes of all parameters, N: devices, m: microbatches. A collective over n ranks on x bytes sends (n - 1)/n x per rank, an all-reduce
twice that. A sharded parameter's own shard is held beside its kept copy, as in FSDP's SHARD_GRAD_OP.
"""

from functools import cache

import pytest
import torch

from autoshard.api import autosharding_pass, verify
from autoshard.baselines.megatron import from_parameters
from autoshard.formulate import Formulation
from autoshard.graph import ACCUMULATED, KEPT, Graph
from autoshard.layout import text
from autoshard.mesh import Mesh
from autoshard.problem import evaluate
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.solution import Solution, replay
from tests.helpers import TINY, tiny_graph
from tests.helpers_models import scheme_plan

MESHES = ((4,), (2, 2))
SCHEMES = ("data_parallel", "zero1", "zero2", "zero3", "hsdp")
CASES = [
    pytest.param(name, sizes, scheme, m, marks=() if (name, sizes) in (("mlp", (4,)), ("llama", (2, 2))) and m == 4 else pytest.mark.slow)
    for name in TINY
    for sizes in MESHES
    for scheme in SCHEMES
    for m in (2, 4)
    if scheme != "hsdp" or len(sizes) > 1
]


@cache
def planned(name: str, sizes: tuple[int, ...], scheme: str, m: int) -> tuple[Solution, Formulation, tuple[int, ...]]:
    graph = tiny_graph(name, True)
    solution = scheme_plan(graph, Mesh.from_bandwidths(sizes), scheme, microbatches=m)
    return solution, *formulation_of_solution(replay(solution, graph).graph, solution)


def parameters(graph: Graph) -> list[int]:
    """Ops of the parameters that are trained, without second names."""
    second = {other for other, _ in graph.tied}
    return [i for name, i in graph.parameters.items() if name not in second]


def psi(graph: Graph) -> int:
    return sum(graph.tensor((i, 0)).bytes for i in parameters(graph))


def used(graph: Graph) -> int:
    """Bytes of parameters, each as often as ops of one microbatch read it, through views."""

    def reads(i: int) -> int:
        users = graph.users.get((i, 0), ())
        return sum(reads(j) if len(graph.ops[j].inputs) == 1 and graph.ops[j].alias == 0 else 1 for j, _ in users)

    return sum(reads(i) * graph.tensor((i, 0)).bytes for i in parameters(graph))


def sent(formulated: Formulation, choice: tuple[int, ...]) -> tuple[float, float]:
    """Bytes that a rank sends in a step: to fetch parameters, and to reduce gradients."""
    graph = formulated.graph
    of_parameters, gradients = from_parameters(graph), {r.value for r in graph.results if r.kind == "gradient"}
    gradients |= {op.inputs[0] for op in graph.ops if op.kind == ACCUMULATED}
    fetched = reduced = 0.0
    for link in formulated.tensor_edges:
        moved = link.times * sum(step.bytes for step in formulated.route(link, choice).steps if step.collective != "split")
        fetched += moved if link.value[0] in of_parameters else 0.0
        reduced += moved if link.value in gradients else 0.0
    return fetched, reduced


def held(formulated: Formulation, choice: tuple[int, ...]) -> dict[str, float]:
    """Bytes that are held while the last op of a microbatch runs: those that the scheme decides."""
    problem, graph = formulated.problem, formulated.graph
    rows = dict.fromkeys(("parameters", "kept", "gradients", "optimizer_state"), 0.0)
    for kind, usage in zip(formulated.held, problem.usages, strict=True):
        if usage.start <= len(graph.ops) - 1 < usage.end:
            reader = usage.ends[-1]
            kept = kind == "resharded_copies" and reader < len(graph.ops) and graph.ops[reader].kind == KEPT
            if kept or kind in rows:
                rows["kept" if kept else kind] += usage.held(choice)
    return rows


def formulas(scheme: str, sizes: tuple[int, ...], m: int, graph: Graph) -> tuple[tuple[float, float], dict[str, float]]:
    p, n, k = psi(graph), torch.Size(sizes).numel(), sizes[-1]
    once, states = (n - 1) / n * p, 2  # AdamW's two moments, in float32 as the parameters
    match scheme:
        case "data_parallel":
            return (0, 2 * once), {"parameters": p, "kept": 0, "gradients": p, "optimizer_state": states * p}
        case "zero1":
            return (once, once), {"parameters": p / n, "kept": p, "gradients": p, "optimizer_state": states * p / n}
        case "zero2":
            return (once, m * once), {"parameters": p / n, "kept": p, "gradients": p / n, "optimizer_state": states * p / n}
        case "zero3":
            uses = (n - 1) / n * used(graph)
            return (m * uses, m * once), {"parameters": p / n, "kept": 0, "gradients": p / n, "optimizer_state": states * p / n}
    uses, scattered, rest = (k - 1) / k * used(graph), (k - 1) / k * p, 2 * (n // k - 1) / (n // k) * p / k
    return (m * uses, m * scattered + rest), {"parameters": p / k, "kept": 0, "gradients": p / k, "optimizer_state": states * p / k}


@pytest.mark.parametrize(("name", "sizes", "scheme", "m"), CASES)
def test_bytes_sent_and_held_are_those_of_the_literature(name, sizes, scheme, m):
    _, formulated, choice = planned(name, sizes, scheme, m)
    moved, bytes_held = formulas(scheme, sizes, m, tiny_graph(name, True))
    assert sent(formulated, choice) == pytest.approx(moved, rel=1e-12)
    assert held(formulated, choice) == pytest.approx(bytes_held, rel=1e-12)


def test_the_control_no_scheme_has_the_bytes_of_another():
    graph = tiny_graph("mlp", True)
    for scheme in SCHEMES:
        _, formulated, choice = planned("mlp", (2, 2), scheme, 4)
        for other in set(SCHEMES) - {scheme}:
            moved, bytes_held = (pytest.approx(one, rel=1e-3) for one in formulas(other, (2, 2), 4, graph))
            assert (sent(formulated, choice), held(formulated, choice)) != (moved, bytes_held)


@pytest.mark.parametrize("scheme", ("data_parallel", "zero1", "zero2", "zero3"))
def test_with_one_microbatch_zero1_is_zero2(scheme):
    _, formulated, choice = planned("mlp", (4,), scheme, 1)
    expected = formulas("zero2" if scheme == "zero1" else scheme, (4,), 1, tiny_graph("mlp", True))[0]
    assert sent(formulated, choice) == pytest.approx(expected, rel=1e-12)


def test_a_plan_is_never_slower_than_the_schemes():
    rows = {scheme: planned("mlp", (2, 2), scheme, 4)[0].cost for scheme in SCHEMES}
    module, inputs = TINY["mlp"]()
    options = {"example_inputs": inputs, "training": True, "ilp_solution_file": None}
    _, info = autosharding_pass(module, mesh_shape=(2, 2), microbatches=4, **options)
    baselines = {name: row["cost_seconds"] for name, row in info["solution"].baselines.items()}
    assert {name: baselines[name] for name in SCHEMES} == pytest.approx(rows)
    assert info["solution"].cost <= min(rows.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_with_microbatches_computes_what_the_model_does(scheme):
    solution, formulated, choice = planned("mlp", (2, 2), scheme, 4)
    assert verify(*TINY["mlp"](), solution)["ok"]
    assert evaluate(formulated.problem, choice).cost == pytest.approx(solution.cost)
    assert solution.peak_bytes == evaluate(formulated.problem, choice).peak
    assert {text(c.outputs[0]) for c in formulated.candidates.of[formulated.graph.index["layers.0.up.weight"]]} == {
        solution.parameters["layers.0.up.weight"]["layout"]
    }

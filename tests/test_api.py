"""plan and verify from end to end: optimal, judged by `evaluate`, the same everywhere, and a sentence where there is no plan."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from autoshard.api import Infeasible, check, html_report, plan, simulate, verify
from autoshard.formulate import Training, formulate
from autoshard.layout import local_numel, parse
from autoshard.mesh import Mesh
from autoshard.planning.describe import layouts_of
from autoshard.problem import evaluate
from autoshard.solution import Solution
from autoshard.solvers import solve
from autoshard.strategies import candidates
from models import gpt2, mlp
from tests.helpers import TINY, fast_mesh, tiny_graph
from tests.helpers_kept import assert_stays
from tests.helpers_models import refusal
from tests.helpers_refusals import assert_refused

BOTH = (True, False)
CASES = [
    (name, training, sizes) for name in TINY for training in BOTH for sizes in ((2, 2), (8,)) if sizes == (2, 2) or name in ("mlp", "gpt2")
]
BASELINES = ("data_parallel", "fsdp", "megatron", "megatron_sp")


@cache
def planned(name: str, training: bool, sizes: tuple[int, ...]) -> Solution:
    return plan(*TINY[name](), fast_mesh(sizes), training=training, objective="serial")


def problem_of(name: str, training: bool, mesh: Mesh):
    graph = tiny_graph(name, training)
    return formulate(graph, candidates(graph, mesh), mesh, training=Training() if training else None)


def timeless(solution: Solution) -> dict:
    return {key: value for key, value in solution.to_dict().items() if key != "seconds"}


# -- the plan ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "training", "sizes"), CASES)
def test_the_plan_is_optimal_and_no_baseline_is_cheaper(name, training, sizes):
    solution = planned(name, training, sizes)
    assert (solution.status, solution.gap) == ("optimal", pytest.approx(0, abs=1e-9))
    several = {"hsdp", *(["megatron_fsdp"] if name != "mlp" else [])} if training and len(sizes) > 1 else set()  # an mlp has no sequence
    assert set(solution.baselines) == {*BASELINES, *several}
    assert all(b["cost_seconds"] >= solution.cost * (1 - 1e-9) for b in solution.baselines.values())
    assert solution.replicated_ops == ()


@pytest.mark.parametrize(("name", "training", "sizes"), [case for case in CASES if case[0] in ("mlp", "gpt2")])
def test_by_default_no_usual_plan_has_a_shorter_time_line(name, training, sizes):
    solution, serial = plan(*TINY[name](), fast_mesh(sizes), training=training), planned(name, training, sizes)
    assert solution.objective == "overlapped" and 0 < solution.objective_bound <= solution.objective_seconds
    assert all(b["step_seconds"] >= solution.objective_seconds * (1 - 1e-9) for b in solution.baselines.values())
    assert solution.objective_seconds <= serial.step_seconds * (1 + 1e-9) and solution.cost >= serial.cost * (1 - 1e-9)


@pytest.mark.parametrize(("name", "training", "sizes"), [case for case in CASES if case[0] in ("mlp", "gpt2")])
def test_the_cost_and_the_peak_are_evaluates(name, training, sizes):
    """The choice that the layouts stand for, found again by name, judged again."""
    solution, f = planned(name, training, sizes), problem_of(name, training, fast_mesh(sizes))
    answer = solve(f.problem, preference=f.preference)
    judged = evaluate(f.problem, answer.choice)
    assert judged.cost == pytest.approx(solution.cost, rel=1e-12)
    if layouts_of(f, answer.choice) == solution.layouts:
        assert judged.peak == solution.peak_bytes


@pytest.mark.parametrize(("name", "training", "sizes"), CASES)
def test_the_breakdown_adds_up_to_the_cost(name, training, sizes):
    solution = planned(name, training, sizes)
    parts = solution.breakdown
    assert sum(parts["compute"].values()) + sum(parts["communication"].values()) == pytest.approx(solution.cost, rel=1e-9)
    assert sum(sum(block.values()) for block in parts["blocks"].values()) == pytest.approx(solution.cost, rel=1e-9)


@pytest.mark.parametrize(("name", "training", "sizes"), CASES)
def test_every_parameter_has_its_layout_and_local_bytes(name, training, sizes):
    solution = planned(name, training, sizes)
    module, _ = TINY[name]()
    named = dict(module.named_parameters(remove_duplicate=False))
    assert set(solution.parameters) == set(named)
    for n, row in solution.parameters.items():
        shape = tuple(named[n].shape)
        assert tuple(row["shape"]) == shape and row["dtype"] == "float32"
        assert row["local_bytes"] == 4 * local_numel(shape, parse(row["layout"]), solution.mesh)
        assert row["layout"] == solution.layouts[n].outputs[0]


def test_the_certificate_and_the_counts_are_there():
    solution = planned("gpt2", True, (2, 2))
    assert solution.bound <= solution.cost and solution.training
    assert set(solution.counts) == {"nodes", "choices", "edges", "distinct_signatures"}
    assert set(solution.fingerprint) == {"graph", "structure", "mesh", "prices", "options", "layouts"}
    assert solution.fingerprint["graph"] == tiny_graph("gpt2", True).fingerprint()
    assert {"capture", "candidates", "formulate", "solve", "total"} <= set(solution.seconds["cpu"])


def test_plans_stay_what_they_are():
    told = {}
    for case in (("mlp", True, (2, 2)), ("gpt2", False, (2, 2))):
        one = planned(*case).to_dict()
        told[" ".join(map(str, case))] = {
            **{key: one[key] for key in ("cost", "bound", "peak_bytes", "peak", "breakdown", "counts", "status")},
            "baselines": {name: [row["cost_seconds"], row["peak_bytes"]] for name, row in one["baselines"].items()},
            "parameters": {name: row["layout"] for name, row in one["parameters"].items()},
        }
    assert_stays("rooms/plans.json", told)


def test_fingerprints_tell_what_differs():
    model = TINY["mlp"]
    asked = {"training": True, "baselines": False, "objective": "serial"}
    base = plan(*model(), fast_mesh((2,)), **asked)
    others = {
        "graph": plan(*model(batch=32), fast_mesh((2,)), **asked),
        "mesh": plan(*model(), fast_mesh((4,)), **asked),
        "prices": plan(*model(), fast_mesh((2,), intra_node_bandwidth=1e13), **asked),
        "options": plan(*model(), fast_mesh((2,)), **asked, optimizer="sgd"),
    }
    for key, other in others.items():
        changed = {k for k in base.fingerprint if base.fingerprint[k] != other.fingerprint[k]} - {"layouts"}  # what came of it
        assert changed - {"prices" if key == "mesh" else key} == ({key} if key == "mesh" else set()) and key in changed


def test_progress_grows_to_the_whole_and_names_the_phases():
    model, mesh, pins = TINY["mlp"](), fast_mesh((2,)), {"layers.0.up.weight": "S(0)"}
    solution = plan(*model, mesh, pins=pins, objective="serial")
    calls = {
        "plan": lambda tell: plan(*model, mesh, pins=pins, price_pins=True, progress=tell),
        "verify": lambda tell: verify(*model, solution, progress=tell),
        "check": lambda tell: check(*model, solution, progress=tell),
        "simulate": lambda tell: simulate(*model, solution, progress=tell),
        "report": lambda tell: html_report(solution, *model, progress=tell),
    }
    for name, call in calls.items():
        seen = []
        call(lambda message, fraction: seen.append((fraction, message)))  # noqa: B023
        assert seen and [f for f, _ in seen] == sorted(f for f, _ in seen) and 0 <= seen[0][0] <= seen[-1][0] <= 1, name
        assert name == "report" or seen[0][1].startswith(("capturing", "reading")), (name, seen[0])


def test_a_mesh_of_one_device_is_planned_without_communication():
    solution = plan(*TINY["gpt2"](), Mesh.from_bandwidths((1,)), training=True, objective="serial")
    assert solution.status == "optimal" and not solution.breakdown["communication"]
    assert {row["layout"] for row in solution.parameters.values()} == {"R"}


# -- the same everywhere -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
sys.path.insert(0, ".")
from autoshard.api import plan
from tests.helpers import TINY, fast_mesh
plans = {}
for sizes in ((2, 4), (8,)):
    for name in ("gpt2",):
        data = plan(*TINY[name](), fast_mesh(sizes), training=True).to_dict()
        del data["seconds"]
        plans[f"{name} {sizes}"] = data
print(json.dumps(plans))
"""


def run_script(script: str, *, seed: str, cpus: int) -> subprocess.Popen:
    env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": str(cpus)}
    some = sorted(os.sched_getaffinity(0))[:cpus]
    return subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, some)
    )


@pytest.mark.slow
def test_plans_are_the_same_under_every_hash_seed_and_number_of_cpus_and_after_other_plans():
    runs = [run_script(SCRIPT, seed=seed, cpus=cpus) for seed, cpus in (("0", 1), ("1", 2))]
    first, second = (json.loads(run.communicate()[0]) for run in runs)
    assert first == second
    for name in ("gpt2",):  # here: the other mesh first, after all that ran before
        for sizes in ((8,), (2, 4)):
            assert json.loads(json.dumps(timeless(plan(*TINY[name](), fast_mesh(sizes), training=True)))) == first[f"{name} {sizes}"]


# -- pins --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", BOTH)
@pytest.mark.parametrize("layout", ["S(0),S(1)", "R,S(1)", "R,R", "S(0),S(0)"])
def test_pins_are_obeyed_and_never_make_a_plan_cheaper(layout, training):
    pins = {"h.0.mlp.c_fc.weight": layout, "input_0": "S(0),R"}
    solution = plan(*TINY["gpt2"](), fast_mesh((2, 2)), training=training, pins=pins, baselines=False, objective="serial")
    assert {name: solution.layouts[name].outputs[0] for name in pins} == pins
    assert solution.cost >= planned("gpt2", training, (2, 2)).cost * (1 - 1e-9)
    assert not training or solution.results["gradient:h.0.mlp.c_fc.weight"] == layout


def test_an_op_and_the_second_name_of_a_tied_parameter_can_be_pinned():
    op = next(op.name for op in tiny_graph("mlp", False).ops if op.target == "aten.addmm.default")
    assert plan(*TINY["mlp"](), fast_mesh((2,)), pins={op: "S(1)"}, objective="serial").layouts[op].outputs == ("S(1)",)
    tied = plan(
        Tied(), (torch.zeros(4, 4, dtype=torch.int64),), fast_mesh((2,)), training=True, objective="serial",
        pins={"head.weight": "S(0)", "wte.weight": "S(0)"},
    )
    assert {tied.parameters[name]["layout"] for name in ("head.weight", "wte.weight")} == {"S(0)"}
    assert {row.get("tied_to") for row in tied.parameters.values()} == {None, "wte.weight"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        return self.head(self.wte(tokens)).square().mean()


@pytest.mark.parametrize("training", BOTH)
def test_tied_parameters_are_planned_and_verified(training):
    inputs = (torch.arange(16).reshape(4, 4),)
    solution = plan(Tied(), inputs, fast_mesh((2, 2)), training=training, baselines=False, objective="serial")
    assert verify(Tied(), inputs, solution, random=2)["ok"]


# -- sentences ---------------------------------------------------------------------------------------------------------------------

BAD = [
    (dict(pins={"h.0.mlp.c_fc.wieght": "R,R"}), "pin on 'h.0.mlp.c_fc.wieght': the model has no such tensor; near are h.0.mlp.c_fc.weight"),
    (dict(pins={"zzz": "R,R"}), "pin on 'zzz': the model has no such tensor"),
    (dict(pins={"wte.weight": "S(2),R"}), "pin on 'wte.weight': layout S(2),R shards dim 2, the tensor has 2 dims"),
    (dict(pins={"wte.weight": "S(0)"}), "pin on 'wte.weight': layout S(0) has 1 placements, the mesh 2x2 has 2 axes"),
    (dict(pins={"wte.weight": "Q,R"}), "layout 'Q,R' has 'Q'; expected R, S(dim) or P per mesh axis"),
    (dict(pins={"wte.weight": "P,R"}), "pin on 'wte.weight': layout P,R is no output layout of parameter; possible are S(0),S(0)"),
    (dict(pins={"wte.weight": 3}), "pin on 'wte.weight': 3 is no layout"),
    (dict(pins=["wte.weight"]), "pins is a list"),
    (dict(memory_limmit=1e9), "unknown option 'memory_limmit'; did you mean 'memory_limit'?"),
    (dict(frobnicate=1), "unknown option 'frobnicate'; known are training"),
    (dict(memory_limit=0), "memory_limit is 0; expected a positive number of bytes per device"),
    (dict(memory_limit=-1), "memory_limit is -1;"),
    (dict(memory_limit=float("nan")), "memory_limit is nan;"),
    (dict(memory_limit="80GB"), "memory_limit is '80GB';"),
    (dict(time_limit=0), "time_limit is 0; expected a number above 0"),
    (dict(gap=-0.1), "gap is -0.1; expected a number of 0 or more"),
    (dict(optimizer="adam"), "unknown optimizer 'adam'; expected adamw"),
    (dict(solver="simplex"), "there is no solver 'simplex'; expected one of"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=[str(o) for o, _ in BAD])
def test_a_bad_option_is_one_sentence(options, sentence):
    assert refusal(plan, *TINY["gpt2"](), fast_mesh((2, 2)), **options).startswith(sentence)


def test_what_is_no_model_or_mesh_is_one_sentence():
    module, inputs = TINY["mlp"]()
    with pytest.raises(ValueError, match=r"^mesh is tuple; expected an autoshard.Mesh, for example Mesh.from_bandwidths\(\(2, 4\)\)$"):
        plan(module, inputs, (2, 4))
    assert_refused("^model is function; expected a torch.nn.Module$", plan, TINY["mlp"], inputs, fast_mesh((2,)))


def test_pins_that_forbid_each_other_are_one_sentence():
    """Only a sum can be read as a sum: the view of what is cut can't be partial."""
    graph = tiny_graph("gpt2", False)
    op = next(op for op in graph.ops if op.target == "aten.mm.default")
    follower = next(o for o in graph.ops if (graph.index[op.name], 0) in o.inputs)
    with pytest.raises(Infeasible) as caught:
        plan(*TINY["gpt2"](), fast_mesh((2,)), pins={op.name: "S(1)", follower.name: "P"})
    assert str(caught.value) == f"no plan exists under pin {op.name}=S(1) and pin {follower.name}=P: they forbid each other; take one away"


# -- memory ------------------------------------------------------------------------------------------------------------------------


SMALL = {"layers": 1}


def test_a_limit_is_obeyed_and_costs_time():
    free = plan(*mlp.tiny(**SMALL), Mesh.from_bandwidths((2,)), training=True, objective="serial")
    limit = 0.7 * free.peak_bytes
    tight = plan(*mlp.tiny(**SMALL), Mesh.from_bandwidths((2,)), training=True, memory_limit=limit, objective="serial")
    assert tight.status == "optimal" and tight.peak_bytes <= limit and tight.cost > free.cost
    assert tight.baselines["data_parallel"]["fits"] is False


def test_what_fits_nowhere_says_the_smallest_limit_that_would():
    mesh, asked = Mesh.from_bandwidths((2,)), {"training": True, "baselines": False, "objective": "serial"}
    with pytest.raises(Infeasible) as caught:
        plan(*mlp.tiny(**SMALL), mesh, **asked, memory_limit=1000)
    low, high = caught.value.smallest_limit
    said = re.fullmatch(
        r"no plan fits in 1.000 kB per device; the smallest limit that works is (?:between [\d.]+ kB and )?([\d.]+) kB( \(.*\))?",
        str(caught.value),
    )
    assert float(said[1]) * 1e3 >= high >= low > 1000
    assert plan(*mlp.tiny(**SMALL), mesh, **asked, memory_limit=float(said[1]) * 1e3).peak_bytes <= high
    with pytest.raises(Infeasible):
        plan(*mlp.tiny(**SMALL), mesh, **asked, memory_limit=0.99 * low)


# -- sense -------------------------------------------------------------------------------------------------------------------------


def tensor_parallel_axes(solution: Solution, names) -> set[int]:
    """Axes on which some large matmul's output or contraction is cut along features."""
    return {k for n in names for k, p in enumerate(parse(solution.layouts[n].outputs[0])) if p.is_shard()}


def test_swapping_the_bandwidths_swaps_the_axis_that_carries_tensor_parallelism():
    """Wide layers, few tokens, whole parameters too large to gather: features are cut over the fast axis, the batch over the slow one."""
    model = lambda: gpt2.build(layers=1, heads=16, width=2048, positions=256, vocab=4096, batch=8, seq=256, loss=True, dtype="bfloat16")  # noqa: E731
    fast, slow = 900e9, 25e9
    found = {}
    for first, (inside, between) in {"inside": (fast, slow), "between": (slow / 4, fast * 4)}.items():
        mesh = Mesh.from_bandwidths((2, 2), intra_node_bandwidth=inside, inter_node_bandwidth=between, devices_per_node=2)
        solution = plan(*model(), mesh, training=True, baselines=False, objective="serial")
        found[first] = tensor_parallel_axes(solution, ["h.0.mlp.c_fc.weight"])
    assert found == {"inside": {1}, "between": {0}}


# -- verify ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "training"), [(name, training) for name in TINY for training in BOTH])
def test_the_plan_and_random_layouts_compute_what_the_model_computes(name, training):
    report = verify(*TINY[name](), planned(name, training, (2, 2)), random=1, seed=1)
    assert report["ok"] and report["ranks"] == 4 and [row["seed"] for row in report["plans"]] == [None, 1]
    for row in report["plans"]:
        assert row["placement_mismatches"] == [] and row["max_relative_error_outputs"] <= 1e-5
        assert (row["max_relative_error_gradients"] <= 1e-5) and (
            row["max_relative_error_gradients"] > 0 or not training or row["redistributes"] == 0
        )
    assert all(row["redistributes"] > 0 for row in report["plans"][1:])


def test_a_plan_is_verified_at_a_smaller_batch():
    sizes = {"layers": 1}
    solution = plan(*gpt2.tiny(batch=32, **sizes), fast_mesh((2, 2)), training=True, baselines=False, objective="serial")
    assert verify(*gpt2.tiny(batch=8, **sizes), solution)["ok"]
    assert_refused("^the solution does not fit this model: ", verify, *gpt2.tiny(batch=1, seq=15, **sizes), solution)


def test_the_plan_of_another_model_is_refused():
    with pytest.raises(ValueError, match="^the solution does not fit this model: .* of the model have no layout in the plan"):
        verify(*TINY["llama"](), planned("gpt2", True, (2, 2)))


def test_a_falsified_result_layout_is_found():
    solution = planned("gpt2", True, (2, 2))
    name = "h.0.mlp.c_fc.weight"
    wrong = next(layout for layout in ("S(0),R", "R,S(0)") if layout != solution.results[f"gradient:{name}"])
    moved = replace(solution, results={**solution.results, f"gradient:{name}": wrong})
    assert verify(*TINY["gpt2"](), moved)["ok"]  # another layout of the result is no fault: it is moved there


def test_real_weights_and_keyword_inputs_are_used():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    solution = plan(model, {"input": x}, fast_mesh((2,)), training=True, objective="serial")
    assert verify(model, {"input": x}, solution, random=2)["ok"]
    assert all(p.grad is None for p in model.parameters())


def test_a_module_that_writes_its_input_and_its_buffers_is_verified():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("count", torch.ones(8))

        def forward(self, x):
            self.count.add_(1)
            x.mul_(2)
            return (self.linear(x) * self.count).sum(), self.count

    for training in BOTH:
        inputs = (torch.randn(4, 8),)
        solution = plan(Counts(), inputs, fast_mesh((2,)), training=training, baselines=False, objective="serial")
        assert verify(Counts(), inputs, solution, random=2)["ok"]

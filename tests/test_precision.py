"""Mixed precision as a policy of the plan: its text, the casts that it adds, where gradients are reduced, files, the pass, the CLI."""

import itertools
import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import Precision
from autoshard.api import simulate
from autoshard.capture import capture, capture_deep, capture_module
from autoshard.formulate import Training, formulate
from autoshard.graph import Graph, checkpointed, forward_blocks, pending
from autoshard.graph.casts import CAST, CAST_THEN_REDUCE, LAG, REDUCE_THEN_CAST
from autoshard.layout import parse
from autoshard.lower.collectives import Groups
from autoshard.lower.fx_program import trace
from autoshard.lower.program import Redistribute, lower
from autoshard.mesh import Mesh
from autoshard.planning.describe import layouts_of, results_of
from autoshard.planning.warm_starts import random_choice
from autoshard.report.planned import planned_report
from autoshard.report.terminal import as_text
from autoshard.solution import replay
from autoshard.strategies import candidates
from models import gpt2, llama, mlp
from tests.helpers import fast_mesh
from tests.helpers_models import Model, parallel, right_plan
from tests.helpers_ranks import run_ranks
from tests.helpers_refusals import assert_refused

DTYPES = (None, "bfloat16", "float16", "float32")
TINY = {"gpt2": gpt2.tiny, "llama": partial(llama.tiny, layers=1), "mlp": mlp.mlp}
FLOAT32, BFLOAT16 = "bf16:reduce=fp32", "bf16:reduce=bf16"


@cache
def captured(name: str, precision: str | None, training: bool = True) -> Graph:
    module, inputs = TINY[name]()
    return capture(module, inputs, training=training, precision=Precision.of(precision))


# -- the value


def test_text_and_value_are_inverses():
    for param, reduce, output, inputs in itertools.product(DTYPES, DTYPES, DTYPES, (True, False)):
        precision = Precision(param, reduce, output, inputs)
        assert Precision.parse(str(precision)) == precision == Precision.of(str(precision))


def test_a_word_comes_once():
    with pytest.raises(ValueError, match="has 'reduce=fp32'; expected reduce, output, cast_forward_inputs, each once at most"):
        Precision.parse("bf16:reduce=bf16,reduce=fp32")


def test_bf16_reduces_in_float32_and_dtypes_are_given_in_any_form():
    assert Precision.of("bf16") == Precision(torch.bfloat16, "float32") == Precision("bf16", torch.float32)
    assert str(Precision.of("bf16")) == "bfloat16:reduce=float32"
    assert Precision.of(MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)) == Precision("bf16", None, "fp32")
    assert Precision.of(None) is None


@pytest.mark.parametrize("given", ["bf17", "", "bf16:sum=fp32", "bf16:reduce", "bf16:cast_forward_inputs=maybe", 16, torch.bfloat16, {}])
def test_anything_else_is_refused_in_a_sentence(given):
    assert_refused("expected", Precision.of, given)


# -- the casts


@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp"])
def test_a_parameter_is_stored_in_float32_and_cast_once_per_pass(name):
    graph, plain = captured(name, FLOAT32), captured(name, None)
    assert [(op.name, op.outputs) for op in graph.ops if op.kind == "parameter"] == [
        (op.name, op.outputs) for op in plain.ops if op.kind == "parameter"
    ]
    for i in graph.parameters.values():
        readers = [graph.ops[j] for j, _ in graph.users.get((i, 0), ())]
        assert all(op.target == CAST and op.output.dtype == "bfloat16" for op in readers)
        assert [op.backward for op in readers] in ([], [False], [False, True])
    gradients = [r.value for r in graph.results if r.kind == "gradient"]
    assert gradients and {graph.tensor(value).dtype for value in gradients} == {"float32"}
    assert {graph.ops[value[0]].kind for value in gradients} == {CAST_THEN_REDUCE}
    assert all(graph.tensor(v).dtype == "bfloat16" for op in graph.ops if ".mm." in op.target for v in op.inputs)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_copy_of_a_parameter_lives_from_the_forward_to_the_backward(name):
    for graph in (captured(name, FLOAT32), checkpointed(captured(name, FLOAT32), 1)):
        of_parameter = set()
        for i, op in enumerate(graph.ops):
            if not op.is_placeholder and not op.backward and (op.target == CAST or op.alias is not None):
                if all(graph.ops[a].kind == "parameter" or a in of_parameter for a, _ in op.inputs):
                    of_parameter.add(i)
        assert of_parameter
        assert not any(op.backward and a in of_parameter for op in graph.ops for a, _ in op.inputs)


def test_recomputed_blocks_share_the_casts_of_the_backward_pass():
    graph = captured("gpt2", FLOAT32)
    recomputed = checkpointed(graph, len(forward_blocks(graph)))
    for i in recomputed.parameters.values():
        assert sum(recomputed.ops[j].backward for j, _ in recomputed.users.get((i, 0), ())) <= 1


def test_outputs_inputs_and_tangents_are_cast():
    model = Model(lambda m, x: (m.a(x), x), a=nn.Linear(8, 8))
    inputs = (torch.zeros(4, 8),)
    graph = capture(model, inputs, training=True, precision=Precision("bf16", "fp32", "fp32"))
    dtypes = {r.name: graph.tensor(r.value).dtype for r in graph.results if r.kind == "output"}
    assert dtypes == {"0": "float32", "1": "float32"}
    assert {op.output.dtype for op in graph.ops if op.kind in ("tangent", "input")} == {"float32"}
    assert [op.output.dtype for op in graph.ops if "addmm" in op.target] == ["bfloat16"]
    kept = capture(model, inputs, training=False, precision=Precision("bf16", cast_forward_inputs=False, output_dtype="fp32"))
    assert not any(op.target == CAST and kept.ops[op.inputs[0][0]].kind == "input" for op in kept.ops)


@pytest.mark.slow
def test_a_deep_model_is_tiled_with_its_casts():
    module, inputs = gpt2.tiny(layers=21)
    precision = Precision.of("bf16")
    deep, depth = capture_deep(module, inputs, training=True, precision=precision)
    assert depth.tiled and depth.shallow is not None
    assert deep == capture(module, inputs, training=True, precision=precision)


# -- where gradients are reduced


def reductions(graph: Graph, choice: tuple, formulated) -> dict[str, set]:
    """The kinds of the ops whose values are reduced on their way to a gradient's cast, or to its parameter."""
    program = lower(graph, layouts_of(formulated, choice), results_of(formulated, choice), formulated.mesh)
    waiting, kinds = pending(graph), {"pending": set(), "cast": set(), "cast_inputs": set()}
    for record in program.records:
        if isinstance(record, Redistribute) and any(p.is_partial() for p in record.source.layout):
            value = record.source.value
            if value in waiting and sum(p.is_partial() for p in record.target.layout) < sum(p.is_partial() for p in record.source.layout):
                kinds["pending"].add(value)
            kinds["cast"] |= {value} if graph.ops[value[0]].kind == CAST_THEN_REDUCE else set()
    for i, op in enumerate(graph.ops):
        if op.kind == REDUCE_THEN_CAST and any(p.is_partial() for p in formulated.candidate(i, choice).inputs[0]):
            kinds["cast_inputs"].add(i)
    return kinds


@pytest.mark.parametrize(
    ("name", "shape"), [("gpt2", (2, 2)), *(pytest.param(name, (4,), marks=pytest.mark.slow) for name in ("gpt2", "llama"))]
)
def test_random_layouts_reduce_gradients_on_the_right_side_of_their_cast(name, shape):
    reduced = 0
    for precision in (FLOAT32, BFLOAT16):
        graph = captured(name, precision)
        formulated = formulate(graph, candidates(graph, fast_mesh(shape)), fast_mesh(shape), training=Training())
        for seed in range(3):
            kinds = reductions(graph, random_choice(formulated, seed), formulated)
            assert not kinds["pending"] and not kinds["cast_inputs"]
            reduced += len(kinds["cast"])
    assert reduced  # in float32, after the cast


def test_without_the_rule_gradients_would_be_reduced_in_fewer_bytes_before_their_cast():
    """The control: with the casts of the policy as ordinary ops, random layouts break it."""
    graph = captured("gpt2", FLOAT32)
    free = replace(graph, ops=tuple(replace(op, kind="compute") if op.kind == CAST_THEN_REDUCE else op for op in graph.ops))
    formulated = formulate(free, candidates(free, fast_mesh((4,))), fast_mesh((4,)), training=Training())
    waiting, broken = pending(graph), 0
    for choice in (random_choice(formulated, seed) for seed in range(3)):
        program = lower(free, layouts_of(formulated, choice), results_of(formulated, choice), fast_mesh((4,)))
        moved = [r for r in program.records if isinstance(r, Redistribute) and r.source.value in waiting]
        broken += sum(r.source.layout == parse("P") for r in moved)
    assert broken


@cache
def planned(name: str, precision: str | None, shape: tuple[int, ...] = (2, 2), **options):
    module, inputs = TINY[name]()
    return autoshard.plan(module, inputs, fast_mesh(shape), training=True, precision=precision, **{"objective": "serial", **options})


def test_a_slow_network_makes_bfloat16_cheaper_by_half():
    slow = Mesh.from_bandwidths((4,), intra_node_bandwidth=1e6, inter_node_bandwidth=1e6)
    module, inputs = mlp.mlp()
    costs = {}
    for precision in (None, FLOAT32, BFLOAT16):
        solution = autoshard.plan(module, inputs, slow, training=True, precision=precision, objective="serial")
        costs[precision] = solution.baselines["data_parallel"]["cost_seconds"]
    assert costs[FLOAT32] == pytest.approx(costs[None], rel=0.02)  # all that is sent is gradients
    assert costs[BFLOAT16] == pytest.approx(costs[None] / 2, rel=0.02)


# -- verify, files, the pass


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param("gpt2", "bf16", marks=pytest.mark.slow), ("llama", "bf16:reduce=bf16,output=fp32")]
)
def test_a_plan_and_random_layouts_compute_what_the_policy_computes_on_one_device(name, precision):
    module, inputs = TINY[name]()
    solution = planned(name, precision, (2,), baselines=False)
    assert autoshard.verify(module, inputs, solution, random=1)["ok"]
    assert not autoshard.verify(module, inputs, solution, plant_fault=True)["ok"]


@pytest.mark.slow
def test_float16_is_as_good_a_dtype():
    module, inputs = mlp.mlp(width=64)
    right_plan(module, inputs, fast_mesh((4,)), training=True, precision="fp16")


def test_parameters_of_bfloat16_are_reduced_in_float32():
    module, inputs = gpt2.tiny(dtype="bfloat16", layers=1)
    graph = capture(module, inputs, training=True, precision=Precision("bf16", "fp32"))
    chain = [graph.ops[i].kind for i, op in enumerate(graph.ops) if op.kind in (CAST_THEN_REDUCE, REDUCE_THEN_CAST)]
    assert chain.count(CAST_THEN_REDUCE) == chain.count(REDUCE_THEN_CAST) > 0
    right_plan(module, inputs, fast_mesh((4,)), training=True, precision=Precision("bf16", "fp32"))


def test_a_sum_is_cast_when_so_many_more_gradients_are_computed():
    kinds = [op.kind for op in captured("gpt2", "bf16:reduce=bf16").ops]
    sums, gradients = (kinds.count(kind) for kind in (REDUCE_THEN_CAST, CAST_THEN_REDUCE))
    assert sums > 2 * LAG and gradients == 0
    kinds = [op.kind for op in captured("gpt2", "bf16:reduce=fp16").ops if op.kind in (REDUCE_THEN_CAST, CAST_THEN_REDUCE)]
    before = [kinds[:i].count(CAST_THEN_REDUCE) for i, kind in enumerate(kinds) if kind == REDUCE_THEN_CAST]
    assert before == [min(k + 1 + LAG, len(before)) for k in range(len(before))] and len(before) > 2 * LAG


def test_files_hold_the_policy_and_old_files_have_none(tmp_path):
    solution, plain = planned("gpt2", "bf16", baselines=False), planned("gpt2", None, baselines=False)
    assert plain.precision is None and "precision" not in plain.assumptions
    path = tmp_path / "plan.json"
    solution.save(path)
    assert autoshard.load(path) == solution and autoshard.load(path).precision == Precision("bf16", "fp32")
    assert solution.fingerprint["options"] != plain.fingerprint["options"] and solution.fingerprint["graph"] != plain.fingerprint["graph"]
    data = json.loads(path.read_text())
    data["assumptions"]["precision"] = "bf17"
    path.write_text(json.dumps(data))
    assert_refused("is not a sound plan: param_dtype is 'bf17'", autoshard.load, path)


def test_the_other_verbs_follow_the_policy():
    module, inputs = gpt2.tiny()
    solution = planned("gpt2", "bf16", baselines=False)
    assert not replay(solution, captured("gpt2", "bf16")).misfits and replay(solution, captured("gpt2", None)).misfits
    assert simulate(module, inputs, solution, overlap=False).seconds == pytest.approx(solution.cost)
    assert "precision bfloat16:reduce=float32" in as_text(planned_report(solution), width=1000)


def test_the_pass_takes_a_policy_for_a_module_only():
    module, inputs = gpt2.tiny(layers=1)
    options = {"mesh_shape": (4,), "example_inputs": inputs, "ilp_solution_file": None}
    graph, info = autoshard.autosharding_pass(module, training=True, precision="bf16", **options)
    assert info["solution"].precision == Precision("bf16", "fp32")
    assert all("autoshard" in node.meta for node in graph.graph.find_nodes(op="placeholder"))
    fx_graph = capture_module(module, inputs, training=False).fx_graph
    assert_refused("needs an nn.Module", autoshard.autosharding_pass, fx_graph, precision="bf16", **options)


# -- norms, whose statistics a CPU and a GPU return in different dtypes


NORMS = {
    "layer": lambda affine: nn.LayerNorm([8, 4, 4], elementwise_affine=affine),
    "group": lambda affine: nn.GroupNorm(2, 8, affine=affine),
}


def normed(kind: str, affine: bool) -> nn.Module:
    return Model(lambda m, x: m.norm(m.conv(x)).float().square().mean(), conv=nn.Conv2d(4, 8, 1), norm=NORMS[kind](affine))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_bfloat16_run_on_a_cpu_and_trace_for_a_gpu(kind, affine):
    model, inputs = normed(kind, affine), (torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(1)),)
    for precision in ("bf16", None):
        model = model if precision else normed(kind, affine).to(torch.bfloat16)
        inputs = inputs if precision else tuple(x.bfloat16() for x in inputs)
        solution = right_plan(model, inputs, fast_mesh((4,)), training=True, precision=precision, random=1)
        graph = capture(model, inputs, training=True, precision=solution.precision)
        program = lower(graph, solution.layouts, solution.results, solution.mesh, device="cuda")
        assert trace(program, graph, Groups(("fake",), (4,)), (0,), "cuda").backward is not None


def test_batch_norms_of_bfloat16_trace_on_a_rank_that_has_the_whole_batch():
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(torch.bfloat16), (torch.zeros(4, 8, dtype=torch.bfloat16),)
    solution, graph = right_plan(model, inputs, fast_mesh((1,)), training=True), capture(model, inputs, training=True)
    for device in ("cpu", "cuda"):
        program = lower(graph, solution.layouts, solution.results, solution.mesh, device=device)
        assert trace(program, graph, Groups(("fake",), (1,)), (0,), device).backward is not None


# -- autocast


def on_cuda(m, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return m.a(x)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_of_a_gpu_is_captured_on_a_machine_without_one():
    model, inputs = Model(on_cuda, a=nn.Linear(16, 16)), (torch.randn(8, 16),)
    graph = capture(model, inputs, training=True)
    assert [op.output.dtype for op in graph.ops if "addmm" in op.target] == ["bfloat16"]
    right_plan(model, inputs, fast_mesh((4,)), training=True, random=2)


def inside_autocast(rank: int, solution) -> None:
    module = parallel(nn.Linear(4, 4), solution)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(torch.ones(2, 4))


def test_a_parallel_module_is_not_called_inside_autocast():
    solution = autoshard.plan(nn.Linear(4, 4), (torch.ones(2, 4),), fast_mesh((1,)), baselines=False, objective="serial")
    (error,) = run_ranks(1, inside_autocast, solution)
    assert isinstance(error, ValueError) and "under torch.autocast" in str(error)

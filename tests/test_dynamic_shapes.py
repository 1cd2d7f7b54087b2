"""One plan for ranges of batch and sequence: sizes of every point, the criterion against brute force, what is covered, and runs."""

import importlib
import itertools
import json
import math
import random
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard import api
from autoshard.capture import capture
from autoshard.formulate import formulate, with_pins
from autoshard.graph import Range, SizedGraph, corners, grid
from autoshard.lower import lower
from autoshard.options.kinds import DIMS
from autoshard.planning import Options, allowed_by_pins, choice_of
from autoshard.planning.dynamic import CRITERIA
from autoshard.problem import evaluate
from autoshard.solution import DynamicShapes, from_text, replay, to_text
from autoshard.strategies import candidates, common_candidates
from models import bert, gpt2, llama, mlp, moe
from tests.helpers import fast_mesh
from tests.helpers_command import record_of
from tests.helpers_command import run as run_words
from tests.helpers_models import Model, full, gradients_of, parallel, said
from tests.helpers_options import ROOT
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused

BATCH, SEQ = Dim("batch", min=1, max=16), Dim("seq", min=4, max=32)
RANGES = {"batch": Range(1, 16), "seq": Range(4, 32)}
SHAPES = [(2, 4), (4, 8), (8, 4), (6, 12), (16, 32), (12, 20)]


class Tagger(nn.Module):
    """Tokens and positions through an MLP, to logits of 8 classes and their loss."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.down(self.up(x).relu())
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger()


def batch_of(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 8, (2, batch, seq), generator=torch.Generator().manual_seed(100 * batch + seq))
    return drawn[0], drawn[1]


@cache
def planned(criterion: str = "average", pins: tuple = (), dynamic: bool = True, batch=BATCH, training: bool = False):
    options = {"dynamic_shapes": ({0: batch, 1: SEQ},) * (1 + training), "criterion": criterion} if dynamic else {"objective": "serial"}
    inputs = batch_of(8, 8)[: 1 + training]
    return autoshard.plan(tagger(), inputs, fast_mesh((2,)), training=training, baselines=False, pins=dict(pins), **options)


# -- the graph at every point --------------------------------------------------------------------------------------------------------

LIBRARIES = [
    pytest.param(library, training, marks=[] if (library, training) == (gpt2, False) else pytest.mark.slow)
    for library in (gpt2, llama, bert, moe) for training in (True, False)
]  # fmt: skip


@pytest.mark.parametrize(("library", "training"), LIBRARIES)
def test_sizes_follow_from_the_ends(library, training):
    def captured(at):
        return capture(*library.tiny(batch=at["batch"], seq=at["seq"], loss=training, layers=1), training=training)

    # a mixture's capacity is a whole share of every 16 tokens, and the rows of one sequence need no copy
    least, seqs, sizes = (2, Range(16, 64, 16), (32, 48)) if library is moe else (1, Range(8, 64), (24, 17))
    sized = SizedGraph.of({"batch": Range(least, 16), "seq": seqs}, captured)
    for batch, seq in zip((3, 8), sizes):
        at = {"batch": batch, "seq": seq}
        assert sized.at(at).fingerprint() == captured(at).fingerprint()
    wrong, at = SizedGraph(sized.ranges, (*sized.graphs[:-1], sized.graphs[0])), {"batch": 16, "seq": 64}  # planted: another's sizes
    assert wrong.at(at).fingerprint() != captured(at).fingerprint() == sized.at(at).fingerprint()


UNLIKE = {
    "isn't linear in batch and in seq": lambda self, x: (x @ x.transpose(1, 2)).flatten(1).narrow(1, 0, x.shape[1] ** 2).sum(),
    "is another program than at batch=1, seq=4: relu": lambda self, x: self.a(x.relu() if x.shape[1] > 20 else x.sin()).sum(),
    "has other arguments": lambda self, x: self.a(x / math.sqrt(x.shape[1])).sum(),
}


@pytest.mark.parametrize(("sentence", "function"), UNLIKE.items(), ids=list(UNLIKE))
def test_a_model_that_is_another_program_in_another_size_is_refused(sentence, function):
    model, inputs = Model(function, a=nn.Linear(16, 16)), (torch.zeros(8, 8, 16),)
    assert_refused(sentence, autoshard.plan, model, inputs, fast_mesh((2,)), dynamic_shapes=({0: BATCH, 1: SEQ},))


@pytest.mark.parametrize("one", [Range(1, 64), Range(128, 8192), Range(8, 64, 8), Range(3, 3), Range(5, 7), Range(1, 1000)])
def test_planned_sizes_are_ends_and_sizes_between(one):
    sizes = one.sizes()
    assert sizes == sorted(set(sizes)) and sizes[0] == one.least and sizes[-1] == one.greatest
    assert all(map(one.holds, sizes)) and (len(sizes) > 2 or one.greatest - one.least < 2 * math.gcd(one.least, one.greatest))


# -- the criterion -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_plan_is_the_best_of_all_layouts_by_its_criterion(criterion):
    linear, mesh = nn.Linear(8192, 8192, bias=False, device="meta"), fast_mesh((2,), device="h100", intra_node_bandwidth=2e9)
    model, shapes = Model(lambda self, x: self.a(x).relu(), a=linear), ({0: Dim("batch", min=256, max=65536)},)
    inputs = lambda batch: (torch.empty(batch, 8192, device="meta"),)  # noqa: E731
    pins = {"a.weight": "S(1)"}  # small batches add up partial sums, large ones gather the weight
    plan = autoshard.plan(model, inputs(256), mesh, dynamic_shapes=shapes, criterion=criterion, baselines=False, gap=1e-9, pins=pins)
    points = grid({"batch": Range(256, 65536)})
    graphs = [capture(model, inputs(at["batch"]), training=False) for at in points]
    formulated = [formulate(graph, common_candidates(graphs, mesh), mesh) for graph in graphs]
    problems = [with_pins(one, allowed_by_pins(one, Options(pins=pins))) for one in formulated]
    choices = itertools.product(*(range(len(costs)) for costs in problems[0].node_costs))
    costs = [[evaluate(problem, choice).cost for problem in problems] for choice in choices]
    best = [min(of) for of in zip(*costs, strict=True)]
    ratios = [CRITERIA[criterion][0]([cost / b for cost, b in zip(of, best, strict=True)], best) for of in costs]
    found = plan.dynamic_shapes
    assert found is not None and [row["bound_seconds"] for row in found.points] == pytest.approx(best)
    assert found.bound_ratio <= min(ratios) * (1 + 1e-9) <= found.ratio * (1 + 1e-8)
    assert found.ratio == pytest.approx(min(ratios), rel=1e-9 if criterion == "average" else 0.02)
    assert min(ratios) > 1.001 or criterion != "worst"  # else every plan would do


# -- what is covered -----------------------------------------------------------------------------------------------------------------


def test_covers_is_true_where_every_layout_divides():
    plan, divided = planned(criterion="median"), 0
    sized = SizedGraph.of(RANGES, lambda at: capture(tagger(), batch_of(at["batch"], at["seq"])[:1], training=False))

    def divides(at) -> bool:
        program = lower(replay(plan, sized.at(at)).graph, plan.layouts, plan.results, plan.mesh)
        return program.is_even

    for batch, seq in random.Random(0).sample(list(itertools.product(range(1, 17), range(4, 33))), 25):
        at, coverage = {"batch": batch, "seq": seq}, plan.covers(batch=batch, seq=seq)
        if coverage:
            divided += 1
            assert coverage.padded == at and divides(at)
        else:
            with pytest.raises((ValueError, AssertionError)):
                assert divides(at)
            assert plan.covers(**coverage.padded) and all(coverage.padded[name] >= n for name, n in at.items())
        assert 0 <= coverage.gain < 1 and math.isfinite(coverage.seconds)
    assert 0 < divided <= 25


def test_the_seconds_of_a_planned_point_are_those_of_the_layouts_there():
    plan = planned(criterion="median")
    for row in plan.dynamic_shapes.points:
        at, to = row["sizes"], row["padded"]
        graph = capture(tagger(), batch_of(to["batch"], to["seq"])[:1], training=False)
        formulated = formulate(graph, candidates(graph, plan.mesh), plan.mesh)
        assert evaluate(formulated.problem, choice_of(formulated, plan)).cost == pytest.approx(row["seconds"])
        assert plan.covers(**to) and plan.covers(**at).seconds == pytest.approx(row["seconds"])
        assert plan.covers(**at).bound == pytest.approx(row["bound_seconds"]) and row["bound_seconds"] <= row["seconds"]
        assert replay(plan, graph).misfits == ()


def test_shapes_beyond_the_ranges_are_not_covered():
    plan = planned()
    assert "batch is 17, planned were 1 to 16" in plan.covers(batch=17, seq=8).reason and not plan.covers(batch=17, seq=8).padded
    assert not plan.covers(batch=8, seq=2) and plan.covers(batch=8, seq=2).padded["seq"] >= 4
    assert_refused("the sizes are of batch; the plan's dims are batch, seq", plan.covers, batch=8)
    assert_refused("the plan is for one shape", planned(dynamic=False).covers, batch=8, seq=8)


def test_what_ranges_cover_is_what_all_their_shapes_say():
    ranges = {"a": Range(2, 12, 2), "b": Range(1, 6)}
    points = [
        {"sizes": at, "padded": at, "seconds": 3e-3 * at["a"] ** 0.5 * at["b"] ** 2, "bound_seconds": 1e-3 * at["a"] * at["b"]}
        for at in ({"a": a, "b": b} for a, b in itertools.product((2, 12), (1, 3, 6)))
    ]  # fmt: skip
    sharded = ((tuple(at["a"] * at["b"] for at in corners(ranges)), 4), (tuple(at["a"] for at in corners(ranges)), 2))
    data = {"points": points, "sharded": sharded, "criterion": "worst", "ratio": 1.25, "bound_ratio": 1.0}
    shapes = DynamicShapes.from_dict({**data, "ranges": {k: tuple(r) for k, r in ranges.items()}, "inputs": {"x": ["a", None, "b"]}})
    assert str(shapes) == "a 2 to 12, b 1 to 6; 1.25 times the seconds of the best plans, worst of 6 shapes"
    covered = {(a, b) for a, b in itertools.product(range(2, 13), range(1, 7)) if a * b % 4 == 0 and a % 2 == 0}
    for a, b in itertools.product(range(1, 14), range(1, 8)):
        one, is_within = shapes.covers({"a": a, "b": b}), 2 <= a <= 12 and b <= 6
        assert bool(one) == ((a, b) in covered) and one.bound == pytest.approx(1e-3 * a * b if is_within else 0.0)
        assert ("planned were" in one.reason) == (not is_within) and ("rows at" in one.reason) == (is_within and not one)
        larger = {(c, d) for c, d in covered if c >= a and d >= b}
        assert bool(one.padded) == bool(larger)
        if one.padded:
            c, d = one.padded.values()
            assert (c, d) in larger and not any((e, d) in larger for e in range(a, c)) and not any((c, e) in larger for e in range(b, d))
            assert one.seconds == pytest.approx(3e-3 * c**0.5 * d**2)
            assert one.gain == pytest.approx(max(0.0, 1 - one.bound / one.seconds))
            assert shapes.padded({"x": (a, 5, b)}) == {"x": (c, 5, d)}
        else:
            assert one.seconds == math.inf
            assert_refused("covers no shape to which", shapes.padded, {"x": (a, 5, b)})


def test_a_multiple_of_a_dim_lets_layouts_divide_it():
    plan = planned(pins=(("input_0", "S(0)"),), batch=2 * Dim("batch", min=1, max=8))
    assert plan.layouts["input_0"].outputs == ("S(0)",) and plan.covers(batch=6, seq=8) and plan.covers(batch=5, seq=8).padded["batch"] == 6
    assert not plan.covers(batch=5, seq=8)


def test_files_keep_what_is_known_of_the_ranges():
    plan = planned()
    again = from_text(to_text(plan), "plan.json")
    assert again == plan and again.dynamic_shapes == plan.dynamic_shapes and again.covers(batch=2, seq=5) == plan.covers(batch=2, seq=5)
    data = plan.dynamic_shapes.to_dict()
    broken = [{}, {**data, "points": []}, {**data, "ranges": {"x": [1, 2, 1]}}, {**data, "sharded": [[[1], 2]]}, {**data, "inputs": [1]}]
    for wrong in broken:
        assert_refused("dynamic_shapes can't be read", DynamicShapes.from_dict, wrong)
    assert len(corners(RANGES)) == len(data["sharded"][0][0])


ENTRY = {0: BATCH, 1: SEQ}
WRONG = {
    "expected one entry per input": 3,
    "dynamic_shapes has nonsense; the model's inputs are input_0, input_1": {"nonsense": ENTRY},
    "dynamic_shapes has 3; the model's inputs are": (ENTRY, ENTRY, ENTRY),
    "dynamic_shapes has dim 7 of input_0, which has 2 dims": ({7: BATCH}, ENTRY),
    "expected a torch.export.Dim with min and max": ({0: Dim("batch")}, ENTRY),
    "dim 0 of input_1 is 8; expected a torch.export.Dim": (ENTRY, {0: 8}),
    "expected a torch.export.Dim, or a multiple of one": ({0: 2 * BATCH + 1}, ENTRY),
    r"batch from \d+ to \d+ in steps of 2, another dim from \d+ to \d+ in steps of 1; expected one": ({0: BATCH}, {0: 2 * BATCH}),
    "batch is 8 in the example inputs; expected a size from 9 to 16": ({0: Dim("batch", min=9, max=16)},),
    "expected batch as dim 1, the same in all inputs, 8": ({0: BATCH}, {1: BATCH}),
    "dynamic_shapes has no dim": ({}, None),
}


@pytest.mark.parametrize(("sentence", "given"), WRONG.items(), ids=list(WRONG))
def test_wrong_dims_are_refused_by_name(sentence, given):
    model, inputs = Model(lambda self, x, y: self.a(x) + y.sum(), a=nn.Linear(8, 8)), (torch.zeros(8, 8), torch.zeros(8, 6))
    assert_refused(sentence, autoshard.plan, model, inputs, fast_mesh((2,)), dynamic_shapes=given)


OPTIONS = {
    "criterion is 'best'; expected one of median, average, worst": {"criterion": "best"},
    "objective is 'overlapped'; with dynamic_shapes": {"objective": "overlapped"},
    "sequence_order is 'head_tail'": {"sequence_order": "head_tail"},
    "a number of blocks to recompute": {"recompute": "auto", "training": True},
    "microbatches instead of global_batch": {"global_batch": 16, "training": True},
    r"at batch=\d+, seq=\d+: ": {"memory_limit": 1e4},
}


@pytest.mark.parametrize(("sentence", "options"), OPTIONS.items(), ids=list(OPTIONS))
def test_options_that_ranges_can_not_have_are_refused(sentence, options):
    model, shapes = Model(lambda self, x: self.a(x).sin(), a=nn.Linear(8, 8)), ({0: BATCH, 1: SEQ},)
    assert_refused(sentence, autoshard.plan, model, (torch.zeros(8, 8, 8),), fast_mesh((2,)), dynamic_shapes=shapes, **options)


@pytest.mark.slow
def test_names_of_arguments_and_options_of_a_step_work():
    shapes = {"tokens": (BATCH, SEQ), "targets": {0: BATCH, 1: SEQ}}
    plan = autoshard.plan(
        tagger(), batch_of(8, 8), fast_mesh((2,)), training=True, baselines=False, dynamic_shapes=shapes, microbatches=2, precision="bf16"
    )
    assert plan.dynamic_shapes.inputs == {"input_0": ("batch", "seq"), "input_1": ("batch", "seq")} and plan.microbatches == 2


def test_a_plan_for_ranges_is_exported_as_others_are():
    module, inputs = mlp.tiny(layers=1)
    plan = autoshard.plan(module, inputs, fast_mesh((2,)), dynamic_shapes=({0: Dim("batch", min=4, max=16)},) * 2)
    for form in ("tp_plan", "fully_shard"):
        assert autoshard.export(plan, form, within=9.0).cost_seconds < 10 * plan.cost


# -- the pass and the command line ------------------------------------------------------------------------------------------------------

ENDS = {0: Dim("batch", min=2, max=16), 1: Dim("seq", min=4, max=32)}
LINKS = {"mesh_shape": (2,), "intra_node_bandwidth": 1e14, "device": "cpu", "objective": "serial"}


class Reshaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).reshape(x.shape[0], -1)


def symbolic(module: nn.Module, inputs: tuple) -> torch.fx.GraphModule:
    names, held = zip(*module.named_parameters())

    def function(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    return make_fx(function, tracing_mode="symbolic")(*inputs, *held)


FORMS = {
    "module": lambda module, inputs: (module, inputs),
    "symbolic_trace": lambda module, inputs: (torch.fx.symbolic_trace(module), inputs),
    "make_fx": lambda module, inputs: (symbolic(module, inputs), (*inputs, *module.parameters())),
    "export": lambda module, inputs: (torch.export.export(module, inputs, dynamic_shapes=(ENDS,)), inputs),
    "export, its own inputs": lambda module, inputs: (torch.export.export(module, inputs, dynamic_shapes=(ENDS,)), None),
}


@cache
def planned_as_a_module(mesh: autoshard.Mesh):
    return autoshard.plan(Reshaping(), (torch.zeros(8, 16, 64),), mesh, dynamic_shapes=(ENDS,), baselines=False)


@pytest.mark.parametrize("form", FORMS)
def test_the_pass_plans_ranges_of_every_form_of_graph(form):
    given, examples = FORMS[form](Reshaping(), (torch.zeros(8, 16, 64),))
    graph, info = autoshard.autosharding_pass(given, example_inputs=examples, dynamic_shapes={"input_0": ENDS}, **LINKS)
    plan = planned_as_a_module(info["solution"].mesh)
    found, expected = info["solution"].dynamic_shapes, plan.dynamic_shapes
    assert found is not None and expected is not None and found.inputs == {"input_0": ("batch", "seq", None)}
    assert found.ratio == pytest.approx(expected.ratio) and info["cost_seconds"] == pytest.approx(plan.cost)
    assert [row["seconds"] for row in found.points] == pytest.approx([row["seconds"] for row in expected.points])
    tensors = [node for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert all("autoshard" in node.meta for node in tensors)


@pytest.mark.parametrize("shape", [(8, 16), (2, 32), (16, 4)])
@pytest.mark.parametrize("form", ["make_fx", "export"])
def test_a_graph_whose_sizes_are_symbols_is_planned_at_the_sizes_of_the_examples(form, shape):
    module, inputs = Reshaping(), (torch.zeros(*shape, 64),)
    given, examples = FORMS[form](module, (torch.zeros(8, 16, 64),))
    _, static = autoshard.autosharding_pass(torch.export.export(module, inputs), **LINKS)
    _, info = autoshard.autosharding_pass(given, example_inputs=(*inputs, *(examples or ())[1:]), **LINKS)
    assert info["cost_seconds"] == pytest.approx(static["cost_seconds"])
    if shape == (8, 16):  # those with which it was traced
        assert autoshard.autosharding_pass(given, **LINKS)[1]["cost_seconds"] == info["cost_seconds"]


def test_what_the_pass_can_not_plan_over_ranges_is_refused():
    module, inputs = Reshaping(), (torch.zeros(8, 16, 64),)
    exported, ranges = torch.export.export(module, inputs), {"dynamic_shapes": (ENDS,), **LINKS}
    dynamic, _ = FORMS["export"](module, inputs)
    assert_refused("has batch=8, seq=16 whatever its inputs have; export it", autoshard.autosharding_pass, exported, **ranges)
    assert_refused("a cache and an algo are of one shape", autoshard.autosharding_pass, dynamic, cache="memory://x", **ranges)
    assert_refused("a cache and an algo are of one shape", autoshard.autosharding_pass, dynamic, algo="fsdp", **ranges)
    for wrong in (torch.zeros(8, 16, 65), torch.zeros(8, 64), 3):
        call = partial(autoshard.autosharding_pass, dynamic, example_inputs=(wrong,), **LINKS)
        assert_refused("for input_0; expected a tensor of the shape", call)


TYPED = {
    "input_*=batch:1-64,seq:128-8192": {"input_*": {0: ("batch", 1, 64, 1), 1: ("seq", 128, 8192, 1)}},
    "tokens=,8*seq:1-4": {"tokens": {1: ("seq", 1, 4, 8)}},
}
MISTYPED = {
    "batch:1-64": "is not INPUT=DIMS", "x=batch": "is not INPUT=DIMS", "x=": "is not INPUT=DIMS", "x=b:1-64;s:1-2": "is not INPUT=DIMS",
    "x=b:64-1": "expected sizes of 1 or more, the least first", "x=b:0-1": "expected sizes of 1 or more",
    "x=b:2-2": "the greatest above it",
}  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_dims_are_read(typed):
    assert DIMS.read("--dynamic-shapes", [typed]) == TYPED[typed]


@pytest.mark.parametrize("typed", MISTYPED)
def test_mistyped_dims_are_refused(typed):
    assert_refused(MISTYPED[typed], DIMS.read, "--dynamic-shapes", [typed])
    assert_refused("gives 'x' twice", DIMS.read, "--dynamic-shapes", ["x=b:1-2", "x=s:1-2"])


def test_the_command_line_plans_ranges():
    words = ("plan", f"{ROOT}/models/mlp.py:tiny", "--mesh", "2", "--no-baselines", "--dynamic-shapes", "input_*=batch:4-64")
    found = record_of(*words, "--criterion", "worst")
    assert "worst" in json.dumps(found["assumptions"]["dynamic_shapes"]["criterion"])
    code, out, _ = run_words(*words)
    assert code == 0 and "batch 4 to 64; 1 times the seconds of the best plans, median of 3 shapes" in " ".join(out.split())


def test_simulate_and_check_answer_for_every_size_of_the_ranges(tmp_path):
    plan, model = str(tmp_path / "plan.json"), f"{ROOT}/models/mlp.py:tiny"
    record_of("plan", model, "--mesh", "2", "--train", "--no-baselines", "--dynamic-shapes", "input_*=batch:8-64", "--out", plan)
    loaded = autoshard.load(plan)
    simulated = record_of("simulate", plan, model, "--set", "batch=32")
    timeline = api.simulate(*mlp.tiny(batch=32), loaded)
    assert simulated["seconds"] == timeline.seconds and simulated["cost_seconds"] == pytest.approx(loaded.covers(batch=32).seconds)
    assert simulated["plan_peak_bytes"] != loaded.peak_bytes and simulated["seconds"] <= simulated["cost_seconds"] * (1 + 1e-9)
    checked = record_of("check", plan, model, "--set", "batch=32", "--within", "1")
    assert checked["ok"] and checked["cost_seconds"] == pytest.approx(simulated["cost_seconds"])
    beyond = api.check(*mlp.tiny(batch=128), loaded, within=1.0)
    assert beyond.reasons == ("batch is 128, planned were 8 to 64",)
    other = api.check(*mlp.tiny(batch=32, dtype="bfloat16"), loaded, within=1.0)
    assert other.reasons == ("the model's sizes, dtypes or constants differ from when this was planned",)


# -- runs ----------------------------------------------------------------------------------------------------------------------------


def run(rank: int, model: nn.Module, plan, shapes: list, build, pad: dict | None) -> tuple[list, int]:
    """Per shape the largest relative error of the loss and of the gradients, and how often the model was captured."""
    module, captures = importlib.import_module("autoshard.runtime.parallelize"), []
    captured = module.capture_module
    module.capture_module = lambda *args, **options: captures.append(args) or captured(*args, **options)
    try:
        sharded = parallel(model, plan) if pad is None else _padding(model, plan, pad)
        errors = []
        for shape in shapes:
            inputs = build(*shape)
            found, expected = sharded(*sharded.shard_inputs(inputs)), model(*inputs)
            found.backward()
            expected.backward()
            ours, theirs = gradients_of(sharded), gradients_of(model)
            gaps = [float((ours[name] - one).abs().max() / one.abs().max()) for name, one in theirs.items() if one.any()]
            errors.append(max(float(abs(full(found.detach()) - expected.detach())), *gaps))
            sharded.zero_grad()
            model.zero_grad()
        return errors, len(captures)
    finally:
        module.capture_module = captured


def _padding(model: nn.Module, plan, pad: dict) -> nn.Module:
    device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", plan.mesh.shape)
    return autoshard.parallelize(model, plan, device_mesh, pad=pad)


SHARDED = (("input_0", "S(0)"), ("up.weight", "S(0)"))


def test_shapes_run_without_a_capture_per_shape():
    plan = planned(pins=SHARDED, batch=2 * Dim("batch", min=1, max=8), training=True)
    assert all(plan.covers(batch=batch, seq=seq) for batch, seq in SHAPES)
    (errors, captures), (other, none) = results(2, run, tagger(), plan, SHAPES[::2], batch_of, None)
    assert max(errors + other) < 1e-5 and (captures, none) == (5, 0)  # four ends of ranges, a middle; the first rank captures for all


def returned(rank: int, plans: list) -> list:
    """What models that return sizes return for batches of several sizes, as numbers; or the refusal."""
    sizes, squares = (parallel(with_sizes(power), plan) for power, plan in zip((1, 2), plans))
    batches = [torch.ones(n, 8) for n in (2, 5, 16)]
    return [[sizes(sizes.shard_inputs(x))[1:] for x in batches], [said(squares, squares.shard_inputs(x)) for x in batches]]


def with_sizes(power: int) -> nn.Module:
    return Model(lambda m, x: (m.linear(x).sum(), x.shape, (3 * x.numel()) ** power, "rows", True), linear=nn.Linear(8, 4))


def test_a_model_may_return_sizes_of_its_inputs():
    given = {"training": True, "dynamic_shapes": ({0: Dim("batch", min=2, max=16)},), "baselines": False}
    plans = [autoshard.plan(with_sizes(power), (torch.ones(8, 8),), fast_mesh((1,)), **given) for power in (1, 2)]
    ((found, refused),) = results(1, returned, plans)
    assert found == [(torch.Size([n, 8]), 24 * n, "rows", True) for n in (2, 5, 16)]
    assert set(refused) == {"the model's constants, or what it returns, depend on the sizes of its inputs; plan one shape"}


@pytest.mark.slow
def test_without_ranges_each_shape_is_captured():
    (_, captures), _ = results(2, run, tagger(), planned(dynamic=False, training=True), SHAPES[:3], batch_of, None)
    assert captures == 3


@pytest.mark.slow
def test_shapes_that_are_not_covered_are_padded_where_values_are_given():
    plan, shapes = planned("median", SHARDED, batch=2 * Dim("batch", min=1, max=8), training=True), [(3, 5), (1, 4), (8, 8)]
    assert not plan.covers(batch=3, seq=5)
    (errors, _), _ = results(2, run, tagger(), plan, shapes, batch_of, {"input_0": 0, "input_1": -100})
    assert max(errors) < 1e-5
    found = results(2, refused, tagger(), plan, shapes[0])
    assert all("is to be padded to" in one and "say with what" in one for one, _ in found)
    assert all("can't be sharded" in one for _, one in found)


def refused(rank: int, model: nn.Module, plan, shape: tuple[int, int]) -> tuple[str, str]:
    one, other = _padding(model, plan, {"input_0": 0}), parallel(model, plan)
    return said(one.shard_inputs, batch_of(*shape)), said(lambda: other(*other.shard_inputs(batch_of(1, 4))))


@pytest.mark.slow
@pytest.mark.parametrize("library", [gpt2, llama])
def test_bundled_models_run_at_six_shapes(library):
    def build(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randint(0, 128, (2, batch, seq), generator=torch.Generator().manual_seed(batch * seq)))

    module, inputs = library.tiny(batch=8, seq=16)
    shapes = ({0: 8 * Dim("batch", min=1, max=8), 1: Dim("seq", min=16, max=64)},) * 2
    mesh = autoshard.Mesh.from_bandwidths((2, 2), device="cpu")
    plan = autoshard.plan(module, inputs, mesh, training=True, dynamic_shapes=shapes, gap=0.01)
    module = module.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.05) if p.dim() > 1 else p.fill_(1)
    sizes = [(8, 16), (16, 16), (8, 32), (32, 48), (64, 64), (24, 40)]
    found = results(4, partial(run), module, plan, sizes, build, None)
    assert max(max(errors) for errors, _ in found) < 1e-4 and [captures for _, captures in found] == [5, 0, 0, 0]


def test_candidates_that_all_sizes_have_are_those_of_each():
    mesh = fast_mesh((2, 2))
    graphs = [capture(tagger(), batch_of(batch, 8)[:1], training=False) for batch in (1, 2, 8)]
    common, each = common_candidates(graphs, mesh), [candidates(graph, mesh) for graph in graphs]
    for i, of in enumerate(common.of):
        assert set(of) == set.intersection(*(set(one.of[i]) for one in each)) and of

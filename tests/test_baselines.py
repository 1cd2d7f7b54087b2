"""Baselines: what is recognised in a graph, what the pins make of it, and that they leave a plan."""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.baselines import Pin, allowed, baselines, parameter_uses, uses
from autoshard.baselines.schemes import _lone_dims
from autoshard.capture import capture
from autoshard.formulate import Training, formulate, with_pins
from autoshard.graph import Graph
from autoshard.layout import parse, replicated, text
from autoshard.mesh import Mesh
from autoshard.planning import baselining
from autoshard.planning.instance import instance_of
from autoshard.solvers import Status, solve
from autoshard.strategies import Candidate, Candidates, candidates
from models import gpt2
from tests import helpers
from tests.helpers import TINY
from tests.helpers_kept import assert_stays
from tests.helpers_models import Model, asked

tiny_graph = partial(helpers.tiny_graph, layers=2)
MESHES = ((8,), (2, 4), (2, 2, 2))
EVERYWHERE = pytest.mark.parametrize(("model", "shape", "training"), [*product(TINY, MESHES, (False, True))], ids=str)
NAMES = ("data_parallel", "fsdp", "megatron", "megatron_sp")


def found(graph: Graph, shape: tuple[int, ...]):
    """(candidates, {name: baseline}) of a graph on a mesh."""
    mesh = Mesh.from_bandwidths(shape)
    options = candidates(graph, mesh)
    return options, {b.name: b for b in baselines(graph, mesh, options)}


@cache
def found_for(model: str, training: bool, shape: tuple[int, ...]):
    return found(tiny_graph(model, training), shape)


def layouts(graph: Graph, baseline) -> dict[str, str]:
    return {name: text(baseline.pins[name].outputs[0]) for name in graph.parameters}


def moves(graph: Graph, baseline) -> list[tuple[str, str, str, str]]:
    """(producer, reader, given, taken) wherever an op takes a value otherwise than it was produced."""
    moved = []
    for op in graph.ops:
        for a, (producer, k) in enumerate(op.inputs):
            given, taken = baseline.pins[graph.ops[producer].name].outputs[k], baseline.pins[op.name].inputs[a]
            if given != taken:
                moved.append((graph.ops[producer].name, op.name, text(given), text(taken)))
    return moved


def kinds_of_moves(graph: Graph, baseline, axis: int) -> list[str]:
    """Sorted: `P>R` all-reduce, `P>S` reduce-scatter, `S>R` all-gather over one axis; local cuts `R>S` left out."""
    kinds = [given.split(",")[axis][0] + ">" + taken.split(",")[axis][0] for _, _, given, taken in moves(graph, baseline)]
    return sorted(kind for kind in kinds if kind not in ("R>S", "R>R", "S>S", "P>P"))


def test_baselines_stay_what_they_are():
    told = {}
    for model in TENSOR_PARALLEL:
        for name, one in found_for(model, True, (2, 4))[1].items():
            pins = {op: " ".join(str(x and text(x)) for x in (*pin.inputs, *pin.outputs)) for op, pin in one.pins.items()}
            hubs = {f"{i} {k}": text(layout) for (i, k), layout in one.hubs.items()}
            told[f"{model} {name}"] = {"matched": one.matched, **hubs, **pins}
    assert_stays("rooms/baselines.json", told)


# What the tensor parallel axis does to a parameter; all others are whole (../shared/facts/megatron.md). nn.Linear is [out, in].
COLUMN, ROW = "S(0)", "S(1)"
TENSOR_PARALLEL = {
    "gpt2": {"wte.weight": COLUMN, "c_attn.weight": COLUMN, "c_attn.bias": COLUMN, "attn.c_proj.weight": ROW,
             "c_fc.weight": COLUMN, "c_fc.bias": COLUMN, "mlp.c_proj.weight": ROW},
    "llama": {"embed_tokens.weight": COLUMN, "q_proj.weight": COLUMN, "k_proj.weight": COLUMN, "v_proj.weight": COLUMN,
              "o_proj.weight": ROW, "gate_proj.weight": COLUMN, "up_proj.weight": COLUMN, "down_proj.weight": ROW,
              "lm_head.weight": COLUMN},
    "bert": {"tokens.weight": COLUMN, "query.weight": COLUMN, "query.bias": COLUMN, "key.weight": COLUMN, "key.bias": COLUMN,
             "value.weight": COLUMN, "value.bias": COLUMN, "attention.output.weight": ROW, "intermediate.weight": COLUMN,
             "intermediate.bias": COLUMN, "0.output.weight": ROW, "1.output.weight": ROW, "head.bias": COLUMN},
    "mlp": {"up.weight": COLUMN, "up.bias": COLUMN, "down.weight": ROW},
}  # fmt: skip


@EVERYWHERE
def test_megatron_lays_every_parameter_as_the_table_says(model, shape, training):
    graph, schemes = tiny_graph(model, training), found_for(model, training, shape)[1]
    table = dict(TENSOR_PARALLEL[model])
    if model == "llama" and shape == (8,):
        del table["k_proj.weight"], table["v_proj.weight"]  # 4 key-value heads on 8 devices: whole
    for name in ("megatron", "megatron_sp"):
        for parameter, layout in layouts(graph, schemes[name]).items():
            (last,) = {cut for suffix, cut in table.items() if parameter.endswith(suffix)} or {"R"}
            assert layout == ",".join(["R"] * (len(shape) - 1) + [last]), parameter


@EVERYWHERE
def test_every_pin_is_a_candidate_and_every_pinned_problem_has_a_plan(model, shape, training):
    graph = tiny_graph(model, training)
    options, schemes = found_for(model, training, shape)
    assert tuple(schemes) == NAMES
    formulated = formulate(graph, options, Mesh.from_bandwidths(shape), training=Training() if training else None)
    for baseline in schemes.values():
        kept = allowed(baseline.pins, graph, options)
        assert [sum(kept[i]) for i in range(len(graph.ops))] == [1] * len(graph.ops)  # every op is pinned, to one candidate
        answer = solve(with_pins(formulated, kept))
        assert answer.status is Status.OPTIMAL and 0 < answer.cost < 1


@pytest.mark.parametrize(
    ("shape", "training", "more"),
    [((2, 2), True, ("megatron_fsdp", "hsdp")), ((2, 2), False, ()), ((1, 4), True, ())],
    ids=str,
)
def test_a_plan_stands_beside_the_schemes_of_several_axes_where_it_has_these(shape, training, more):
    model, inputs = TINY["llama"](layers=1)
    options = {"training": training, "objective": "serial"}
    rows = autoshard.plan(model, inputs, Mesh.from_bandwidths(shape), **options).baselines
    assert set(rows) == {*NAMES, *more}
    for name in more:
        _, alone = autoshard.autosharding_pass(model, mesh_shape=shape, example_inputs=inputs, algo=name, ilp_solution_file=None, **options)
        assert rows[name]["cost_seconds"] == pytest.approx(alone["cost_seconds"], rel=1e-3)
        assert rows[name]["peak_bytes"] < rows["megatron_sp" if name == "megatron_fsdp" else "data_parallel"]["peak_bytes"]


@EVERYWHERE
def test_data_parallel_moves_nothing_between_ops(model, shape, training):
    graph = tiny_graph(model, training)
    plain = found_for(model, training, shape)[1]["data_parallel"]
    assert set(layouts(graph, plain).values()) == {text(replicated(len(shape)))}
    assert text(plain.pins["input_0"].outputs[0]) == ",".join(["S(0)"] * len(shape))
    assert moves(graph, plain) == []  # only gradients are reduced, on their way to the parameters


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("model", TINY)
def test_fsdp_cuts_every_parameter_over_all_axes_and_only_gathers_parameters(model, shape):
    graph, schemes = tiny_graph(model, True), found_for(model, True, shape)[1]
    everywhere, whole = ",".join(["S(0)"] * len(shape)), text(replicated(len(shape)))
    for parameter, layout in layouts(graph, schemes["fsdp"]).items():
        assert layout == (everywhere if "segments" not in parameter else everywhere.replace("0", "1")), parameter  # 2 segments
    views = set(graph.parameters)
    for op in graph.ops:
        if op.inputs and all(graph.ops[v[0]].name in views for v in op.inputs) and len(op.inputs) == 1:
            views.add(op.name)
    for producer, _, given, taken in moves(graph, schemes["fsdp"]):
        assert producer in views and "S" in given and taken == whole
    computing = {op.name for op in graph.ops if not op.is_placeholder and op.name not in views}
    assert all(schemes["fsdp"].pins[name] == schemes["data_parallel"].pins[name] for name in computing)


def test_fsdp_gathers_a_parameter_and_not_what_a_view_makes_more_of():
    """As torch's matmul of inputs whose tokens are not contiguous has it, and so nn.MultiheadAttention with batch_first."""
    layer, inputs = nn.Linear(64, 64, device="meta"), (torch.empty(32, 16, 64, device="meta"),)
    baseline = autoshard.plan(Model(lambda m, x: m.a(x.transpose(0, 1)), a=layer), inputs, Mesh.from_bandwidths((4,))).baselines["fsdp"]
    assert baseline["peak_bytes"] < 32 * 64 * 64 * 4


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert"])
def test_megatron_reduces_twice_per_layer(model):
    graph, schemes = tiny_graph(model, False), found_for(model, False, (2, 4))[1]
    reduced = [(p, given) for p, _, given, _ in moves(graph, schemes["megatron"]) if given == "S(0),P"]
    assert len(set(reduced)) == 5  # 2 layers: attention and feed-forward each; and the look-up of words
    assert set(kinds_of_moves(graph, schemes["megatron"], 1)) == {"P>R"}
    assert kinds_of_moves(graph, schemes["megatron"], 0) == []


def test_sequence_parallel_turns_each_reduction_into_a_reduce_scatter_and_a_gather():
    graph, schemes = tiny_graph("gpt2", False), found_for("gpt2", False, (2, 4))[1]
    # P>S: 2 per layer and the look-up. S>R: before the 2 column matmuls of each layer and before the head.
    assert kinds_of_moves(graph, schemes["megatron_sp"], 1) == ["P>S"] * 5 + ["S>R"] * 5
    adds = [op.name for op in graph.ops if op.target == "aten.add.Tensor"]
    assert {text(schemes["megatron_sp"].pins[name].outputs[0]) for name in adds} == {"S(0),S(1)"}
    assert {text(schemes["megatron"].pins[name].outputs[0]) for name in adds} == {"S(0),R"}


def test_gradients_of_the_residual_stream_are_summed_before_they_are_reduced():
    graph, schemes = tiny_graph("llama", True), found_for("llama", True, (2, 4))[1]
    backward = {op.name for op in graph.ops if op.backward}
    for name, target in (("megatron", "S(0),R"), ("megatron_sp", "S(0),S(1)")):
        reduced = {(p, taken) for p, _, given, taken in moves(graph, schemes[name]) if p in backward and given == "S(0),P"}
        assert len(reduced) == 5  # 2 layers: behind q, k, v and behind gate, up; and behind the head
        assert {taken for _, taken in reduced} == {target}


def renamed(graph: Graph) -> Graph:
    names = {op.name: f"n{i}" for i, op in enumerate(graph.ops)}
    ops = tuple(replace(op, name=names[op.name], module="") for op in graph.ops)
    return Graph(ops, tuple(replace(r, name=names.get(r.name, r.name)) for r in graph.results))


@pytest.mark.parametrize("model", TINY)
def test_no_name_is_read(model):
    graph, schemes = tiny_graph(model, True), found_for(model, True, (2, 4))[1]
    _, nameless = found(renamed(graph), (2, 4))
    for name in NAMES:
        assert list(nameless[name].pins.values()) == list(schemes[name].pins.values())
        assert nameless[name].matched == schemes[name].matched


RECOGNISED = [
    ("gpt2", (2, 4), "recognised 9 of 9 parameter matmuls (4 column, 4 row, 1 head) for axis 1 of 4, 1 token table"),
    ("bert", (2, 4), "recognised 13 of 14 parameter matmuls (8 column, 4 row, 1 head)"),  # the dense layer of the head is no pair
    ("llama", (2, 4), "recognised 15 of 15 parameter matmuls (10 column, 4 row, 1 head)"),
    ("llama", (8,), "recognised 11 of 15 parameter matmuls (6 column, 4 row, 1 head)"),
    ("llama", (8,), "4 more stay replicated: their heads or features do not divide by 8"),
    ("mlp", (2, 2, 2), "recognised 4 of 4 parameter matmuls (2 column, 2 row) for axis 2 of 2; batch sharded over axes 0,1"),
]


@pytest.mark.parametrize(("model", "shape", "words"), RECOGNISED)
def test_megatron_says_what_it_recognised(model, shape, words):
    assert words in found_for(model, True, shape)[1]["megatron"].matched


def test_what_does_not_divide_stays_whole_and_is_said():
    module, example_inputs = gpt2.build(layers=1, heads=6, width=48, positions=16, vocab=57, batch=12, seq=16, loss=True, dtype="float32")
    graph = capture(module, example_inputs, training=True)
    _, schemes = found(graph, (8, 4))
    assert schemes["data_parallel"].matched == "batch sharded over axis 1 (12 does not divide further: compute is repeated over axis 0)"
    assert schemes["fsdp"].matched.endswith("; 8 of 16 parameters sharded over all axes (the others' dims do not divide)")
    said = schemes["megatron"].matched
    assert "recognised 2 of 5 parameter matmuls (1 column, 1 row)" in said and "2 more stay replicated" in said
    assert "the vocabulary of 57 does not divide by 4: table and head stay replicated" in said
    assert layouts(graph, schemes["megatron"])["wte.weight"] == "R,R"
    assert layouts(graph, schemes["megatron"])["h.0.attn.c_attn.weight"] == "R,R"
    assert layouts(graph, schemes["megatron"])["h.0.mlp.c_fc.weight"] == "R,S(0)"


def square():
    """The output adds to the input: no inner dim."""
    return Model(lambda m, x: x + m.linear(x), linear=nn.Linear(32, 32))


def projected():
    """A residual stream without norms, between two projections: the stream is not an inner dim, the hidden features are."""

    def forward(m, x):
        x = m.first(x)
        for up, down in zip(m.up, m.down, strict=True):
            x = x + down(up(x).relu())
        return m.last(x).sum(1)

    up, down = (nn.ModuleList(nn.Linear(*dims) for _ in range(2)) for dims in ((32, 64), (64, 32)))
    return Model(forward, first=nn.Linear(16, 32), last=nn.Linear(32, 8), up=up, down=down)


def strange():
    """A scalar parameter, primes, inputs of different sizes, ops that nobody cuts."""

    def forward(m, x, y):
        return (torch.topk(x, 3)[0] * m.scale).sum() + m.table.sum(0).sum() + y.sort(0)[0].sum()

    return Model(forward, scale=nn.Parameter(torch.ones(())), table=nn.Parameter(torch.ones(7, 5)))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6 * 6, 8))


def nothing():
    return Model(lambda m, x: x.cumsum(0) * 2)


@pytest.mark.parametrize("shape", [(8,), (2, 4), (1, 8), (1, 1)])
@pytest.mark.parametrize(
    ("module", "sizes", "words"),
    [
        (square, [(16, 32)], "recognised 0 of 1 parameter matmuls"),
        (projected, [(16, 16)], "recognised 4 of 6 parameter matmuls (2 column, 2 row)"),
        (strange, [(9, 8), (4,)], "recognised 0 of 0 parameter matmuls"),
        (convolutions, [(8, 3, 8, 8)], "recognised 1 of 1 parameter matmuls (1 head)"),
        (nothing, [(8, 4)], "recognised 0 of 0 parameter matmuls"),
    ],
)
def test_other_structures_get_plans_too(module, sizes, words, shape):
    with torch.device("meta"):
        graph = capture(module(), tuple(torch.empty(size) for size in sizes), training=False)
    options, schemes = found(graph, shape)
    formulated = formulate(graph, options, Mesh.from_bandwidths(shape))
    for name in NAMES:
        assert solve(with_pins(formulated, allowed(schemes[name].pins, graph, options))).status is Status.OPTIMAL
    assert schemes["megatron"].matched.startswith(words if shape != (1, 1) else "one device")


def test_a_pin_matches_what_it_names_and_leaves_the_rest_open():
    cut, whole = parse("S(0),R"), parse("R,R")
    options = (Candidate(inputs=(cut, whole), outputs=(cut, None)), Candidate(inputs=(whole, whole), outputs=(whole, None)))
    candidates = Candidates((options,), (), 1)

    def kept(pin):
        return allowed({"op": pin}, SimpleNamespace(index={"op": 0}), candidates)[0].tolist()

    assert kept(Pin()) == [True, True]
    assert kept(Pin(outputs=(cut, None))) == [True, False]
    assert kept(Pin(inputs=(None, whole))) == [True, True]
    assert kept(Pin(inputs=(None, cut))) == [False, False]
    assert kept(Pin(outputs=(whole, None), inputs=(cut, whole))) == [False, False]
    assert kept(Pin(outputs=(cut,))) == [False, False]  # of another op
    assert kept(Pin(outputs=(parse("S(0)"), None))) == [False, False]  # of another mesh
    assert kept(Pin(inputs=(parse("P(max),R"), None))) == [False, False]


def test_equal_pins_are_completed_once_for_each_gap(monkeypatch):
    searches = []
    solve = baselining.solve
    monkeypatch.setattr(baselining, "solve", lambda *given, **options: searches.append(options["gap"]) or solve(*given, **options))
    graph, mesh = tiny_graph("mlp", True), Mesh.from_bandwidths((2, 2))
    context = asked(graph, mesh)
    instance = instance_of(context)
    schemes = baselines(graph, mesh, instance.formulated.candidates)
    for scheme in (schemes[0], replace(schemes[0], name="another"), schemes[1]):
        known = baselining.scheme_price(context, instance, scheme)
        assert known == baselining.scheme_price(context, replace(instance), scheme)  # which knows no answers
    assert len(searches) == 2 + 3
    baselining.scheme_price(context, instance, schemes[0], gap=0.01)
    assert searches[-1] == 0.01 and len(searches) == 6


class Lone(nn.Module):
    """Weights as models hold them: (out, in), (in, out), cast before they are turned, turned before they are cast, and a table."""

    def __init__(self):
        super().__init__()
        shapes = {"linear": (6, 10), "conv1d": (6, 10), "cast": (12, 10), "turned": (6, 12), "table": (14, 10)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=torch.float32)))

    def forward(self, tokens):
        x = nn.functional.embedding(tokens, self.table)
        x = nn.functional.linear(x, self.linear) @ self.conv1d
        x = nn.functional.linear(x.half(), self.cast.half())
        return x @ self.turned.t().half()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_weight_without_a_group_is_followed_through_its_views_to_the_op_that_reads_it(dim):
    """By definition: the sharded dim is the one of the weight's size there; all sizes of a weight differ."""
    graph = capture(Lone(), (torch.zeros(3, 4, dtype=torch.int64),), training=False)
    options = candidates(graph, Mesh.from_bandwidths((2,)))
    known = {use.parameter: use for use in parameter_uses(graph, options, 2).uses}
    assert known.keys() == {"linear", "conv1d", "cast", "turned", "table"}
    for name, use in known.items():
        size, reader = graph.tensor(use.trail[0]).shape[dim], graph.ops[use.index]
        expected = [(use.trail[0], dim)] + ([((use.index, 0), len(reader.output.shape) - 1)] if dim == use.kept else [])
        expected += [(value, graph.tensor(value).shape.index(size)) for value in use.trail[1:]]
        assert graph.ops[use.trail[0][0]].name == name and use.trail[-1] in reader.inputs and {use.kept, use.contracted} == {0, 1}
        assert [graph.tensor(use.trail[-1]).shape[d] for d in use.w[1:]] == [
            graph.tensor(use.trail[0]).shape[d] for d in (use.kept, use.contracted)
        ]
        assert _lone_dims(graph, [(use, dim)]) == expected


def test_the_dim_of_a_split_is_where_torchs_schema_has_it():
    for target, position in uses.SPLITS.items():
        _, name, overload = target.split(".")
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        assert schema.arguments[position].name == "dim"

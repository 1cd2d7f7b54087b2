"""Programs of stages: run one after the other with real tensors they are the whole program; layers are the model's blocks."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.graph import Graph, Op, check, replace_refs
from autoshard.lower.literals import overload, torch_constants
from autoshard.pipeline.layers import clustered, layers_of
from autoshard.pipeline.stage_programs import crossing_bytes, second_half, stage_program
from autoshard.solution import RECEIVED, SENT
from models import gpt2, llama, mlp, unet
from tests.helpers_models import Model
from tests.helpers_refusals import assert_refused

MODELS = {
    "mlp": lambda: mlp.tiny(layers=4), "gpt2": lambda: gpt2.tiny(layers=3), "llama": lambda: llama.tiny(layers=3),
    "unet": lambda: unet.tiny(),
}  # fmt: skip


@cache
def graph_of(name: str, training: bool) -> Graph:
    return capture(*MODELS[name](), training=training)


def run_graph(graph: Graph, values: dict) -> dict:
    """Every value of the graph, op by op as torch runs them."""
    env = {}
    for i, op in enumerate(graph.ops):
        if op.is_placeholder:
            env[i, 0] = values[op.name]
            continue
        args, keywords = torch_constants(replace_refs(op.literals, tuple(env[v] for v in op.inputs)), "cpu")
        out = overload(op.target)(*args, **dict(keywords))
        for k, one in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            env[i, k] = one
    return env


def random_values(graph: Graph) -> dict:
    generator = torch.Generator().manual_seed(0)

    def one(op: Op) -> torch.Tensor:
        shape, dtype = op.output.shape, getattr(torch, op.output.dtype)
        if not dtype.is_floating_point:
            return torch.randint(0, 100, shape, generator=generator)
        return 0.1 * torch.randn(shape, dtype=dtype, generator=generator)

    return {op.name: one(op) for op in graph.ops if op.is_placeholder}


def results_of(graph: Graph, env: dict) -> list:
    return [((r.kind, r.name), env[r.value]) for r in graph.results if r.value is not None]


def crossing(graph: Graph, env: dict, prefix: str) -> dict[str, torch.Tensor]:
    """Every value by the name that it has where it crosses between stages."""
    return {f"{prefix}{graph.ops[i].name}" + (f".{k}" if k else ""): x for (i, k), x in env.items()}


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference, relative to the largest number (float32, sums in another order)."""
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["mlp", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "unet"))])
def test_stages_run_one_after_the_other_are_the_whole_step(name, recomputed):
    graph = graph_of(name, True)
    layers = layers_of(graph)
    values = random_values(graph)
    env = run_graph(graph, values)
    expected = dict(results_of(graph, env))
    half = layers.count // 2
    for cuts in ([0, 1, layers.count], [0, half, layers.count], list(range(layers.count + 1))):
        found: dict = {}
        for first, last in zip(cuts, cuts[1:]):
            stage = stage_program(layers, first, last)
            stage = stage.recomputed() if recomputed else stage
            mine = run_graph(check(stage.graph), {**values, **crossing(graph, env, RECEIVED)})
            sent = crossing(graph, env, SENT)
            for (kind, key), x in results_of(stage.graph, mine):
                if key in sent:
                    assert far(x, sent[key]) < 1e-5
                else:  # a shared parameter's gradient is the sum over stages
                    found[kind, key] = found[kind, key] + x if (kind, key) in found else x
        assert found.keys() == expected.keys()
        for key, x in expected.items():
            assert far(found[key], x) < 1e-5


def residual_linears() -> tuple[Model, tuple]:
    def forward(m, x):
        for linear in m.linears:
            x = x + linear(x)
        return x.square().mean()

    return Model(forward, linears=nn.ModuleList(nn.Linear(6, 6) for _ in range(5))), (torch.randn(8, 6),)


def residual_matmuls() -> tuple[Model, tuple]:
    def forward(m, x):
        for weight in m.weights:
            x = x + x @ weight
        return x.square().mean()

    return Model(forward, weights=nn.ParameterList(torch.randn(6, 6) for _ in range(5))), (torch.randn(8, 6),)


def chunks() -> tuple[Model, tuple]:
    """Both halves of a product are read in other layers, through a view with two outputs."""

    def forward(m, x):
        a, b = m.both(x).chunk(2, -1)
        for linear in m.linears:
            a = torch.tanh(linear(a))
        return (a * b).square().mean()

    return Model(forward, both=nn.Linear(6, 12), linears=nn.ModuleList(nn.Linear(6, 6) for _ in range(3))), (torch.randn(8, 6),)


def rows_of_a_buffer() -> tuple[Model, tuple]:
    """Nothing but the transposed weight of the first layer is before the place that the fewest bytes cross."""

    def forward(m, x):
        for k, linear in enumerate(m.linears):
            x = x + linear(x) * 0.3 + m.rows[k]
        return x.square().mean()

    return Model(forward, linears=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), rows=torch.randn(4, 6)), (torch.randn(8, 6),)


@pytest.mark.parametrize("build, least", [(residual_linears, 5), (residual_matmuls, 6), (chunks, 3), (rows_of_a_buffer, 4)])
def test_every_layer_has_its_own_parameters_and_gets_what_it_reads(build, least):
    layers = layers_of(capture(*build(), training=True))
    assert layers.count >= least
    stages = [stage_program(layers, v, v + 1).graph for v in range(layers.count)]
    for graph in stages:
        gradients = {result.name for result in graph.results if result.kind == "gradient"}
        assert {op.name for op in graph.ops if op.kind == "parameter"} <= gradients  # else a copy would stay as it is
    sent = {result.name.removeprefix(SENT) for graph in stages for result in graph.results}
    assert {op.name.removeprefix(RECEIVED) for graph in stages for op in graph.ops if op.name.startswith(RECEIVED)} <= sent


def test_what_is_written_into_a_buffer_is_written_where_it_is_read():
    """One batch norm after each of three layers: its running means are read in the first, written in the third."""

    def forward(m, x):
        m.mean.copy_(torch.ones(6))  # computed by no layer
        for k, linear in enumerate(m.linears):
            x = x + (m.norm(linear(x)) if k < 3 else linear(x))
        return (x - m.mean).square().mean()

    model = Model(forward, linears=nn.ModuleList(nn.Linear(6, 6) for _ in range(7)), norm=nn.BatchNorm1d(6), mean=torch.zeros(6))
    layers = layers_of(capture(model, (torch.randn(8, 6),), training=True))
    assert layers.count >= 3
    for graph in (stage_program(layers, v, v + 1).graph for v in range(layers.count)):
        written = {result.name for result in graph.results if result.kind == "buffer"}
        assert written <= {op.name for op in graph.ops if op.kind == "buffer"}


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_halved_stage_computes_the_same_and_sends_before_it_computes_gradients_of_parameters(recomputed):
    layers = layers_of(graph_of("mlp", True))
    for v in range(layers.count):
        plain, halved = (stage_program(layers, v, v + 1, recompute=recomputed, halved=halved).graph for halved in (False, True))
        late, values = second_half(halved), random_values(plain)
        assert late == list(range(len(halved.ops) - len(late), len(halved.ops))) and late
        sent = [r.value[0] for r in halved.results if r.name.startswith(SENT)]
        assert not {*sent} & {*late} and {op.name for op in halved.ops} == {op.name for op in plain.ops}
        both = [dict(results_of(graph, run_graph(check(graph), values))) for graph in (plain, halved)]
        assert all(torch.equal(x, both[1][key]) for key, x in both[0].items())
        assert (len(late) == sum(op.backward for op in halved.ops)) is (v == 0)  # the first stage sends nothing back


def test_a_stage_that_loses_an_input_is_noticed():
    """The negative control of the test above: a received value changed, and what is sent changes with it."""
    graph = graph_of("mlp", True)
    layers = layers_of(graph)
    values = random_values(graph)
    env = run_graph(graph, values)
    stage = stage_program(layers, 1, 3)
    given, sent = {**values, **crossing(graph, env, RECEIVED)}, crossing(graph, env, SENT)
    first = next(op.name for op in stage.graph.ops if op.name.startswith(RECEIVED))
    mine = run_graph(stage.graph, {**given, first: given[first] + 1})
    assert any(not torch.allclose(x, sent[key]) for (_, key), x in results_of(stage.graph, mine) if key in sent)


@pytest.mark.parametrize(("name", "blocks"), [("mlp", 4), ("gpt2", 3), pytest.param("llama", 3, marks=pytest.mark.slow)])
def test_layers_are_the_repeated_blocks_and_a_heavy_head(name, blocks):
    layers = layers_of(graph_of(name, True))
    assert blocks <= layers.count <= blocks + 1  # what follows the last block is a layer where it computes as much
    inner = layers.flops[1 : blocks - 1]
    assert max(inner) == pytest.approx(min(inner))


def test_equal_layers_have_equal_signatures():
    layers = layers_of(graph_of("mlp", True))
    inner = {stage_program(layers, k, k + 1).signature for k in range(1, layers.count - 1)}
    assert len(inner) == 1 and stage_program(layers, 0, 1).signature not in inner


def test_one_activation_crosses_between_blocks_and_its_gradient_back():
    graph = graph_of("mlp", True)
    forward, backward = crossing_bytes(layers_of(graph))
    bytes_of_x = graph.ops[graph.index["input_0"]].output.bytes  # a block gives what it takes
    assert set(forward[1:-1]) == set(backward[1:-1]) == {bytes_of_x}
    assert forward[0] == forward[-1] == 0


def test_a_tied_table_belongs_to_both_ends():
    layers = layers_of(graph_of("gpt2", True))
    assert set(layers.shared) == {"wte.weight"} and layers.shared["wte.weight"][0] == 0
    ends = [stage_program(layers, 0, 1), stage_program(layers, layers.count - 1, layers.count)]
    assert all("wte.weight" in {r.name for r in end.graph.results if r.kind == "gradient"} for end in ends)


@pytest.mark.parametrize("seed", range(12))
def test_clusters_have_the_least_largest_cut_of_all_that_are_even_enough(seed):
    rng = np.random.default_rng(seed)
    n, count = 8, int(rng.integers(2, 5))
    flops, crossing = rng.uniform(1, 4, n), [0.0, *rng.integers(1, 9, n - 1).astype(float), 0.0]
    cuts = clustered(list(flops), crossing, range(1, n), count, eps=1.0)
    mean = flops.sum() / count

    def largest(cuts):
        ends = [0, *cuts, n]
        even = all(flops[a:b].sum() <= 2.0 * mean for a, b in zip(ends, ends[1:]))
        return max((crossing[c] for c in cuts), default=0.0) if even else np.inf

    best = min(largest(list(some)) for some in combinations(range(1, n), count - 1))
    assert len(cuts) == count - 1 and (largest(cuts) == best or best == np.inf)


def test_there_are_no_such_layers():
    layers = layers_of(graph_of("mlp", True))
    assert_refused("expected 0 <= first < last", stage_program, layers, 2, 2)
    assert_refused("layers is 0", layers_of, graph_of("mlp", True), 0)

"""A shallow graph tiled to a deeper model's depth is the graph that a capture of the deeper model gives, node for node."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from autoshard.capture import capture
from autoshard.graph import Graph, Op, Result, Tensor, check, forward_blocks, repeated_blocks, tile
from models import bert, gpt2, llama
from tests.helpers_refusals import assert_refused

CONTAINERS = {"gpt2": "h", "llama": "layers", "bert": "layers", "mixtral": "model.layers", "t5": ""}
TOKENS = torch.empty(2, 8, dtype=torch.int64, device="meta")


def mixtral(layers: int, loss: bool):
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"  # a loop over the experts can't be captured
    with torch.device("meta"):
        module = transformers.MixtralForCausalLM(config)
    return module, {"input_ids": TOKENS, "position_ids": TOKENS[:1]} | ({"labels": TOKENS} if loss else {})


def t5(layers: tuple[int, int], loss: bool):
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=layers[0], num_decoder_layers=layers[1], num_heads=4, use_cache=False
    )
    with torch.device("meta"):
        module = transformers.T5ForConditionalGeneration(config).eval()
    return module, {"input_ids": TOKENS, "decoder_input_ids": TOKENS} | ({"labels": TOKENS} if loss else {})


@cache
def captured(model: str, layers, training: bool) -> Graph:
    if model in ("mixtral", "t5"):
        module, example_inputs = {"mixtral": mixtral, "t5": t5}[model](layers, training)
    else:
        module, example_inputs = {"gpt2": gpt2, "llama": llama, "bert": bert}[model].tiny(layers=layers, loss=training)
    return capture(module, example_inputs, training=training)


MODES = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


@MODES
@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("gpt2", 5),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name in ("llama", "bert", "mixtral") for n in (5, 12)),
        pytest.param("gpt2", 12, marks=pytest.mark.slow),
    ],
)
def test_three_layers_tiled_are_the_captured_deeper_graph(model, layers, training):
    tiled = tile(captured(model, 3, training), layers - 3, container=CONTAINERS[model])
    assert tiled.ops == captured(model, layers, training).ops  # names, targets, wiring, literals, shapes, kinds, modules, aliases
    assert tiled == captured(model, layers, training)


@MODES
@pytest.mark.parametrize("model", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "mixtral"))])
def test_a_layer_less_is_the_captured_shallower_graph(model, training):
    graph = captured(model, 4, training)
    less = tile(graph, -1, container=CONTAINERS[model])
    assert less == captured(model, 3, training)
    assert tile(less, 1, container=CONTAINERS[model]) == graph


@pytest.mark.slow
@MODES
def test_an_encoder_and_a_decoder_are_tiled_one_after_the_other(training):
    tiled = tile(tile(captured("t5", (4, 5), training), 2, container="encoder.block"), 1, container="decoder.block")
    assert tiled == captured("t5", (6, 6), training)


def test_tiling_by_steps_is_tiling_at_once():
    graph = captured("llama", 3, True)
    assert tile(tile(graph, 2, container="layers"), 7, container="layers") == tile(graph, 9, container="layers")
    assert tile(graph, 0, container="layers") is graph


def test_cost_grows_by_the_same_ops_per_layer():
    graph = captured("gpt2", 3, True)
    counts = [len(tile(graph, times, container="h").ops) for times in (0, 1, 2, 93)]
    period = counts[1] - counts[0]
    assert period == 94  # 12 parameters, 29 ops forward, 53 backward
    assert counts == [counts[0] + times * period for times in (0, 1, 2, 93)]


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert"])
def test_two_layers_are_too_few(model):
    assert_refused("too few|no place", tile, captured(model, 2, True), 1, container=CONTAINERS[model])


def test_what_is_no_container_is_refused():
    graph = captured("gpt2", 3, True)
    assert_refused("parameters of ln_f don't repeat", tile, graph, 1, container="ln_f")
    assert_refused("times is -2", tile, graph, -2, container="h")
    assert_refused("tied", tile, replace(graph, tied=(("h.1.ln_1.weight", "h.0.ln_1.weight"),)), 1, container="h")


FLOAT = Tensor((4,), "float32")


def chain(*names: str) -> Graph:
    ops = [Op(names[0], "input", (), (), (FLOAT,), "input")]
    ops += [Op(name, "aten.neg.default", ((i, 0),), (), (FLOAT,)) for i, name in enumerate(names[1:])]
    return Graph(tuple(ops), (Result("output", "0", (len(ops) - 1, 0)),))


def test_check_finds_a_read_of_what_comes_later_a_name_taken_twice_and_a_result_of_nothing():
    good = chain("x", "neg", "neg_1")
    assert check(good) is good
    assert_refused("two ops are called neg", check, chain("x", "neg", "neg"))
    assert_refused(r"reads value \(2, 0\)", check, replace(good, ops=(good.ops[0], replace(good.ops[1], inputs=((2, 0),)), good.ops[2])))
    assert_refused("which no op makes", check, replace(good, results=(Result("output", "0", (3, 0)),)))


# -- repeated blocks ------------------------------------------------------------------------------------------------------------


def anonymous(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(replace(op, name=f"op{i * 7 % 10007}", module="") for i, op in enumerate(graph.ops)))


@MODES
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert"])
def test_blocks_are_found_without_names(model, training):
    graph = captured(model, 5, training)
    assert repeated_blocks(graph) == repeated_blocks(anonymous(graph))


DEEP = [("gpt2", 6), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("llama", 12), ("bert", 12), ("t5", (6, 6))))]


@pytest.mark.parametrize(("model", "layers"), DEEP)
def test_ops_at_equal_positions_have_the_same_signature(model, layers):
    graph = captured(model, layers, True)
    for ops in repeated_blocks(graph).equal.values():
        assert len({graph.signature(i) for i in ops}) == 1


@pytest.mark.parametrize(("model", "container"), [("gpt2", "h"), pytest.param("llama", "layers", marks=pytest.mark.slow)])
def test_every_op_of_a_layer_has_a_place_and_its_parameters_that_of_the_layer(model, container):
    graph = captured(model, 7, True)
    places = repeated_blocks(graph).places
    middle = [i for i, op in enumerate(graph.ops) if (op.module or op.name).startswith(f"{container}.3.")]
    assert len({places[i].block for i in middle}) == 1
    assert {places[i].instance for i in middle if graph.ops[i].kind == "parameter"} == {3}
    assert {places[i].instance for i in middle} <= {2, 3, 4}  # a block may begin a few ops before the layer
    assert len({places[i].position for i in middle}) == len(middle)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_block_reads_the_hidden_values_of_the_one_before_alone(model):
    """Where it began behind its first norm, a recomputed block would keep a second tensor of that size."""
    graph = captured(model, 5, True)
    blocks = forward_blocks(graph)
    assert len(blocks) == 5
    for members in map(set, blocks):
        values = {value for i in members for value in graph.ops[i].inputs if not graph.ops[value[0]].is_placeholder}
        read = {value for value in values if value[0] not in members}
        assert sum(graph.tensor(value).shape == graph.tensor((max(members), 0)).shape for value in read) == 1


def test_a_period_of_the_tiled_graph_is_a_block():
    graph = tile(captured("llama", 3, True), 123, container="layers")
    counts = [len(ops) for ops in repeated_blocks(graph).equal.values()]
    assert sum(125 <= count <= 127 for count in counts) >= 199  # 9 parameters, 67 ops forward, 123 backward

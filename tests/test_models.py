"""The example models: published sizes, published numerics, and what planning needs of them (capture, splits by heads)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from models import bert, gpt2, llama, mlp
from tests.helpers import TINY, random_inputs
from tests.helpers_refusals import assert_refused

CLASSES = 128  # the vocabulary of the tiny models


def num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module on the CPU with seeded random parameters, as any user of a meta module would make it."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


def llama_params(layers: int, width: int, kv_width: int, hidden: int, vocab: int) -> int:
    attention = 2 * width * width + 2 * width * kv_width  # q and o, k and v
    return 2 * vocab * width + layers * (attention + 3 * width * hidden + 2 * width) + width


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (gpt2.small, 124_439_808),  # the head is the token table
        (gpt2.medium, 354_823_168),
        (gpt2.large, 774_030_080),
        (gpt2.xl, 1_557_611_200),
        (llama.llama3_8b, 8_030_261_248),
        (llama.llama3_70b, 70_553_706_496),
        (llama.llama3_405b, 405_853_388_800),
        (bert.base, 109_514_298),  # the published encoder without pooler, 108_891_648, and the head
        (bert.large, 335_174_458),
    ],
    ids=lambda value: f"{value.__module__}.{value.__name__}" if callable(value) else None,
)
def test_parameter_count_is_the_published_one(model, count):
    module, _ = model()
    assert num_params(module) == count
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not list(module.buffers())  # nothing that to_empty() would lose


def test_llama_405b_has_the_count_that_its_dims_give():
    count = llama_params(layers=126, width=16384, kv_width=8 * 128, hidden=53248, vocab=128256)
    assert count == 405_853_388_800 == num_params(llama.llama3_405b()[0])


def test_bert_base_encoder_has_the_published_count():
    module, _ = bert.base()
    assert num_params(module.embeddings) + num_params(module.layers) == 108_891_648


@pytest.mark.parametrize(
    ("built", "shape", "dtype"),
    [
        (mlp.mlp(loss=False), (64, 512), torch.float32),
        (gpt2.small(loss=False, layers=1), (16, 128, 50257), torch.float32),
        (gpt2.small(loss=False, layers=1, vocab=50304, batch=2, dtype="bfloat16"), (2, 128, 50304), torch.bfloat16),
        (llama.llama3_8b(loss=False, layers=1, batch=2, seq=64), (2, 64, 128256), torch.bfloat16),
        (llama.llama3_8b(layers=1, batch=2, seq=64), (), torch.float32),
        (bert.base(loss=False, layers=1), (32, 512, 30522), torch.float32),
        (bert.base(layers=1, dtype="bfloat16"), (), torch.float32),
    ],
    ids=["mlp", "gpt2", "gpt2-bfloat16", "llama", "llama-loss", "bert", "bert-loss"],
)
def test_meta_forward_has_the_right_shape_and_dtype(built, shape, dtype):
    module, example_inputs = built
    output = module(*example_inputs)
    assert (output.shape, output.dtype, output.device.type) == (shape, dtype, "meta")


@pytest.mark.parametrize("name", TINY)
def test_tiny_gives_a_finite_loss_and_every_gradient(name):
    module, example_inputs = TINY[name]()
    module = filled(module)
    loss = module(*random_inputs(example_inputs))
    loss.backward()
    assert loss.shape == () and loss.isfinite()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any() or parameter_name.endswith("key.bias"), parameter_name  # softmax ignores a bias of all keys


@pytest.mark.parametrize("loss", [True, False], ids=["loss", "logits"])
@pytest.mark.parametrize("name", TINY)
def test_tiny_exports_from_meta_and_the_program_keeps_its_output_shape(name, loss):
    module, example_inputs = TINY[name](loss=loss)
    program = torch.export.export(module, example_inputs, strict=False).run_decompositions()
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.linear.default" not in targets and targets & {"aten.mm.default", "aten.addmm.default"}
    (result,) = program.graph.output_node().args[0]
    assert result.meta["val"].shape == module(*example_inputs).shape
    assert len(program.graph_signature.parameters) == len(list(module.parameters()))


@pytest.mark.parametrize("name", TINY)
def test_make_fx_traces_the_training_step_with_equal_gradients(name):
    module, example_inputs = TINY[name]()
    module = filled(module)
    params, inputs = dict(module.named_parameters()), random_inputs(example_inputs)

    def gradients(params, inputs):
        return torch.autograd.grad(torch.func.functional_call(module, params, inputs), list(params.values()))

    expected = gradients(params, inputs)
    traced = make_fx(gradients)(params, inputs)
    torch.testing.assert_close(traced(params, inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gpt2_attention_splits_into_equal_row_blocks_of_the_fused_weight(ranks):
    # What tensor parallelism needs: rank r with the r-th block of c_attn's rows and of c_proj's columns, then one sum.
    width, heads = 64, 8
    with torch.device("meta"):
        attention = gpt2.Attention(width, heads)
    attention = filled(attention)
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2))
    total = attention.c_proj.bias.expand(2, 5, width).clone()
    for r in range(ranks):
        weight, bias = attention.c_attn.weight.chunk(ranks)[r], attention.c_attn.bias.chunk(ranks)[r]
        q, k, v = F.linear(x, weight, bias).view(2, 5, heads // ranks, 3, width // heads).unbind(3)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        total += F.linear(y.transpose(1, 2).reshape(2, 5, -1), attention.c_proj.weight.chunk(ranks, dim=1)[r])
    torch.testing.assert_close(total, attention(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [gpt2.tiny, bert.tiny], ids=["gpt2", "bert"])
def test_more_positions_than_the_table_has_is_an_error(model):
    assert_refused("seq is 65, but this .* has 64 learned positions", model, seq=65)


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """The published order of a fused projection's rows [3, heads, d] -> ours [heads, 3, d]."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def from_hf_gpt2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {}
    for key, value in state.items():
        name = key.removeprefix("transformer.")
        if name == "lm_head.weight":
            continue  # tied
        if value.dim() == 2 and not name.startswith(("wte", "wpe")):
            value = value.T
        ours[name] = by_heads(value, heads=8) if "c_attn" in name else value
    return ours


def from_hf_llama(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("model."): value for key, value in state.items()}


def from_hf_bert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renames = {
        "bert.embeddings.word_embeddings": "embeddings.tokens",
        "bert.embeddings.position_embeddings": "embeddings.positions",
        "bert.embeddings.token_type_embeddings": "embeddings.segments",
        "bert.embeddings.LayerNorm": "embeddings.norm",
        "bert.encoder.layer": "layers",
        "attention.self": "attention",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "intermediate",
        "output.dense": "output",
        "output.LayerNorm": "output_norm",
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions.bias": "head.bias",
    }
    ours = {}
    for key, value in state.items():
        for old, new in renames.items():
            key = key.replace(old, new)
        if not key.startswith("cls.predictions.decoder"):  # tied
            ours[key] = value
    return ours


def hf_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=8, n_embd=64, n_positions=64, vocab_size=CLASSES, attn_implementation="sdpa")
    return GPT2LMHeadModel(config)


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": CLASSES, "attn_implementation": "sdpa"}


def hf_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 5e5}
    more = {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_parameters": rope}
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, **more))


def hf_bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=256, max_position_embeddings=64))


@pytest.mark.parametrize(
    ("ours", "make_theirs", "convert", "argument_names"),
    [
        (gpt2.tiny, hf_gpt2, from_hf_gpt2, ["input_ids"]),
        (llama.tiny, hf_llama, from_hf_llama, ["input_ids"]),
        (bert.tiny, hf_bert, from_hf_bert, ["input_ids", "token_type_ids"]),
    ],
    ids=["gpt2", "llama", "bert"],
)
def test_logits_and_loss_equal_those_of_transformers(ours, make_theirs, convert, argument_names):
    theirs = make_theirs().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms and biases too: their initial ones and zeros would hide mistakes
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    module, example_inputs = ours()
    module.to_empty(device="cpu").load_state_dict(convert(theirs.state_dict()))

    *inputs, targets = random_inputs(example_inputs)
    inputs[0] = torch.randint(0, CLASSES, inputs[0].shape, generator=generator)
    targets = torch.randint(0, CLASSES, targets.shape, generator=generator)
    with torch.no_grad():
        expected = theirs(**dict(zip(argument_names, inputs, strict=True))).logits
        torch.testing.assert_close(module(*inputs), expected, rtol=1e-5, atol=1e-5)
        expected_loss = F.cross_entropy(expected.view(-1, CLASSES), targets.view(-1))
        torch.testing.assert_close(module(*inputs, targets), expected_loss, rtol=1e-5, atol=1e-5)

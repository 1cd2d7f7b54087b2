"""Small models of many kinds that this repository did not write its rules for: each with real, seeded weights and inputs on the CPU.

    module, example_inputs = build("lstm", training=False)

STRANGERS names them with the calls that each is for. A builder gets `training` and returns a module whose training form ends in
a number (`Scored`); Hugging Face ones come from their configuration class alone, nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INFERENCE, TRAINING = False, True
BOTH = (INFERENCE, TRAINING)
BATCH, SEQ, WIDTH, HEADS, WORDS = 4, 8, 32, 4, 64
DROPS = {"modes": (TRAINING,), "draws": True, "refused": "dropout"}
Built = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Stranger:
    build: Callable[[bool], Built]
    modes: tuple[bool, ...] = BOTH
    draws: bool = False  # two calls of the model itself differ
    refused: str = ""  # a word of the sentence with which it may be refused
    has_no_plan: bool = False  # the sentence is the right answer, not a gap
    kind: str = ""  # of the models of benchmarks/kinds: vision, audio, ...


STRANGERS: dict[str, Stranger] = {}


def stranger(name: str, **options: Any) -> Callable[[Callable[[bool], Built]], Callable[[bool], Built]]:
    def add(builder: Callable[[bool], Built]) -> Callable[[bool], Built]:
        STRANGERS[name] = Stranger(builder, **options)
        return builder

    return add


def stranger_class(name: str, inputs: Callable[[], tuple], targets: Callable[[], tuple] = tuple, **options: Any) -> Callable[[type], type]:
    """A class without arguments whose call in training mode is a loss, which may need `targets` as further inputs."""

    def add(of: type) -> type:
        kind = of.__module__.rpartition(".")[2]
        STRANGERS[name] = Stranger(
            lambda training: (of().train(training), (*inputs(), *(targets() if training else ()))), kind=kind, **options
        )
        return of

    return add


def build(name: str, training: bool) -> Built:
    """The same numbers in every process."""
    torch.manual_seed(0)
    module, inputs = STRANGERS[name].build(training)
    return module, inputs


class First(nn.Module):
    """The first tensor of what a model returns."""

    def __init__(self, model: nn.Module, **always: Any):
        super().__init__()
        self.model, self.always = model, always

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        made = self.model(*args, **kwargs, **self.always)
        return made if isinstance(made, Tensor) else made[0]


class Scored(First):
    """A number to differentiate."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        made = super().forward(*args, **kwargs)
        made = torch.view_as_real(made) if made.is_complex() else made
        return made.float().square().mean()


def wrapped(model: nn.Module, training: bool, **always: Any) -> nn.Module:
    return (Scored if training else First)(model, **always)


def features(*shape: int) -> Tensor:
    return torch.randn(shape or (BATCH, SEQ, WIDTH))


def tokens(*shape: int, words: int = WORDS) -> Tensor:
    return torch.randint(3, words, shape or (BATCH, SEQ))


def one() -> tuple[Tensor]:
    return (features(),)


def image(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


# -- complex numbers ------------------------------------------------------------------------------------------------------------


class RotaryAttention(nn.Module):
    """Positions as rotations of complex numbers, as in Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(SEQ).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("angles", angles)

    def forward(self, x: Tensor) -> Tensor:
        B, T, H = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, -1).unbind(2)
        turn = torch.polar(torch.ones_like(self.angles), self.angles)[None, :, None]
        q, k = (torch.view_as_real(torch.view_as_complex(p.reshape(B, T, HEADS, -1, 2)) * turn).flatten(3) for p in (q, k))
        y = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, H))


class GlobalFilter(nn.Module):
    """A product with a learned complex weight in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, WIDTH, dtype=torch.complex64) * 0.1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * self.weight
        return self.out(torch.fft.irfft2(spectrum, s=x.shape[1:3], dim=(1, 2), norm="ortho"))


# -- modes and state ------------------------------------------------------------------------------------------------------------


class WritesItself(nn.Module):
    """A parameter that the forward updates, as RWKV rescales its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mean = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return self.out(torch.tanh(y) + self.mean)


class TwentyDims(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.reshape(BATCH, *[1] * 17, SEQ, WIDTH).transpose(0, 18).flatten(1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        first, second = batch["pair"]
        return self.left(first) + self.right(second) * batch["scale"]["of"]


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        B, T, H = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (j - i) * 0.1)
        return self.out(y.transpose(1, 2).reshape(B, T, H))


class Folded(nn.Module):
    """Patches out and in again, distances between them, and the diagonal of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.linear(F.unfold(x, 2, stride=2).transpose(1, 2))
        near = torch.cdist(patches, patches).softmax(-1)
        weights = torch.diagonal(near, dim1=1, dim2=2)
        return F.fold((near @ patches * weights.unsqueeze(-1)).transpose(1, 2), x.shape[2:], 2, stride=2)


# -- decoding and experts ----------------------------------------------------------------------------------------------------------


class Decode(nn.Module):
    """One token for each of a batch: keys and values go into caches at a position that is an input."""

    def __init__(self, put: str, *, layers: int = 2, width: int = WIDTH, heads: int = HEADS, length: int = 16, batch: int = BATCH):
        super().__init__()
        self.put, self.heads = put, heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in range(layers):
            for name in ("keys", "values"):
                self.register_buffer(f"{name}{layer}", torch.zeros(batch, heads, length, width // heads))

    def stored(self, name: str, position: Tensor, new: Tensor) -> Tensor:
        cache = getattr(self, name)
        if self.put == "index_copy":
            cache = cache.index_copy(2, position, new)
        else:
            cache = torch.where((torch.arange(cache.shape[2], device=new.device) == position)[:, None], new, cache)
        getattr(self, name).copy_(cache)
        return cache

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out)):
            q, k, v = qkv(x).view(x.shape[0], 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            keys, values = self.stored(f"keys{layer}", position, k), self.stored(f"values{layer}", position, v)
            scores = q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
            later = torch.arange(keys.shape[2], device=x.device) > position
            y = scores.masked_fill(later, -1e9).softmax(-1) @ values
            x = x + out(y.transpose(1, 2).flatten(2))
        return x


class GroupedExperts(nn.Module):
    """Tokens sorted by their expert, one grouped product."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.experts, self.gate = experts, nn.Linear(WIDTH, experts)
        self.up, self.down = (nn.Parameter(torch.randn(experts, *shape) * 0.1) for shape in ((WIDTH, 64), (64, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = (chosen.unsqueeze(-1) <= torch.arange(self.experts, device=x.device)).sum(0).to(torch.int32)
        y = F.grouped_mm(F.relu(F.grouped_mm(flat[order], self.up, offs=ends)), self.down, offs=ends)
        return (torch.zeros_like(flat).index_copy(0, order, y) * weight.unsqueeze(-1)).view_as(x)


# -- the table of those above, and of layers of torch -----------------------------------------------------------------------------------


class Dequantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.dequantize())


def pooled(norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )  # fmt: skip


def nested(depth: int) -> nn.Module:
    """Too deep for Python itself, unless its limit of frames is raised: a plan raises it."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    for _ in range(depth):
        layers = nn.Sequential(layers)
    return layers


def weight_norm() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(WIDTH, 64)), nn.Softplus(), norm(nn.Conv1d(SEQ, 8, 3)), nn.LeakyReLU(0.1))


def activations() -> nn.Module:
    kinds = [nn.Hardswish(), nn.LeakyReLU(), nn.ELU(), nn.Hardtanh(), nn.Hardsigmoid(), nn.LogSigmoid(), nn.PReLU(), nn.Softplus()]
    kinds += [nn.Mish(), nn.SELU(), nn.CELU(), nn.Softsign(), nn.Tanhshrink(), nn.GLU()]
    return nn.Sequential(*[part for kind in kinds for part in (nn.Linear(WIDTH, WIDTH), kind)])


def padded_convolutions() -> nn.Module:
    convolutions = [nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 8, 3, padding=1, padding_mode="replicate")]
    return nn.Sequential(
        *convolutions, nn.PixelShuffle(2), nn.Conv2d(2, 8, 3, padding=1, padding_mode="circular"), nn.ChannelShuffle(4)
    )  # fmt: skip


def transformer_decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True), 2)


def decoded(**options: Any) -> dict[str, Any]:
    return {"tgt": features(), "memory": features(), "tgt_mask": nn.Transformer.generate_square_subsequent_mask(SEQ), **options}


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {  # module, its inputs, options of Stranger
    "complex_rotary": (RotaryAttention, one, {}),
    "fft_complex_weight": (GlobalFilter, lambda: (features(BATCH, 8, 8, WIDTH),), {}),
    "dropout": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, WIDTH)), one, DROPS),
    "attention_dropout": (lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.2, batch_first=True), one, DROPS),
    "writes_parameter": (WritesItself, one, {}),
    "batch_norm": (lambda: pooled(True), lambda: (image(8),), {}),
    "pool_channels_last": (
        lambda: pooled(False).to(memory_format=torch.channels_last), lambda: (image(8).to(memory_format=torch.channels_last),), {},
    ),
    "lazy_linear": (
        lambda: nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(WIDTH)), one, {"refused": "no shape yet", "has_no_plan": True},
    ),
    "nested_tensor": (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: (torch.nested.nested_tensor([features(3, WIDTH), features(5, WIDTH)], layout=torch.jagged),),
        {"modes": (INFERENCE,), "refused": "nested tensor", "has_no_plan": True},
    ),
    "quantized": (
        lambda: Dequantized(WIDTH, WIDTH), lambda: (torch.quantize_per_tensor(features(), 0.1, 0, torch.qint8),),
        {"modes": (INFERENCE,), "refused": "quantized", "has_no_plan": True},
    ),
    "nested_400": (lambda: nested(400), one, {}),
    "twenty_dims": (TwentyDims, one, {}),
    "nested_inputs": (Nested, lambda: ({"pair": [features(), features()], "scale": {"of": features(BATCH, 1, 1)}},), {}),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.RMSNorm(64), nn.Linear(64, WIDTH)), one, {}),
    "lstm": (lambda: nn.LSTM(WIDTH, 16, num_layers=2, batch_first=True), one, {}),
    "weight_norm": (weight_norm, one, {}),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 64)), one, {"modes": (INFERENCE,)}),
    "transformer_decoder": (transformer_decoder, lambda: decoded(tgt_is_causal=True), {}),
    "transformer_decoder_mask": (transformer_decoder, decoded, {"refused": "tgt_is_causal"}),
    "flex_attention": (Flex, lambda: (features(BATCH, 16, 64),), {}),
    "activations": (activations, one, {}),
    "padded_convolutions": (padded_convolutions, lambda: (image(8),), {}),
    "folded_patches": (Folded, lambda: (image(8),), {}),
    "grouped_mm": (GroupedExperts, one, {}),
    "grouped_mm_bf16": (lambda: GroupedExperts().bfloat16(), lambda: (features().bfloat16(),), {}),
}  # fmt: skip
for _name, (_module, _inputs, _options) in LAYERS.items():
    stranger(_name, **_options)(lambda training, module=_module, inputs=_inputs: (wrapped(module().train(training), training), inputs()))
for _put in ("index_copy", "where"):
    stranger(f"decode_{_put}", modes=(INFERENCE,))(lambda training, put=_put: (Decode(put), (features(BATCH, 1, WIDTH), torch.tensor([5]))))


# -- Hugging Face -------------------------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VISION = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
VISION |= {"image_size": 32, "patch_size": 8, "num_labels": 4}
AUDIO = {
    **SMALL, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": image()}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 256)}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens()}


LAYERED = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2, "num_labels": 4}
HF: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {  # class, fields of its configuration, inputs
    "llama4": ("Llama4ForCausalLM", {**SMALL, "intermediate_size_mlp": 64, "num_local_experts": 2, "attn_temperature_tuning": False}, text),
    "rwkv": ("RwkvForCausalLM", {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 16}, text),
    "mamba": ("MambaForCausalLM", {**SMALL, "state_size": 4, "time_step_rank": 4}, text),
    "mamba2": ("Mamba2ForCausalLM", {**SMALL, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, text),
    "jamba": ("JambaForCausalLM", {**SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2,
        "mamba_d_state": 4, "use_mamba_kernels": False}, text),
    "swin": ("SwinForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4, "num_labels": 4}, pixels),
    "convnext": ("ConvNextForImageClassification", LAYERED, pixels),
    "wav2vec2": ("Wav2Vec2ForCTC", AUDIO, sound),
    "beit": ("BeitForImageClassification", {**VISION, "use_relative_position_bias": True}, pixels),
    "deberta_v2": ("DebertaV2Model", {**SMALL, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True}, text),
    "xlnet": ("XLNetModel", {"vocab_size": WORDS, "d_model": WIDTH, "n_layer": 2, "n_head": HEADS, "d_inner": 64, "dropout": 0.0}, text),
    "fnet": ("FNetModel", SMALL, text),
    "mpnet": ("MPNetModel", SMALL, text),
    "modernbert": ("ModernBertModel", {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 4}, text),
    "bloom": ("BloomForCausalLM", {**SMALL, "n_layer": 2, "n_head": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0}, text),
    "mpt": ("MptForCausalLM", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 16, "vocab_size": WORDS}, text),
    "gpt_oss": ("GptOssForCausalLM", {**SMALL, "num_local_experts": 4, "sliding_window": 4}, text),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {**SMALL, "lru_width": WIDTH, "attention_window_size": 4, "block_types": ["recurrent",
        "attention"]}, text),
    "qwen3_next": ("Qwen3NextForCausalLM", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}, text),
    "m2m100": ("M2M100Model", {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads":
        HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout":
        0.0, "attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, pairs),
}  # fmt: skip


def huggingface(name: str, fields: dict[str, Any], **options: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**fields)
    for key in ("use_cache", "output_attentions", "output_hidden_states"):
        if hasattr(config, key):
            setattr(config, key, False)
    return kind._from_config(config, **options).eval()


for _name, (_of, _fields, _inputs) in HF.items():
    stranger(_name)(lambda training, of=_of, fields=_fields, inputs=_inputs: (wrapped(huggingface(of, fields), training), inputs()))


@stranger("detr")
def detr(training: bool) -> Built:
    import transformers

    backbone = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    small = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", HEADS), ("ffn_dim", 64))
    }
    fields = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": backbone, "backbone": None, "d_model": WIDTH}
    module = huggingface("DetrForObjectDetection", {**fields, **small, "num_queries": 8, "num_labels": 4, "dropout": 0.0})
    return wrapped(module, training), {"pixel_values": image(64), "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.int64)}


def _llama() -> nn.Module:
    return huggingface("LlamaForCausalLM", SMALL)


@stranger("hf_plain")
def hf_plain(training: bool) -> Built:
    """As a user has it: what comes back is a ModelOutput."""
    ids = tokens()
    return _llama(), {"input_ids": ids, "labels": ids} if training else {"input_ids": ids}


def cached(kind: str, **options: Any) -> Built:
    import transformers

    module = _llama()
    cache = getattr(transformers, kind)(config=module.config, **options)
    with torch.no_grad():
        module(input_ids=tokens(), past_key_values=cache, use_cache=True)
    return wrapped(module, False, use_cache=True), {"input_ids": tokens(BATCH, 1), "past_key_values": cache}


stranger("hf_static_cache", modes=(INFERENCE,))(lambda training: cached("StaticCache", max_cache_len=16))
stranger("hf_dynamic_cache", modes=(INFERENCE,))(lambda training: cached("DynamicCache"))

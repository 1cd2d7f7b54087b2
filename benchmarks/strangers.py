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


@stranger("complex_rotary")
def complex_rotary(training: bool) -> Built:
    return wrapped(RotaryAttention(), training), (features(),)


class GlobalFilter(nn.Module):
    """A product with a learned complex weight in the frequency domain."""

    def __init__(self, as_pairs: bool):
        super().__init__()
        shape = (8, 5, WIDTH)
        self.as_pairs = as_pairs
        self.weight = nn.Parameter(torch.randn(*shape, 2) * 0.1 if as_pairs else torch.randn(shape, dtype=torch.complex64) * 0.1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight) if self.as_pairs else self.weight
        spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * weight
        return self.out(torch.fft.irfft2(spectrum, s=x.shape[1:3], dim=(1, 2), norm="ortho"))


@stranger("fft_filter")
def fft_filter(training: bool) -> Built:
    return wrapped(GlobalFilter(True), training), (features(BATCH, 8, 8, WIDTH),)


@stranger("fft_complex_weight")
def fft_complex_weight(training: bool) -> Built:
    return wrapped(GlobalFilter(False), training), (features(BATCH, 8, 8, WIDTH),)


# -- modes and state ------------------------------------------------------------------------------------------------------------


@stranger("dropout", modes=(TRAINING,), draws=True, refused="dropout")
def dropout(training: bool) -> Built:
    layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, WIDTH))
    return wrapped(layers, training).train(), (features(),)


@stranger("attention_dropout", modes=(TRAINING,), draws=True, refused="dropout")
def attention_dropout(training: bool) -> Built:
    return wrapped(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.2, batch_first=True).train(), training), (features(),)


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


@stranger("writes_parameter")
def writes_parameter(training: bool) -> Built:
    return wrapped(WritesItself(), training), (features(),)


@stranger("batch_norm")
def batch_norm(training: bool) -> Built:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return wrapped(layers.train(training), training), (image(8),)


@stranger("pool_channels_last")
def pool_channels_last(training: bool) -> Built:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return wrapped(layers.to(memory_format=torch.channels_last), training), (image(8).to(memory_format=torch.channels_last),)


@stranger("lazy_linear", refused="no shape yet", has_no_plan=True)
def lazy_linear(training: bool) -> Built:
    return wrapped(nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(WIDTH)), training), (features(),)


@stranger("nested_tensor", modes=(INFERENCE,), refused="nested tensor", has_no_plan=True)
def nested_tensor(training: bool) -> Built:
    rows = torch.nested.nested_tensor([features(3, WIDTH), features(5, WIDTH)], layout=torch.jagged)
    return wrapped(nn.Linear(WIDTH, WIDTH), training), (rows,)


@stranger("quantized", modes=(INFERENCE,), refused="quantized", has_no_plan=True)
def quantized(training: bool) -> Built:
    class Dequantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.dequantize())

    return wrapped(Dequantized(), training), (torch.quantize_per_tensor(features(), 0.1, 0, torch.qint8),)


def nested(depth: int, training: bool) -> Built:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    for _ in range(depth):
        layers = nn.Sequential(layers)
    return wrapped(layers, training), (features(),)


@stranger("nested_200")
def nested_200(training: bool) -> Built:
    return nested(200, training)


@stranger("nested_400")
def nested_400(training: bool) -> Built:
    """Too deep for Python itself, unless its limit of frames is raised: a plan raises it."""
    return nested(400, training)


class TwentyDims(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.reshape(BATCH, *[1] * 17, SEQ, WIDTH).transpose(0, 18).flatten(1)


@stranger("twenty_dims")
def twenty_dims(training: bool) -> Built:
    return wrapped(TwentyDims(), training), (features(),)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        first, second = batch["pair"]
        return self.left(first) + self.right(second) * batch["scale"]["of"]


@stranger("nested_inputs")
def nested_inputs(training: bool) -> Built:
    return wrapped(Nested(), training), ({"pair": [features(), features()], "scale": {"of": features(BATCH, 1, 1)}},)


# -- layers of torch ------------------------------------------------------------------------------------------------------------


@stranger("rms_norm")
def rms_norm(training: bool) -> Built:
    return wrapped(nn.Sequential(nn.Linear(WIDTH, 64), nn.RMSNorm(64), nn.Linear(64, WIDTH)), training), (features(),)


@stranger("gru")
def gru(training: bool) -> Built:
    return wrapped(nn.GRU(WIDTH, 16, num_layers=2, batch_first=True), training), (features(),)


@stranger("lstm")
def lstm(training: bool) -> Built:
    return wrapped(nn.LSTM(WIDTH, 16, num_layers=2, batch_first=True), training), (features(),)


@stranger("lstm_bidirectional")
def lstm_bidirectional(training: bool) -> Built:
    return wrapped(nn.LSTM(WIDTH, 16, bidirectional=True), training), (features(),)


@stranger("rnn")
def rnn(training: bool) -> Built:
    return wrapped(nn.RNN(WIDTH, 16, batch_first=True), training), (features(),)


@stranger("weight_norm")
def weight_norm(training: bool) -> Built:
    norm = nn.utils.parametrizations.weight_norm
    layers = nn.Sequential(norm(nn.Linear(WIDTH, 64)), nn.Softplus(), norm(nn.Conv1d(SEQ, 8, 3)), nn.LeakyReLU(0.1))
    return wrapped(layers, training), (features(),)


@stranger("spectral_norm", modes=(INFERENCE,))
def spectral_norm(training: bool) -> Built:
    return wrapped(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 64)).eval(), training), (features(),)


@stranger("transformer_encoder")
def transformer_encoder(training: bool) -> Built:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    return wrapped(nn.TransformerEncoder(layer, 2).train(training), training), (features(),)


@stranger("transformer_decoder")
def transformer_decoder(training: bool) -> Built:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQ)
    decoder = nn.TransformerDecoder(layer, 2).train(training)
    return wrapped(decoder, training), {"tgt": features(), "memory": features(), "tgt_mask": mask, "tgt_is_causal": True}


@stranger("transformer_decoder_mask", refused="tgt_is_causal")
def transformer_decoder_mask(training: bool) -> Built:
    module, inputs = transformer_decoder(training)
    return module, {name: value for name, value in inputs.items() if name != "tgt_is_causal"}


@stranger("multihead_attention")
def multihead_attention(training: bool) -> Built:
    return wrapped(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), training), (features(), features(), features())


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


@stranger("flex_attention")
def flex_attention(training: bool) -> Built:
    return wrapped(Flex(), training), (features(BATCH, 16, 64),)


@stranger("activations")
def activations(training: bool) -> Built:
    kinds = [nn.Hardswish(), nn.LeakyReLU(), nn.ELU(), nn.Hardtanh(), nn.Hardsigmoid(), nn.LogSigmoid(), nn.PReLU(), nn.Softplus()]
    kinds += [nn.Mish(), nn.SELU(), nn.CELU(), nn.Softsign(), nn.Tanhshrink(), nn.GLU()]
    return wrapped(nn.Sequential(*[part for kind in kinds for part in (nn.Linear(WIDTH, WIDTH), kind)]), training), (features(),)


@stranger("padded_convolutions")
def padded_convolutions(training: bool) -> Built:
    convolutions = [nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 8, 3, padding=1, padding_mode="replicate")]
    layers = nn.Sequential(*convolutions, nn.PixelShuffle(2), nn.Conv2d(2, 8, 3, padding=1, padding_mode="circular"), nn.ChannelShuffle(4))
    return wrapped(layers, training), (image(8),)


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


@stranger("folded_patches")
def folded_patches(training: bool) -> Built:
    return wrapped(Folded(), training), (image(8),)


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


@stranger("decode_index_copy", modes=(INFERENCE,))
def decode_index_copy(training: bool) -> Built:
    return Decode("index_copy"), (features(BATCH, 1, WIDTH), torch.tensor([5]))


@stranger("decode_where", modes=(INFERENCE,))
def decode_where(training: bool) -> Built:
    return Decode("where"), (features(BATCH, 1, WIDTH), torch.tensor([5]))


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


@stranger("grouped_mm")
def grouped_mm(training: bool) -> Built:
    return wrapped(GroupedExperts(), training), (features(),)


@stranger("grouped_mm_bf16")
def grouped_mm_bf16(training: bool) -> Built:
    return wrapped(GroupedExperts().bfloat16(), training), (features().bfloat16(),)


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
HF: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {}


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": image()}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 256)}


def video() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 32, 32)}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens()}


LAYERED = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2, "num_labels": 4}
# name: (class, fields of its configuration, inputs)
HF |= {
    "llama4": ("Llama4ForCausalLM", {**SMALL, "intermediate_size_mlp": 64, "num_local_experts": 2, "attn_temperature_tuning": False}, text),
    "rwkv": ("RwkvForCausalLM", {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 16}, text),
    "gemma3": ("Gemma3ForCausalLM", {**SMALL, "sliding_window": 4, "query_pre_attn_scalar": 8}, text),
    "mamba": ("MambaForCausalLM", {**SMALL, "state_size": 4, "time_step_rank": 4}, text),
    "mamba2": ("Mamba2ForCausalLM", {**SMALL, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, text),
    "jamba": (
        "JambaForCausalLM",
        {
            **SMALL,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 2,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
        text,
    ),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 4},
        pixels,
    ),
    "convnext": ("ConvNextForImageClassification", LAYERED, pixels),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 4,
        },
        pixels,
    ),
    "timesformer": ("TimesformerForVideoClassification", {**VISION, "num_frames": 4}, video),
    "videomae": ("VideoMAEForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": 2}, video),
    "wav2vec2": ("Wav2Vec2ForCTC", AUDIO, sound),
    "hubert": ("HubertModel", AUDIO, sound),
    "resnet_hf": ("ResNetForImageClassification", {**LAYERED, "embedding_size": 16}, pixels),
    "mobilenet": ("MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25, "num_labels": 4}, pixels),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {
            "image_size": 32,
            "kernel_sizes": [3, 3],
            "in_channels": [32, 16],
            "out_channels": [16, 16],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 2],
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "hidden_dim": 1280,
            "depthwise_padding": [],
            "num_labels": 4,
        },
        pixels,
    ),
    "dinov2": ("Dinov2ForImageClassification", VISION, pixels),
    "beit": ("BeitForImageClassification", {**VISION, "use_relative_position_bias": True}, pixels),
    "albert": ("AlbertModel", {**SMALL, "embedding_size": 16}, text),
    "electra": ("ElectraModel", {**SMALL, "embedding_size": 16}, text),
    "deberta_v2": (
        "DebertaV2Model",
        {**SMALL, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
        text,
    ),
    "xlnet": ("XLNetModel", {"vocab_size": WORDS, "d_model": WIDTH, "n_layer": 2, "n_head": HEADS, "d_inner": 64, "dropout": 0.0}, text),
    "fnet": ("FNetModel", SMALL, text),
    "convbert": ("ConvBertModel", {**SMALL, "embedding_size": WIDTH, "head_ratio": 2, "conv_kernel_size": 3}, text),
    "mpnet": ("MPNetModel", SMALL, text),
    "modernbert": ("ModernBertModel", {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 4}, text),
    "bloom": ("BloomForCausalLM", {**SMALL, "n_layer": 2, "n_head": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0}, text),
    "mpt": ("MptForCausalLM", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 16, "vocab_size": WORDS}, text),
    "gptj": (
        "GPTJForCausalLM",
        {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "rotary_dim": 4, "vocab_size": WORDS, **{"n_positions": 64}},
        text,
    ),
    "codegen": ("CodeGenForCausalLM", {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "rotary_dim": 4, "vocab_size": WORDS}, text),
    "olmo2": ("Olmo2ForCausalLM", SMALL, text),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**SMALL, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        text,
    ),
    "gpt_oss": ("GptOssForCausalLM", {**SMALL, "num_local_experts": 4, "sliding_window": 4}, text),
    "granitemoe": ("GraniteMoeForCausalLM", {**SMALL, "num_local_experts": 4}, text),
    "lfm2": ("Lfm2ForCausalLM", {**SMALL, "layer_types": ["conv", "full_attention"]}, text),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**SMALL, "lru_width": WIDTH, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
        text,
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **SMALL,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        text,
    ),
    "stablelm": ("StableLmForCausalLM", SMALL, text),
    "glm": ("GlmForCausalLM", SMALL, text),
    "cohere2": ("Cohere2ForCausalLM", {**SMALL, "sliding_window": 4}, text),
    "m2m100": (
        "M2M100Model",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        pairs,
    ),
}


def huggingface(name: str, fields: dict[str, Any], **options: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**fields)
    for key in ("use_cache", "output_attentions", "output_hidden_states"):
        if hasattr(config, key):
            setattr(config, key, False)
    return kind._from_config(config, **options).eval()


def _add(name: str, of: str, fields: dict[str, Any], inputs: Callable[[], dict[str, Tensor]]) -> None:
    stranger(name)(lambda training: (wrapped(huggingface(of, fields), training), inputs()))


for _name, _row in HF.items():
    _add(_name, *_row)


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


@stranger("hf_static_cache", modes=(INFERENCE,))
def hf_static_cache(training: bool) -> Built:
    import transformers

    module = _llama()
    cache = transformers.StaticCache(config=module.config, max_cache_len=16)
    with torch.no_grad():
        module(input_ids=tokens(), past_key_values=cache, use_cache=True)
    return wrapped(module, training, use_cache=True), {"input_ids": tokens(BATCH, 1), "past_key_values": cache}


@stranger("hf_dynamic_cache", modes=(INFERENCE,))
def hf_dynamic_cache(training: bool) -> Built:
    import transformers

    module = _llama()
    cache = transformers.DynamicCache(config=module.config)
    with torch.no_grad():
        module(input_ids=tokens(), past_key_values=cache, use_cache=True)
    return wrapped(module, training, use_cache=True), {"input_ids": tokens(BATCH, 1), "past_key_values": cache}

"""The sizes of a decoder-only transformer that degrees of parallelism have to divide.

    attention   h (heads + 2 kv_heads) d + heads d h           latent attention: its published matrices, one by one
    MLP         (2 + gated) h ffn                              a mixture's block: experts of width expert_ffn, shared ones of shared_ffn
    model       blocks + (2 - tied) V h

h width, d head_dim, V vocab. Of `experts`, each token uses `active`; the first `dense_layers` blocks have the MLP of width ffn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .texts import integer

PADDED = {"megatron": 128, "nanotron": 1}  # of what, times the tensor parallel ranks, launchers make the vocabulary a multiple by default
NAMES = {  # of Hugging Face's configs; the first that a config has
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
    "vocab": ("vocab_size",),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "top_k", "moe_top_k", "moe_topk", "moe_k"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    "shared": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_shared_expert"),
    "dense": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    "step": ("decoder_sparse_step", "interleave_moe_layer_step"),  # every so many layers have experts
}
LEARNED = (  # model types with learned positions
    "gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", "biogpt", "opt", "bert", "roberta", "roberta-prelayernorm", "camembert", "xlm-roberta",
    "xlm-roberta-xl", "data2vec-text", "ernie", "megatron-bert", "bert-generation", "mpnet", "ibert",
)  # fmt: skip
UNGATED = (  # ... with MLPs of two matrices
    *LEARNED, "gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "bloom", "falcon", "phi", "mpt", "starcoder2", "xglm", "nemotron",
    "arcee", "apertus", "jais2", "nanochat", "persimmon", "fuyu",
)  # fmt: skip
TIED = (  # ... whose default is one table for tokens and head
    *LEARNED, "bloom", "falcon", "mpt", "starcoder2", "xglm", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "smollm3",
    "ernie4_5", "ernie4_5_moe", "nomic_bert",
)  # fmt: skip
OTHER_BLOCKS = (  # settings of models that are no row of blocks, each one attention and one MLP
    "mamba_d_conv", "mamba_num_heads", "linear_conv_kernel_dim", "conv_L_cache", "lru_width", "hidden_size_per_layer_input",
    "is_encoder_decoder", "zero_expert_num", "keep_window_size", "H_cycles", "depth_decoder_config", "kv_channels",
    "embedding_size", "input_embedding_size", "embedding_rank",
)  # fmt: skip
OF_ENCODERS = "attention_probs_dropout_prob"  # a setting of those that resemble BERT
QK_NORM = (  # model types that normalize queries and keys; others say so
    "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gemma3", "gemma3_text", "gemma4_unified", "gemma4_unified_text", "olmo2",
    "olmo3", "olmoe", "flex_olmo", "afmoe", "apertus", "exaone4", "exaone_moe", "dots1", "hy_v3", "minimax_m2", "nanochat",
)  # fmt: skip
TOWERS = ("vision_config", "audio_config", "speech_config", "vision_tower")  # of models that read more than text
WINDOWS = ("sliding_window", "attention_chunk_size", "index_topk")  # how many tokens attention of some layers sees
FULL = {  # model types with windows: every so many layers see all tokens; 0: none does. Others say so (layer_types)
    "gemma2": 2, "cohere2": 4, "llama4": 4, "llama4_text": 4, "olmo3": 4, "gemma3": 6, "gemma3_text": 6,
    **dict.fromkeys(("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"), 0),
}  # fmt: skip
OTHER_ATTENTION = ("afmoe", "axk2", "deepseek_v4", "gemma4_unified", "gemma4_unified_text", "hy_v4", "minimax", "minimax_m3_vl_text")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class MissingSize(ValueError):
    """A config leaves a size to its class, or has none."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a transformer that prices and legality depend on: dims, heads, layers, experts."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0  # 0: width / heads
    tied: bool = False
    gated: bool = True
    learned_positions: bool = False
    qk_norm: bool = False  # queries and keys are normalized, head by head
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    mtp: int = 0  # modules that predict further tokens, each a block and the head again
    latent: tuple[int, ...] = ()  # of multi-head latent attention, in the order of LATENT; every device has its latent keys and values
    window: int = 0  # how many tokens attention sees,
    windowed: int = 0  # ... of so many layers
    chunked: bool = False  # ... of the chunk of so many tokens that a token is in
    uncounted: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)  # a sentence, and of which sequences it is true
    multiple: int = field(default=0, compare=False, repr=False)  # of which, times tensor parallel ranks, the vocabulary is one
    unpadded: int = field(default=0, compare=False, repr=False)  # the vocabulary before that

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.width // max(self.heads, 1))
        for name in ("layers", "width", "ffn", "heads", "kv_heads", "vocab", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"the model's {name} is {value!r}; expected a whole number of 1 or more")
        if self.experts and not 1 <= self.active <= self.experts:
            raise ValueError(f"the model has {self.experts} experts, of which a token uses {self.active}; expected 1 to {self.experts}")

    @property
    def attention_parameters(self) -> int:
        """Of one block; norms and biases left out, as everywhere here."""
        if self.latent:
            return latent_parameters(self.width, self.heads, *self.latent)
        return 2 * self.width * (self.heads + self.kv_heads) * self.head_dim

    @property
    def matrices(self) -> int:
        """Of an MLP."""
        return 2 + self.gated

    @property
    def expert_layers(self) -> int:
        return self.layers + self.mtp - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts in all blocks."""
        return self.expert_layers * self.experts * self.matrices * self.width * self.expert_ffn

    @property
    def active_ffn(self) -> float:
        """Width of the MLP that a token passes through, as a mean over the blocks."""
        return self._mean_ffn(self.active)

    @property
    def held_ffn(self) -> float:
        """The same without routed experts, which are on some devices only."""
        return self._mean_ffn(0)

    def _mean_ffn(self, experts: int) -> float:
        mixture = experts * self.expert_ffn + self.shared_ffn
        layers = self.layers + self.mtp
        return ((layers - self.expert_layers) * self.ffn + self.expert_layers * mixture) / layers

    @property
    def parameters(self) -> float:
        return self._parameters(self._mean_ffn(self.experts))

    @property
    def active_parameters(self) -> float:
        """Those that one token is multiplied with, and the token table."""
        return self._parameters(self.active_ffn)

    def _parameters(self, ffn: float) -> float:
        block = self.attention_parameters + self.matrices * self.width * ffn
        return (self.layers + self.mtp) * block + (2 - self.tied) * self.vocab * self.width

    def flops_per_token(self, seq: Any) -> Any:
        """Of a training step: 6 per parameter that a token is multiplied with, and 12 L heads d seq for attention.

        seq: tokens, a number or an array. Attention is not halved for the causal mask: the convention of PaLM's appendix B, of
        torchtitan and of nanotron. What a window hides is not counted, whatever kernels compute.
        """
        attention = 12 * (self.layers + self.mtp) * self.heads * self.head_dim * seq * self.scores(seq)
        multiplied = self.active_parameters - (1 - self.tied) * self.vocab * self.width
        return 6 * (multiplied + self.mtp * self.vocab * self.width) + attention

    def scores(self, seq: Any, tile: int = 0) -> Any:
        """What windows leave of a causal attention's scores, as a mean over the layers. tile: keys that kernels compute at once.

        Of S keys a query reads S / 2 in the mean, of a window of W < S: W - W^2 / 2 S; and half a tile more at each end. Of chunks of W,
        the last of which has R tokens: (S - R) / S W / 2 + R^2 / 2 S, and half a tile more.
        """
        window = np.minimum(self.window, seq) if self.windowed else seq
        rest = seq % window
        of_chunks = ((seq - rest) * window + rest**2) / (2 * seq) + tile / 2
        seen = of_chunks if self.chunked else window - window**2 / (2 * seq) + tile
        share = np.minimum(seen / (seq / 2 + tile / 2), 1.0)
        return 1 - self.windowed / (self.layers + self.mtp) * (1 - share)

    def not_counted(self, seq: int) -> list[str]:
        """What no figure of such sequences counts of the model."""
        return [sentence for sentence, above in self.uncounted if seq > above]

    @property
    def own_vocab(self) -> int:
        """The vocabulary that a configuration says, which the launcher pads."""
        return self.unpadded or self.vocab

    def with_padded_vocab(self, multiple: int, tensor: int) -> ModelSizes:
        """Of a launcher that pads the vocabulary to a multiple of so many per tensor parallel rank; 0: it doesn't."""
        padding = replace(self, multiple=multiple, unpadded=self.own_vocab)
        return replace(padding, vocab=int(padding.vocab_of(tensor)))

    def vocab_of(self, tensor: Any) -> Any:
        """The vocabulary with so many tensor parallel ranks, a number or an array."""
        multiple = np.maximum(self.multiple * tensor, 1)
        return -(-self.own_vocab // multiple) * multiple


def latent_parameters(width: int, heads: int, q_rank: int, kv_rank: int, rope_dim: int, nope_dim: int, value_dim: int) -> int:
    """Of multi-head latent attention: queries (through q_rank where it isn't 0), the latent of keys and values, its expansion, output."""
    queries = heads * (nope_dim + rope_dim)
    of_queries = width * q_rank + q_rank * queries if q_rank else width * queries
    return of_queries + width * (kv_rank + rope_dim) + kv_rank * heads * (nope_dim + value_dim) + heads * value_dim * width


def sizes_of_config(config: Mapping[str, Any], what: str = "the config") -> ModelSizes:
    """The sizes in a Hugging Face config. ValueError where one is missing or no number."""
    towers = [(f"{name}: of the model, its language model alone is counted", 0) for name in TOWERS if config.get(name)]
    if isinstance(text := config.get("text_config"), Mapping):
        sizes = sizes_of_config(text, what)
        return replace(sizes, uncounted=(*towers, *sizes.uncounted))
    kind = str(config.get("model_type", ""))
    groups = [config[name] for name in ("attn_config", "ffn_config") if isinstance(config.get(name), Mapping)]  # MPT, DBRX
    config = {**(groups[0] if groups else {}), **(groups[-1] if groups else {}), **config}
    if others := [name for name in OTHER_BLOCKS if config.get(name)]:
        raise ValueError(f"{what} has {others[0]}, so it is no row of blocks of one attention and one MLP; expected a plain transformer's")
    if config.get(OF_ENCODERS) and kind not in LEARNED:
        raise ValueError(f"{what} is of an encoder, {kind or 'without model_type'}, whose matrices aren't known; expected a decoder's")

    def number(size: str, default: int | None = None) -> int:
        for name in NAMES[size]:
            value = config.get(name)
            if value is not None:  # Hunyuan's are lists, of one number per layer
                alike = isinstance(value, list) and len(value) > 0 and value.count(value[0]) == len(value)
                return integer(value[0] if alike else value, f"{what}: {name}")
        if default is None:
            raise MissingSize(f"{what} has none of {', '.join(NAMES[size])}; expected the sizes of a decoder-only transformer")
        return default

    layers, width, heads = number("layers"), number("width"), number("heads")
    experts = number("experts", 0)
    ffn = number("ffn", 4 * width if experts or kind in UNGATED else None)
    more: dict[str, Any] = {}
    if experts:
        expert_ffn = number("expert_ffn", ffn)
        shared = number("shared", int("llama4" in kind)) * expert_ffn
        of_shared = "shared_intermediate_size" if kind.startswith("granite") else "shared_expert_intermediate_size"
        shared = shared or integer(config.get(of_shared) or 0, of_shared)
        step, without = max(number("step", 1), 1), config.get("mlp_only_layers")
        listed = sum(k in range(step - 1, layers, step) for k in without) if isinstance(without, list) else 0
        dense = number("dense", layers - layers // step + listed)
        if isinstance(kinds := config.get("mlp_layer_types") or config.get("moe_layer_freq"), list):
            dense = kinds[:layers].count("dense") + kinds[:layers].count(0)
        more = {"experts": experts, "active": number("active", 1), "expert_ffn": expert_ffn, "shared_ffn": shared, "dense_layers": dense}
    head_dim = number("head_dim", 0)
    latent: tuple[int, ...] = ()
    if config.get("kv_lora_rank"):
        ranks = [integer(config.get(name) or 0, name) for name in LATENT]
        latent, head_dim = tuple(ranks), ranks[-1]
    used = not kind.startswith("qwen")  # where a config doesn't say
    windows = [(name, size) for name in WINDOWS if isinstance(size := config.get(name), int)
               and size > 0 and config.get(f"use_{name}", used)]  # fmt: skip
    windowed = _windowed(config, kind, layers) if len(windows) == 1 and windows[0][0] != "index_topk" else None
    seen = [(f"{name} {most}: attention is counted over all tokens", most) for name, most in windows if windowed is None]
    if windowed:
        (name, window), *_ = windows
        more |= {"window": window, "windowed": windowed, "chunked": name == "attention_chunk_size"}
    other = [(f"model_type {kind}: attention is counted as queries, keys, values and output of all tokens", 0)] * (kind in OTHER_ATTENTION)
    one_key = config.get("multi_query") and not config.get("new_decoder_architecture")
    return ModelSizes(
        layers, width, ffn, heads, kv_heads=1 if one_key else number("kv_heads", heads), vocab=number("vocab"), head_dim=head_dim,
        tied=bool(config.get("tie_word_embeddings", kind in TIED)), gated=kind not in UNGATED, learned_positions=kind in LEARNED,
        **more, latent=latent, qk_norm=kind in QK_NORM or bool(config.get("use_qk_norm") or config.get("qk_layernorm")),
        uncounted=(*towers, *other, *seen),
    )  # fmt: skip


def _windowed(config: Mapping[str, Any], kind: str, layers: int) -> int | None:
    """How many layers have a window; None where that isn't known, or where attention has sinks: GPT OSS's published runs are slower than
    with all tokens counted."""
    if kind == "gpt_oss":
        return None
    if isinstance(kinds := config.get("layer_types"), list):
        return sum(str(one).startswith(("sliding", "chunked")) for one in kinds[:layers])
    if isinstance(first := config.get("max_window_layers"), int):  # Qwen's
        return max(layers - first, 0)
    every = config.get("sliding_window_pattern", FULL.get(kind))
    return layers - (layers // every if every else 0) if isinstance(every, int) else None


def sizes_of_module(module: Any) -> ModelSizes:
    """The sizes of a transformer as a torch.nn.Module, from its config where it has one, else from its modules' shapes and attributes.

    Expects one token table (`num_embeddings`), blocks in the longest ModuleList, and an attention that says `heads` (or num_heads, n_head)
    and with grouped queries `kv_heads` (or num_key_value_heads, n_kv_heads). ValueError where these are not there.
    """
    config: Any = getattr(module, "config", None)
    if callable(getattr(config, "to_dict", None)):
        return sizes_of_config(config.to_dict(), f"the config of {type(module).__name__}")
    blocks = max((m for m in module.modules() if type(m).__name__ == "ModuleList"), key=len, default=None)
    tables = [m for m in module.modules() if hasattr(m, "num_embeddings")]
    if blocks is None or not len(blocks) or not tables:
        raise ValueError(f"{type(module).__name__} has no list of blocks or no token table; expected a decoder-only transformer, or hf:DIR")
    table, block = max(tables, key=lambda m: m.num_embeddings), blocks[0]
    heads = _attribute(block, ("heads", "num_heads", "n_head", "n_heads", "num_attention_heads"))
    if heads is None:
        raise ValueError(f"no part of {type(block).__name__} says its number of heads; expected an attribute `heads`, or give hf:DIR")
    width = int(table.embedding_dim)
    shapes = [tuple(p.shape) for p in block.parameters() if p.dim() == 2]
    kv_heads = _attribute(block, ("kv_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads")) or heads
    attention = 2 * width * width + 2 * width * (width // heads) * kv_heads
    rest = sum(a * b for a, b in shapes) - attention
    ffn = max((n for shape in shapes for n in shape if width in shape and n not in (width, 3 * width)), default=0)
    if not ffn or rest % (width * ffn):
        raise ValueError(
            f"the matrices of {type(block).__name__} are no attention and one MLP; expected those of a transformer, or give hf:DIR"
        )
    head = [p for name, p in module.named_parameters() if tuple(p.shape) == (table.num_embeddings, width)]
    return ModelSizes(
        len(blocks), width, ffn, heads, kv_heads, int(table.num_embeddings), tied=len(head) < 2, gated=rest // (width * ffn) == 3,
        learned_positions=len(tables) > 1, qk_norm=any("q_norm" in name for name, _ in block.named_parameters()),
    )  # fmt: skip


def _attribute(block: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(part, name, None) for part in block.modules() for name in names)
    return next((value for value in values if isinstance(value, int)), None)

"""Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head, no biases.

Each function returns `(module, example_inputs)` on the meta device. With `loss` the inputs are (tokens, targets) and the
module returns the mean cross entropy in float32; without, the input is (tokens,) and it returns the logits.
`with_cache` makes the program that decodes: one token for each sequence, keys and values of those before in buffers.
Names and shapes are those of the published checkpoints, less the leading `model.`. The stretching of the rotary
frequencies for contexts beyond 8192 (Llama 3.1) is left out; it changes no shape.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary(seq: int, head_width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i/head_width), both [seq, head_width], the second half like the first."""
    return rotary_at(torch.arange(seq, dtype=torch.float32, device=device), head_width, theta)


def rotary_at(positions: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """As `rotary`, at these positions."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device) / head_width)
    angles = positions[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """[B, heads, T, d] -> [B, heads * times, T, d], each head `times` times in a row: a split of the heads stays one."""
    B, heads, T, d = x.shape
    return x[:, :, None].expand(B, heads, times, T, d).reshape(B, heads * times, T, d)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_width: int, qk_norm: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.q_norm, self.k_norm = (RMSNorm(head_width) if qk_norm else nn.Identity() for _ in range(2))
        self.q_proj = nn.Linear(width, heads * head_width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_width, bias=False)
        self.o_proj = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.heads, self.head_width)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, self.kv_heads, self.head_width)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        times = self.heads // self.kv_heads
        y = F.scaled_dot_product_attention(q, repeat_heads(k, times), repeat_heads(v, times), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.heads * self.head_width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, head_width: int, qk_norm: bool = False):
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = Attention(width, heads, kv_heads, head_width, qk_norm)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        """where: what the attention needs to know of positions."""
        x = x + self.self_attn(self.input_layernorm(x), *where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(
        self, layers: int, heads: int, kv_heads: int, width: int, hidden: int, vocab: int, theta: float, head_width: int = 0,
        qk_norm: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.head_width, self.theta = head_width or width // heads, theta
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, hidden, self.head_width, qk_norm) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        # computed here and not kept as a buffer: the module then has parameters only, and can be made empty and filled
        cos, sin = (table.to(x.dtype) for table in rotary(tokens.shape[1], self.head_width, self.theta, tokens.device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


class CachedAttention(Attention):
    """Attention of one new token per sequence; `keys` and `values` are buffers [B, kv_heads, room, head_width]."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.heads, self.head_width)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, self.kv_heads, self.head_width)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        room = torch.arange(self.keys.shape[2], device=x.device)
        mask = (room <= position)[None, None, None, :].expand(B, 1, T, -1)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.heads * self.head_width))


class Decoder(Llama):
    """Llama for one token per sequence: forward(tokens [B, 1], position [1]) returns the logits [B, 1, vocab] of the next tokens."""

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = (table.to(x.dtype) for table in rotary_at(position.float(), self.head_width, self.theta))
        for layer in self.layers:
            x = layer(x, cos, sin, position)
        return self.lm_head(self.norm(x))


def with_cache(module: Llama, batch: int, room: int) -> Decoder:
    """The module that decodes with the same parameters, and with room for so many tokens of each sequence."""
    decoder = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    decoder.__class__ = Decoder
    for layer in decoder.layers:
        attention = layer.self_attn
        attention.__class__ = CachedAttention
        weight = attention.k_proj.weight
        for name in ("keys", "values"):
            zeros = torch.zeros(batch, attention.kv_heads, room, attention.head_width, dtype=weight.dtype, device=weight.device)
            attention.register_buffer(name, zeros, persistent=False)
    return decoder


def build(
    *, layers: int, heads: int, kv_heads: int, width: int, hidden: int, vocab: int, batch: int, seq: int, loss: bool, dtype: str,
    head_width: int = 0, qk_norm: bool = False,
):  # fmt: skip
    """head_width: 0: width / heads. qk_norm: queries and keys are normalized, as in Qwen3."""
    with torch.device("meta"):
        module = Llama(layers, heads, kv_heads, width, hidden, vocab, 5e5, head_width, qk_norm).to(getattr(torch, dtype))
        example_inputs = tuple(torch.empty(batch, seq, dtype=torch.int64) for _ in range(1 + loss))
    return module, example_inputs


def llama3_8b(*, batch: int = 16, seq: int = 8192, vocab: int = 128256, layers: int = 32, loss: bool = True, dtype: str = "bfloat16"):
    """8.03e9 parameters."""
    return build(layers=layers, heads=32, kv_heads=8, width=4096, hidden=14336, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def llama3_70b(*, batch: int = 16, seq: int = 8192, vocab: int = 128256, layers: int = 80, loss: bool = True, dtype: str = "bfloat16"):
    """70.6e9 parameters."""
    return build(layers=layers, heads=64, kv_heads=8, width=8192, hidden=28672, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def llama3_405b(*, batch: int = 16, seq: int = 8192, vocab: int = 128256, layers: int = 126, loss: bool = True, dtype: str = "bfloat16"):
    """405.9e9 parameters."""
    return build(layers=layers, heads=128, kv_heads=8, width=16384, hidden=53248, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def tiny(*, batch: int = 8, seq: int = 16, vocab: int = 128, layers: int = 2, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; all but the four key-value heads divides by 8."""
    return build(layers=layers, heads=8, kv_heads=4, width=64, hidden=128, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)

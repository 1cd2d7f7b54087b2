"""GPT-2: learned positions, pre-norm blocks, biases, gelu (tanh), a head tied to the token table. No dropout.

Each function returns `(module, example_inputs)` on the meta device. With `loss` the inputs are (tokens, targets) and the
module returns the mean cross entropy in float32; without, the input is (tokens,) and it returns the logits.
Names are those of the published checkpoints (wte, wpe, h.0.attn.c_attn, ...), with two differences: projections are
`nn.Linear`, so their weights are transposed, and the rows of `c_attn` are grouped head by head (see `Attention`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention with one fused projection to [heads, 3, head width]: each head's query, key and value together.

    The published order is [3, heads, head width]. There, equal parts of the rows would hold queries here and keys there;
    head by head, n equal parts of the rows are the heads of n devices, and only then can the fused weight be split.
    """

    def __init__(self, width: int, heads: int, head_width: int = 0):
        super().__init__()
        self.heads, self.head_width = heads, head_width or width // heads
        self.c_attn = nn.Linear(width, 3 * heads * self.head_width)
        self.c_proj = nn.Linear(heads * self.head_width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).view(B, T, self.heads, 3, self.head_width).unbind(3)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, self.heads * self.head_width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.c_fc = nn.Linear(width, hidden)
        self.c_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, head_width: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, head_width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, positions: int, vocab: int, hidden: int = 0, head_width: int = 0):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads, hidden or 4 * width, head_width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # tied by use: one parameter, which to_empty() cannot pull apart
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def build(
    *, layers: int, heads: int, width: int, positions: int, vocab: int, batch: int, seq: int, loss: bool, dtype: str, hidden: int = 0,
    head_width: int = 0,
):  # fmt: skip
    """hidden: of the MLP, 0: 4 * width; head_width: 0: width / heads."""
    if seq > positions:
        raise ValueError(f"seq is {seq}, but this GPT-2 has {positions} learned positions: take a shorter seq")
    with torch.device("meta"):
        module = GPT2(layers, heads, width, positions, vocab, hidden, head_width).to(getattr(torch, dtype))
        example_inputs = tuple(torch.empty(batch, seq, dtype=torch.int64) for _ in range(1 + loss))
    return module, example_inputs


def small(*, batch: int = 16, seq: int = 128, vocab: int = 50257, layers: int = 12, loss: bool = True, dtype: str = "float32"):
    """The 124M model."""
    return build(layers=layers, heads=12, width=768, positions=1024, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def medium(*, batch: int = 16, seq: int = 128, vocab: int = 50257, layers: int = 24, loss: bool = True, dtype: str = "float32"):
    """The 355M model."""
    return build(layers=layers, heads=16, width=1024, positions=1024, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def large(*, batch: int = 16, seq: int = 128, vocab: int = 50257, layers: int = 36, loss: bool = True, dtype: str = "float32"):
    """The 774M model."""
    return build(layers=layers, heads=20, width=1280, positions=1024, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def xl(*, batch: int = 16, seq: int = 128, vocab: int = 50257, layers: int = 48, loss: bool = True, dtype: str = "float32"):
    """The 1.5B model. Its 25 heads divide by 5 only: 8 devices can't take the heads apart."""
    return build(layers=layers, heads=25, width=1600, positions=1024, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def tiny(*, batch: int = 8, seq: int = 16, vocab: int = 128, layers: int = 2, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; heads, width, batch and vocabulary divide by 8."""
    return build(layers=layers, heads=8, width=64, positions=64, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def initialised(module: GPT2, seed: int = 0) -> GPT2:
    """The module on the CPU with its first weights, drawn as published: N(0, 0.02), norms 1, biases 0; without the scaling by depth."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(float("ln" in name and name.endswith("weight")))
    return module

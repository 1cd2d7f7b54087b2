"""BERT: token, position and segment embeddings, post-norm blocks, gelu, a masked-language head tied to the token table.

Each function returns `(module, example_inputs)` on the meta device. With `loss` the inputs are (tokens, segments, targets)
and the module returns the mean cross entropy in float32 over the targets that aren't -100; without, the inputs are
(tokens, segments) and it returns the logits. No padding mask, no pooler, no dropout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-12  # of every norm, as published


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, H = x.shape
        q = self.query(x).view(B, T, self.heads, H // self.heads).transpose(1, 2)
        k = self.key(x).view(B, T, self.heads, H // self.heads).transpose(1, 2)
        v = self.value(x).view(B, T, self.heads, H // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.output(y.transpose(1, 2).reshape(B, T, H))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class Embeddings(nn.Module):
    def __init__(self, width: int, positions: int, vocab: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.tokens(tokens) + self.segments(segments) + self.positions(positions))


class Head(nn.Module):
    """Scores every word: a dense layer with gelu and norm, then the token table (handed in: it is tied) and a bias."""

    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(x))), table, self.bias)


class BERT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, positions: int, vocab: int):
        super().__init__()
        self.embeddings = Embeddings(width, positions, vocab)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = Head(width, vocab)

    def forward(self, tokens: Tensor, segments: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embeddings(tokens, segments)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x, self.embeddings.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def build(*, layers: int, heads: int, width: int, positions: int, vocab: int, batch: int, seq: int, loss: bool, dtype: str):
    if seq > positions:
        raise ValueError(f"seq is {seq}, but this BERT has {positions} learned positions: take a shorter seq")
    with torch.device("meta"):
        module = BERT(layers, heads, width, positions, vocab).to(getattr(torch, dtype))
        example_inputs = tuple(torch.empty(batch, seq, dtype=torch.int64) for _ in range(2 + loss))
    return module, example_inputs


def base(*, batch: int = 32, seq: int = 512, vocab: int = 30522, layers: int = 12, loss: bool = True, dtype: str = "float32"):
    """The 110M model."""
    return build(layers=layers, heads=12, width=768, positions=512, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def large(*, batch: int = 32, seq: int = 512, vocab: int = 30522, layers: int = 24, loss: bool = True, dtype: str = "float32"):
    """The 340M model."""
    return build(layers=layers, heads=16, width=1024, positions=512, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)


def tiny(*, batch: int = 8, seq: int = 16, vocab: int = 128, layers: int = 2, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; heads, width, batch and vocabulary divide by 8."""
    return build(layers=layers, heads=8, width=64, positions=64, vocab=vocab, batch=batch, seq=seq, loss=loss, dtype=dtype)

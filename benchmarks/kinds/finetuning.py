"""A small language model and what people train on top of it, with the rest frozen; distillation, and a loss of preferences."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import TRAINING, stranger_class

WORDS, WIDTH = 48, 32


def ids(batch=8, length=12):
    return torch.randint(1, WORDS, (batch, length))


def text():
    return (ids(),)


class Block(nn.Module):
    """Grouped queries, rotary positions, a gated feed-forward."""

    def __init__(self, heads=4, groups=2):
        super().__init__()
        d = WIDTH // heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n * d, bias=False) for n in (heads, groups, groups, heads))
        self.up, self.gate, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.n1, self.n2, self.d = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), d

    def turned(self, x):
        at = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)
        angle = torch.outer(at, 10000.0 ** (-torch.arange(0, self.d, 2, device=x.device) / self.d))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.d)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(layers)), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def hidden(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, tokens):
        return self.head(self.hidden(self.embed(tokens)))

    def forward(self, tokens):
        logits = self.logits(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) if self.training else logits

    def log_probs(self, tokens):
        return self.logits(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def each_linear(module, names, make):
    """Every linear layer of these names, replaced."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, make(child))
    return module


class LoRA(nn.Module):
    def __init__(self, base, r=4):
        super().__init__()
        self.base = base
        self.A, self.B = nn.Parameter(torch.randn(r, base.in_features) / r), nn.Parameter(torch.randn(base.out_features, r) * 0.02)

    def forward(self, x):
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.A), self.B)


@stranger_class("lora_all", text)
class LoraLM(LM):
    """On every linear layer, all else frozen."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        each_linear(self, "q k v o up gate down".split(), LoRA)


@stranger_class("lora_qv", text)
class LoraQueryValue(LM):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        each_linear(self, ("q", "v"), LoRA)


@stranger_class("bitfit", text)
class BitFit(LM):
    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


@stranger_class("partly_frozen", text)
class LastLayerOnly(LM):
    """The last block and its norm; the embedding that is also the head stays frozen."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)
        self.norm.requires_grad_(True)


@stranger_class("distillation", text, modes=(TRAINING,))
class Distillation(nn.Module):
    """A frozen teacher of two layers, a student of one: softened logits, hidden states."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student, self.map = LM(2).requires_grad_(False), LM(1), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        with torch.no_grad():
            wise = self.teacher.hidden(self.teacher.embed(tokens))
            target = F.softmax(self.teacher.head(wise) / 2, -1)
        h = self.student.hidden(self.student.embed(tokens))
        logits = self.student.head(h)
        hard = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        soft = F.kl_div(F.log_softmax(logits / 2, -1), target, reduction="batchmean") * 4
        return 0.5 * hard + 0.5 * soft + F.mse_loss(self.map(h), wise)


@stranger_class("kto_orpo", lambda: (ids(), ids(), torch.rand(8, 11)), modes=(TRAINING,))
class OddsRatio(LM):
    """ORPO: no reference, the odds of the better answer over the worse."""

    def __init__(self):
        super().__init__(1)

    def forward(self, chosen, rejected, weight):
        a, b = ((self.log_probs(x) * weight).sum(-1) / weight.sum(-1) for x in (chosen, rejected))
        odds = (a - b) - (torch.log1p(-a.exp().clamp(max=0.999)) - torch.log1p(-b.exp().clamp(max=0.999)))
        return (-a - 0.1 * F.logsigmoid(odds)).mean()

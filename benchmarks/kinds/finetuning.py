"""A small language model and what people train on top of it, with the rest frozen, and the losses of preferences."""

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


class DoRA(LoRA):
    def __init__(self, base, r=4):
        super().__init__(base, r)
        self.m = nn.Parameter(base.weight.norm(dim=1).detach().clone())

    def forward(self, x):
        W = self.base.weight + self.B @ self.A
        return F.linear(x, (self.m / W.norm(dim=1).detach()).unsqueeze(1) * W, self.base.bias)


@stranger_class("dora", text)
class DoraLM(LM):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        each_linear(self, ("q", "v", "down"), DoRA)


class IA3(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(base.out_features))

    def forward(self, x):
        return self.base(x) * self.scale


@stranger_class("ia3", text)
class Ia3LM(LM):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        each_linear(self, ("k", "v", "up"), IA3)


class VeRA(nn.Module):
    """Random matrices that all layers share, two vectors each."""

    def __init__(self, base, A, B):
        super().__init__()
        self.base, self.A, self.B = base, A, B
        self.d, self.b = nn.Parameter(torch.full((8,), 0.1)), nn.Parameter(torch.full((base.out_features,), 0.1))

    def forward(self, x):
        return self.base(x) + self.b * F.linear(self.d * F.linear(x, self.A), self.B[: self.base.out_features])


@stranger_class("vera", text)
class VeraLM(LM):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        A, B = nn.Parameter(torch.randn(8, WIDTH), False), nn.Parameter(torch.randn(WIDTH, 8), False)
        each_linear(self, ("q", "v"), lambda base: VeRA(base, A, B))


class Bottleneck(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.out_features, 8), nn.Linear(8, base.out_features)
        nn.init.normal_(self.up.weight, std=1e-3)

    def forward(self, x):
        y = self.base(x)
        return y + self.up(F.gelu(self.down(y)))


@stranger_class("adapters", text)
class AdapterLM(LM):
    """After attention and feed-forward; the norms are trained, too."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        each_linear(self, ("o", "down"), Bottleneck)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.requires_grad_(True)


@stranger_class("bitfit", text)
class BitFit(LM):
    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


@stranger_class("prompt_tuning", text)
class PromptTuning(LM):
    """Learned vectors before the text."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(4, WIDTH) * 0.1)

    def logits(self, tokens):
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        return self.head(self.hidden(x)[:, 4:])


@stranger_class("prefix_tuning", text)
class PrefixTuning(nn.Module):
    """Keys and values of every layer before the text, made by a small net."""

    def __init__(self, layers=2, heads=4):
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(layers)),
        )
        self.requires_grad_(False)
        self.prefix, self.net, self.heads = (
            nn.Embedding(4, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, layers * 2 * WIDTH)),
            heads,
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        B, T, W = x.shape
        past = self.net(self.prefix(torch.arange(4, device=x.device))).view(4, len(self.layers), 2, self.heads, -1).permute(1, 2, 3, 0, 4)
        mask = torch.ones(T, T + 4, dtype=torch.bool, device=x.device).tril(4)
        for (qkv, out), (pk, pv) in zip(self.layers, past):
            q, k, v = qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            k, v = torch.cat([pk.expand(B, -1, -1, -1), k], 2), torch.cat([pv.expand(B, -1, -1, -1), v], 2)
            x = x + out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, T, W))
        logits = x @ self.embed.weight.t()
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:]) if self.training else logits


class Int8Linear(nn.Module):
    """Weights as bytes with a scale per block of 8 columns."""

    def __init__(self, base):
        super().__init__()
        blocks = base.weight.detach().view(base.out_features, -1, 8)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("quantized", (blocks / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, (self.quantized.to(self.scale.dtype) * self.scale).flatten(1))

    in_features = property(lambda self: self.quantized.shape[1] * 8)
    out_features = property(lambda self: self.quantized.shape[0])


@stranger_class("lora_int8", text)
class QuantizedLora(LM):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        each_linear(self, ("q", "k", "v", "o"), lambda base: LoRA(Int8Linear(base)))


@stranger_class("linear_probe", lambda: (torch.randn(8, 3, 16, 16),), lambda: (torch.randint(0, 4, (8,)),))
class LinearProbe(nn.Module):
    """Frozen convolutions whose batch norms stay in evaluation."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU()
        ).requires_grad_(False)
        self.head = nn.Linear(32, 4)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x, label=None):
        logits = self.head(self.backbone(x).mean((2, 3)))
        return logits if label is None else F.cross_entropy(logits, label)


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


@stranger_class("dpo", lambda: (ids(), ids(), torch.rand(8, 11) < 0.7, torch.rand(8, 11) < 0.7), modes=(TRAINING,))
class DPO(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.reference = LM(1), LM(1).requires_grad_(False)

    def forward(self, chosen, rejected, mask_chosen, mask_rejected):
        both, mask = torch.cat([chosen, rejected]), torch.cat([mask_chosen, mask_rejected])
        mine = (self.policy.log_probs(both) * mask).sum(-1)
        with torch.no_grad():
            theirs = (self.reference.log_probs(both) * mask).sum(-1)
        better, worse = (mine - theirs).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()


@stranger_class("reward_model", lambda: (ids(), torch.randint(3, 12, (8,))), lambda: (ids(), torch.randint(3, 12, (8,))))
class RewardModel(nn.Module):
    """Bradley and Terry: the score at the last token of each."""

    def __init__(self):
        super().__init__()
        self.model, self.score = LM(1), nn.Linear(WIDTH, 1)

    def reward(self, tokens, length):
        h = self.score(self.model.hidden(self.model.embed(tokens))).squeeze(-1)
        return h[torch.arange(len(h), device=h.device), length - 1]

    def forward(self, a, length, b=None, other=None):
        good = self.reward(a, length)
        if b is None:
            return good
        bad = self.reward(b, other)
        return -F.logsigmoid(good - bad).mean() + 0.01 * (good + bad).square().mean()


@stranger_class(
    "grpo", lambda: (ids(), torch.randn(8), torch.randn(8, 11) - 4, torch.randn(8, 11) - 4, torch.rand(8, 11) < 0.7), modes=(TRAINING,)
)
class GRPO(nn.Module):
    """Groups of four answers, a clipped ratio, the k3 estimate of the divergence."""

    def __init__(self):
        super().__init__()
        self.policy = LM(1)

    def forward(self, tokens, reward, old, reference, mask):
        groups = reward.view(-1, 4)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logp = self.policy.log_probs(tokens)
        ratio = (logp - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (reference - logp).exp() - (reference - logp) - 1
        return (-(gain - 0.04 * kl) * mask).sum(1).div(mask.sum(1).clamp(min=1)).mean()


@stranger_class("kto_orpo", lambda: (ids(), ids(), torch.rand(8, 11)), modes=(TRAINING,))
class OddsRatio(LM):
    """ORPO: no reference, the odds of the better answer over the worse."""

    def __init__(self):
        super().__init__(1)

    def forward(self, chosen, rejected, weight):
        a, b = ((self.log_probs(x) * weight).sum(-1) / weight.sum(-1) for x in (chosen, rejected))
        odds = (a - b) - (torch.log1p(-a.exp().clamp(max=0.999)) - torch.log1p(-b.exp().clamp(max=0.999)))
        return (-a - 0.1 * F.logsigmoid(odds)).mean()

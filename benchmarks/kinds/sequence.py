"""Mixers of sequences that are no softmax attention, and models that leave layers out."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


def sequence():
    return (torch.randn(8, 16, 32),)


def short():
    """For those that loop over the steps."""
    return (torch.randn(8, 6, 32),)


class Mixer(nn.Module):
    """Its loss is the error of the next step."""

    def forward(self, x):
        y = self.mix(x)
        return F.mse_loss(y[:, :-1], x[:, 1:]) if self.training else y


@stranger_class("selective_scan", short)
class SelectiveScan(Mixer):
    """Mamba by a loop over the steps."""

    def __init__(self, width=32, inner=32, state=8):
        super().__init__()
        self.inp, self.conv = nn.Linear(width, 2 * inner, bias=False), nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.bcdt, self.dt = nn.Linear(inner, 2 * state + 4, bias=False), nn.Linear(4, inner)
        self.A_log, self.D = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(inner, 1)), nn.Parameter(torch.ones(inner))
        self.out, self.state = nn.Linear(inner, width, bias=False), state

    def mix(self, x):
        T = x.shape[1]
        u, z = self.inp(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :T].transpose(1, 2))
        B, C, dt = self.bcdt(u).split([self.state, self.state, 4], -1)
        dt = F.softplus(self.dt(dt))
        A = torch.exp(dt.unsqueeze(-1) * -self.A_log.exp())
        Bu = (dt * u).unsqueeze(-1) * B.unsqueeze(2)
        h, ys = torch.zeros_like(A[:, 0]), []
        for t in range(T):
            h = A[:, t] * h + Bu[:, t]
            ys.append((h * C[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(ys, 1) + u * self.D
        return self.out(y * F.silu(z))


@stranger_class("s4d", sequence)
class S4D(Mixer):
    """A diagonal state space with complex poles, as one long convolution."""

    def __init__(self, width=32, state=8):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) * 3 - 5)
        self.C = nn.Parameter(torch.randn(width, state, 2) * 0.5)
        self.log_A, self.A_imag = (
            nn.Parameter(torch.full((width, state), math.log(0.5))),
            nn.Parameter(math.pi * torch.arange(state).repeat(width, 1).float()),
        )
        self.D, self.out = nn.Parameter(torch.randn(width)), nn.Linear(width, 2 * width)

    def mix(self, x):
        L = x.shape[1]
        A = torch.complex(-self.log_A.exp(), self.A_imag)
        dtA = A * self.log_dt.exp().unsqueeze(-1)
        C = torch.view_as_complex(self.C) * (dtA.exp() - 1) / A
        K = 2 * torch.einsum("hn,hnl->hl", C, torch.exp(dtA.unsqueeze(-1) * torch.arange(L, device=x.device))).real
        u = x.transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * L) * torch.fft.rfft(K, n=2 * L), n=2 * L)[..., :L] + u * self.D[:, None]
        return F.glu(self.out(F.gelu(y).transpose(1, 2)), -1)


@stranger_class("hyena", sequence)
class Hyena(Mixer):
    def __init__(self, width=32, length=16):
        super().__init__()
        self.inp, self.short = nn.Linear(width, 3 * width), nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.filter = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, width))
        t = torch.linspace(0, 1, length)[:, None]
        self.register_buffer("pos", torch.cat([t, *[f(2 * math.pi * k * t) for k in (1, 2) for f in (torch.sin, torch.cos)]], 1))
        self.register_buffer("decay", torch.exp(-t * torch.linspace(1, 4, width)))
        self.out = nn.Linear(width, width)

    def mix(self, x):
        L = x.shape[1]
        q, k, v = self.short(self.inp(x).transpose(1, 2))[..., :L].chunk(3, 1)
        h = (self.filter(self.pos) * self.decay).t()
        y = torch.fft.irfft(torch.fft.rfft(k * v, n=2 * L) * torch.fft.rfft(h, n=2 * L), n=2 * L)[..., :L]
        return self.out((q * y).transpose(1, 2))


@stranger_class("rwkv_own", short)
class TimeMix(Mixer):
    """RWKV's weighted sum with its running maximum."""

    def __init__(self, width=32):
        super().__init__()
        self.decay, self.first = nn.Parameter(-torch.rand(width) * 3), nn.Parameter(torch.randn(width) * 0.1)
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.rand(1, 1, width)) for _ in range(3))
        self.k, self.v, self.r, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def mix(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (f(torch.lerp(before, x, m)) for f, m in ((self.k, self.mix_k), (self.v, self.mix_v), (self.r, self.mix_r)))
        num, den, top, w, out = (
            torch.zeros_like(k[:, 0]),
            torch.zeros_like(k[:, 0]),
            torch.full_like(k[:, 0], -1e38),
            self.decay.exp().neg(),
            [],
        )
        for t in range(x.shape[1]):
            q = torch.maximum(top, self.first + k[:, t])
            a, b = torch.exp(top - q), torch.exp(self.first + k[:, t] - q)
            out.append((a * num + b * v[:, t]) / (a * den + b))
            q = torch.maximum(top + w, k[:, t])
            a, b = torch.exp(top + w - q), torch.exp(k[:, t] - q)
            num, den, top = a * num + b * v[:, t], a * den + b, q
        return self.o(torch.sigmoid(r) * torch.stack(out, 1))


@stranger_class("mlstm", sequence)
class MLSTM(Mixer):
    """xLSTM's matrix memory, in parallel over the steps."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.qkv, self.gates, self.out, self.heads = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 2 * heads),
            nn.Linear(width, width),
            heads,
        )
        self.norm = nn.GroupNorm(heads, width)

    def mix(self, x):
        B, T, W = x.shape
        q, k, v = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        i, f = self.gates(x).transpose(1, 2).chunk(2, 1)
        F_ = torch.cumsum(F.logsigmoid(f), -1)
        D = F_.unsqueeze(-1) - F_.unsqueeze(-2) + i.unsqueeze(-2)
        D = D.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        m = D.max(-1, keepdim=True).values
        S = q @ k.transpose(-1, -2) / math.sqrt(W // self.heads) * torch.exp(D - m)
        y = S @ v / torch.maximum(S.sum(-1, keepdim=True).abs(), torch.exp(-m))
        y = self.norm(y.transpose(1, 2).reshape(B * T, W)).view(B, T, W)
        return self.out(y)


@stranger_class("slstm", short)
class SLSTM(Mixer):
    """xLSTM's scalar memory with exponential gates: heads with recurrent weights of their own."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.w, self.r, self.heads = (
            nn.Linear(width, 4 * width),
            nn.Parameter(torch.randn(heads, width // heads, 4 * width // heads) * 0.1),
            heads,
        )

    def mix(self, x):
        B, T, W = x.shape
        gates = self.w(x).view(B, T, self.heads, -1)
        h = c = n = torch.zeros(B, self.heads, W // self.heads, device=x.device, dtype=x.dtype)
        m, out = torch.zeros_like(h), []
        for t in range(T):
            z, i, f, o = (gates[:, t] + torch.einsum("bhd,hde->bhe", h, self.r)).chunk(4, -1)
            f = F.logsigmoid(f)
            top = torch.maximum(f + m, i)
            i, f, m = (i - top).exp(), (f + m - top).exp(), top
            c, n = f * c + i * z.tanh(), f * n + i
            h = o.sigmoid() * c / n.clamp(min=1e-6)
            out.append(h.flatten(1))
        return torch.stack(out, 1)


@stranger_class("linear_attention", sequence)
class LinearAttention(Mixer):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width), heads

    def mix(self, x):
        B, T, W = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        z = 1 / (torch.einsum("bthd,bthd->bth", q, k.cumsum(1)) + 1e-6)
        return self.out(torch.einsum("bthd,bthde,bth->bthe", q, kv, z).flatten(2))


@stranger_class("performer", sequence)
class Performer(LinearAttention):
    """Positive random features, not causal."""

    def __init__(self):
        super().__init__()
        self.register_buffer("projection", torch.linalg.qr(torch.randn(8, 8))[0])

    def features(self, x):
        u = x / x.shape[-1] ** 0.25 @ self.projection
        return torch.exp(u - x.square().sum(-1, keepdim=True) / 2 - u.amax((-1, -3), keepdim=True).detach()) + 1e-4

    def mix(self, x):
        B, T, W = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).unbind(2)
        q, k = self.features(q), self.features(k)
        y = torch.einsum("bthd,bhde->bthe", q, torch.einsum("bthd,bthe->bhde", k, v)) / torch.einsum(
            "bthd,bhd->bth", q, k.sum(1)
        ).unsqueeze(-1)
        return self.out(y.reshape(B, T, W))


@stranger_class("retention", sequence)
class Retention(Mixer):
    """Retention in parallel: decay per head, group norm, a gate."""

    def __init__(self, width=32, heads=4, length=16):
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.norm, self.heads = nn.GroupNorm(heads, width, affine=False), heads
        gamma = 1 - 2.0 ** (-5 - torch.arange(heads).float())
        n = torch.arange(length)[:, None] - torch.arange(length)[None]
        self.register_buffer("decay", torch.where(n >= 0, gamma[:, None, None] ** n.clamp(min=0), 0.0))

    def mix(self, x):
        B, T, W = x.shape
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT * k.shape[-1] ** -0.5 * self.decay
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
        y = (scores @ v).transpose(1, 2).reshape(B * T, W)
        return self.o(F.silu(self.g(x)) * self.norm(y).view(B, T, W))


@stranger_class("delta_net", short)
class DeltaNet(Mixer):
    """A memory that each step corrects by what it predicted."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.beta, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 1), nn.Linear(width, width)

    def mix(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, beta, out = F.normalize(k, dim=-1), self.beta(x).sigmoid(), []
        S = x.new_zeros(len(x), x.shape[-1], x.shape[-1])
        for t in range(x.shape[1]):
            error = v[:, t] - torch.einsum("bde,bd->be", S, k[:, t])
            S = S + torch.einsum("bd,be->bde", k[:, t], beta[:, t] * error)
            out.append(torch.einsum("bde,bd->be", S, q[:, t]))
        return self.out(torch.stack(out, 1))


@stranger_class("mixture_of_depths", sequence)
class MixtureOfDepths(Mixer):
    """Half of the tokens, the best by the router, go through the block; the others pass."""

    def __init__(self, width=32):
        super().__init__()
        self.router, self.block = (
            nn.Linear(width, 1),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)),
        )

    def mix(self, x):
        weight = self.router(x).squeeze(-1)
        best, index = weight.topk(x.shape[1] // 2, dim=1)
        index, order = index.sort(dim=1)
        where = index.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        y = self.block(x.gather(1, where)) * best.gather(1, order).sigmoid().unsqueeze(-1)
        return x.scatter_add(1, where, y)


@stranger_class("expert_choice", sequence)
class ExpertChoice(Mixer):
    """Experts choose their tokens."""

    def __init__(self, width=32, experts=4):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, experts),
            nn.Parameter(torch.randn(experts, width, 64) * 0.1),
            nn.Parameter(torch.randn(experts, 64, width) * 0.1),
        )

    def mix(self, x):
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        weight, index = scores.t().topk(len(flat) // 4, dim=-1)
        y = torch.bmm(F.gelu(torch.bmm(flat[index], self.up)), self.down) * weight.unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, index.flatten(), y.flatten(0, 1)).view_as(x)


@stranger_class("universal_transformer", sequence)
class UniversalTransformer(Mixer):
    """One layer again and again, each token until it halts."""

    def __init__(self, width=32):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.halt = nn.Linear(width, 1)

    def mix(self, x):
        left, total = torch.ones(*x.shape[:2], 1, dtype=x.dtype, device=x.device), torch.zeros_like(x)
        for _ in range(3):
            x = self.layer(x)
            p = self.halt(x).sigmoid() * left
            total, left = total + p * x, left - p
        return total + left * x


@stranger_class("gmlp", sequence)
class GatedMLP(Mixer):
    def __init__(self, width=32, length=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(32, width)
        self.inner, self.space = nn.LayerNorm(32), nn.Conv1d(length, length, 1)

    def mix(self, x):
        u, v = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(u * self.space(self.inner(v)))


@stranger_class("sliding_chunks", sequence)
class SlidingChunks(Mixer):
    """Longformer's window: keys of the chunk before, this one and the next, by unfold."""

    def __init__(self, width=32, chunk=4):
        super().__init__()
        self.q, self.k, self.v, self.chunk = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width), chunk

    def mix(self, x):
        B, T, W = x.shape
        w = self.chunk
        q = self.q(x).view(B, T // w, w, W)
        k, v = (F.pad(f(x), (0, 0, w, w)).unfold(1, 3 * w, w).transpose(2, 3) for f in (self.k, self.v))
        inside = F.pad(torch.ones(T, dtype=torch.bool, device=x.device), (w, w)).unfold(0, 3 * w, w)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(W)).masked_fill(~inside[None, :, None], -1e9)
        return (scores.softmax(-1) @ v).reshape(B, T, W)


@stranger_class("linformer", sequence)
class Linformer(Mixer):
    def __init__(self, width=32, length=16, rank=4):
        super().__init__()
        self.qkv, self.E, self.F = (
            nn.Linear(width, 3 * width),
            nn.Parameter(torch.randn(rank, length) / 4),
            nn.Parameter(torch.randn(rank, length) / 4),
        )

    def mix(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, self.E @ k, self.F @ v)
        return y.transpose(1, 2).flatten(2)


@stranger_class("reformer_hash", sequence)
class HashedAttention(Mixer):
    """Tokens sorted by a hash attend within their chunk."""

    def __init__(self, width=32, buckets=4):
        super().__init__()
        self.qk, self.v = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("turns", torch.randn(width, buckets // 2))

    def mix(self, x):
        B, T, W = x.shape
        qk, v = self.qk(x), self.v(x)
        h = qk @ self.turns
        order = torch.cat([h, -h], -1).argmax(-1).argsort(dim=-1, stable=True)
        undo = order.argsort(-1)
        take = order.unsqueeze(-1).expand(-1, -1, W)
        q, v = (p.gather(1, take).view(B, 4, T // 4, W) for p in (qk, v))
        y = (q @ F.normalize(q, dim=-1).mT / math.sqrt(W)).softmax(-1) @ v
        return y.view(B, T, W).gather(1, undo.unsqueeze(-1).expand(-1, -1, W))

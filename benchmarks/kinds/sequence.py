"""Mixers of sequences that are no plain softmax attention."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


def sequence():
    return (torch.randn(8, 16, 32),)


class Mixer(nn.Module):
    """Its loss is the error of the next step."""

    def forward(self, x):
        y = self.mix(x)
        return F.mse_loss(y[:, :-1], x[:, 1:]) if self.training else y


@stranger_class("s4d", sequence)
class S4D(Mixer):
    """A diagonal state space with complex poles, as one long convolution."""

    def __init__(self, width=32, state=8):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) * 3 - 5)
        self.C = nn.Parameter(torch.randn(width, state, 2) * 0.5)
        self.log_A = nn.Parameter(torch.full((width, state), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(state).repeat(width, 1).float())
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

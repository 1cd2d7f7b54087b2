"""Forecasters of time series."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


def past(length=32, channels=4, batch=8):
    return (torch.randn(batch, length, channels),)


def future(length=8, channels=4, batch=8):
    return (torch.randn(batch, length, channels),)


class Forecaster(nn.Module):
    def forward(self, x, target=None):
        y = self.forecast(x)
        return y if target is None else F.mse_loss(y, target)


@stranger_class("nhits", lambda: (torch.randn(8, 32),), lambda: (torch.randn(8, 8),))
class NHiTS(Forecaster):
    """Pooled at several rates, forecasts interpolated."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(32 // k, 32), nn.ReLU(), nn.Linear(32, 32 + 8 // k)) for k in (4, 2, 1))

    def forecast(self, x):
        total = 0
        for net, k in zip(self.nets, (4, 2, 1)):
            back, knots = net(F.max_pool1d(x.unsqueeze(1), k, k).squeeze(1)).split([32, 8 // k], -1)
            total = total + F.interpolate(knots.unsqueeze(1), size=8, mode="linear", align_corners=False).squeeze(1)
            x = x - back
        return total


@stranger_class("patch_tst", past, future)
class PatchTST(Forecaster):
    """Channels apart, patches by unfold, instance normalization that is undone."""

    def __init__(self, width=32):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.embed, self.pos = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) * 0.02)
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(8 * width, 8)

    def forecast(self, x):
        mean, std = x.mean(1, keepdim=True).detach(), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        h = ((x - mean) / std * self.weight + self.bias).transpose(1, 2)
        h = F.pad(h, (0, 4), mode="replicate").unfold(-1, 8, 4)
        h = self.layer((self.embed(h) + self.pos).flatten(0, 1)).view(len(x), 4, -1)
        y = self.head(h).transpose(1, 2)
        return (y - self.bias) / (self.weight + 1e-10) * std + mean


@stranger_class("deep_ar", lambda: (torch.randn(8, 16, 1), torch.randint(0, 20, (8,))), lambda: (torch.randint(0, 9, (8, 16)).float(),))
class DeepAR(nn.Module):
    """An LSTM with a negative binomial at each step."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(9, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x, item, count=None):
        h, _ = self.lstm(torch.cat([x, self.embed(item).unsqueeze(1).expand(-1, 16, -1)], -1))
        mu, alpha = F.softplus(self.out(h)).unbind(-1)
        if count is None:
            return mu, alpha
        r = 1 / (alpha + 1e-3)
        logp = (
            torch.lgamma(count + r)
            - torch.lgamma(r)
            - torch.lgamma(count + 1)
            + r * torch.log(r / (r + mu))
            + count * torch.log(mu / (r + mu) + 1e-9)
        )
        return -logp.mean()


@stranger_class("fusion_transformer", lambda: (torch.randn(8, 12, 5), torch.randn(8, 3)), lambda: (torch.randn(8, 4),))
class FusionTransformer(nn.Module):
    """Gated residuals, variables selected by a softmax, quantiles."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(1, width) for _ in range(5))
        self.select, self.static, self.lstm = nn.Linear(5 * width + width, 5), nn.Linear(3, width), nn.LSTM(width, width, batch_first=True)
        self.gate, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)
        self.attention, self.out = nn.MultiheadAttention(width, 2, batch_first=True), nn.Linear(width, 12)

    def forward(self, x, static, target=None):
        s = F.elu(self.static(static))
        e = torch.stack([f(x[..., k : k + 1]) for k, f in enumerate(self.embed)], -2)
        weight = self.select(torch.cat([e.flatten(-2), s.unsqueeze(1).expand(-1, 12, -1)], -1)).softmax(-1)
        h = (e * weight.unsqueeze(-1)).sum(-2)
        y, _ = self.lstm(h, (s.unsqueeze(0), torch.zeros_like(s).unsqueeze(0)))
        h = self.norm(h + F.glu(self.gate(y), -1))
        h = h + self.attention(h, h, h, attn_mask=torch.ones(12, 12, dtype=torch.bool, device=x.device).triu(1))[0]
        quantiles = self.out(h[:, -1]).view(-1, 4, 3)
        if target is None:
            return quantiles
        tau, error = torch.tensor([0.1, 0.5, 0.9], device=x.device, dtype=x.dtype), target.unsqueeze(-1) - quantiles
        return torch.maximum(tau * error, (tau - 1) * error).mean()

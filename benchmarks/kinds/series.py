"""Forecasters of time series."""

import math

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


@stranger_class("tcn", past, future)
class TCN(Forecaster):
    """Dilated causal convolutions with weight norm, chomped at the end."""

    def __init__(self, width=16):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(4 if k == 0 else width, width, 3, padding=2 * 2**k, dilation=2**k)) for k in range(3))
        self.skip, self.head = nn.Conv1d(4, width, 1), nn.Linear(width, 32)

    def forecast(self, x):
        h = x.transpose(1, 2)
        for k, conv in enumerate(self.convs):
            h = F.relu(F.relu(conv(h)[..., : -2 * 2**k]) + (self.skip(h) if k == 0 else h))
        return self.head(h[..., -1]).view(-1, 8, 4)


@stranger_class("nbeats", lambda: (torch.randn(8, 32),), lambda: (torch.randn(8, 8),))
class NBeats(Forecaster):
    """A trend and a season by bases, a generic block; what each explains is subtracted."""

    def __init__(self):
        super().__init__()
        t, T = torch.arange(32) / 40, torch.arange(32, 40) / 40
        trend = [torch.stack([s**k for k in range(3)]) for s in (t, T)]
        season = [torch.cat([f(2 * math.pi * k * s)[None] for k in range(1, 4) for f in (torch.sin, torch.cos)]) for s in (t, T)]
        for name, (back, fore) in {"trend": trend, "season": season}.items():
            self.register_buffer(f"{name}_back", back)
            self.register_buffer(f"{name}_fore", fore)
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, n)) for n in (6, 12, 40))

    def forecast(self, x):
        total = 0
        for net, name in zip(self.nets, ("trend", "season", None)):
            theta = net(x)
            if name:
                a, b = theta.chunk(2, -1)
                back, fore = a @ getattr(self, f"{name}_back"), b @ getattr(self, f"{name}_fore")
            else:
                back, fore = theta.split([32, 8], -1)
            x, total = x - back, total + fore
        return total


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
        self.layer, self.head = (
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, activation="gelu"),
            nn.Linear(8 * width, 8),
        )

    def forecast(self, x):
        mean, std = x.mean(1, keepdim=True).detach(), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        h = ((x - mean) / std * self.weight + self.bias).transpose(1, 2)
        h = F.pad(h, (0, 4), mode="replicate").unfold(-1, 8, 4)
        h = self.layer((self.embed(h) + self.pos).flatten(0, 1)).view(len(x), 4, -1)
        y = self.head(h).transpose(1, 2)
        return (y - self.bias) / (self.weight + 1e-10) * std + mean


@stranger_class("informer", lambda: (torch.randn(8, 16, 16), torch.randint(0, 16, (16, 6))))
class ProbSparse(nn.Module):
    """The few queries that matter, by a sample of keys; the rest get the mean; then distilled by a pool."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.q, self.k, self.v, self.heads = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width), heads
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1, padding_mode="circular"), nn.BatchNorm1d(width)

    def forward(self, x, sample, top=5):
        B, T, W = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = k[:, :, sample]
        scores = torch.matmul(q.unsqueeze(-2), seen.transpose(-2, -1)).squeeze(-2)
        M = scores.max(-1)[0] - scores.sum(-1) / T
        best = M.topk(top, sorted=False)[1]
        rows, heads = torch.arange(B, device=x.device)[:, None, None], torch.arange(self.heads, device=x.device)[None, :, None]
        chosen = torch.softmax(q[rows, heads, best] @ k.transpose(-2, -1) / math.sqrt(W // self.heads), -1) @ v
        context = v.mean(-2, keepdim=True).expand(-1, -1, T, -1).clone()
        context[rows, heads, best] = chosen.type_as(context)
        y = context.transpose(1, 2).reshape(B, T, W)
        y = F.max_pool1d(F.elu(self.norm(self.conv(y.transpose(1, 2)))), 3, 2, 1).transpose(1, 2)
        return y.square().mean() if self.training else y


@stranger_class("autoformer", past, future)
class AutoCorrelation(Forecaster):
    """Moving averages apart, delays by the Fourier transform of the correlation, rolled by what is strongest."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.q, self.k, self.v = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.trend = nn.Linear(width, 4), nn.Linear(32, 8)

    @staticmethod
    def apart(x, size=5):
        padded = torch.cat([x[:, :1].repeat(1, size // 2, 1), x, x[:, -1:].repeat(1, size // 2, 1)], 1)
        trend = F.avg_pool1d(padded.transpose(1, 2), size, 1).transpose(1, 2)
        return x - trend, trend

    def forecast(self, x):
        season, trend = self.apart(x)
        h = self.embed(season)
        q, k, v = self.q(h), self.k(h), self.v(h)
        L = x.shape[1]
        corr = torch.fft.irfft(torch.fft.rfft(q, dim=1) * torch.conj(torch.fft.rfft(k, dim=1)), n=L, dim=1).mean(-1)
        weight, delay = corr.topk(3, dim=-1)
        weight = weight.softmax(-1)
        at = (torch.arange(L, device=x.device)[None, :, None] + delay.unsqueeze(1)) % L
        found = torch.gather(v.unsqueeze(2).expand(-1, -1, 3, -1), 1, at.unsqueeze(-1).expand(-1, -1, -1, v.shape[-1]))
        h, _ = self.apart(h + (found * weight[:, None, :, None]).sum(2))
        return self.out(h)[:, -8:] + self.trend(trend.transpose(1, 2)).transpose(1, 2)


@stranger_class("dlinear", past, future)
class DLinear(Forecaster):
    def __init__(self):
        super().__init__()
        self.season, self.trend = nn.ModuleList(nn.Linear(32, 8) for _ in range(4)), nn.ModuleList(nn.Linear(32, 8) for _ in range(4))

    def forecast(self, x):
        trend = F.avg_pool1d(F.pad(x.transpose(1, 2), (12, 12), mode="replicate"), 25, 1)
        season = x.transpose(1, 2) - trend
        out = torch.zeros(len(x), 4, 8, dtype=x.dtype, device=x.device)
        for k in range(4):
            out[:, k] = self.season[k](season[:, k]) + self.trend[k](trend[:, k])
        return out.transpose(1, 2)


@stranger_class("itransformer", past, future)
class InvertedTransformer(Forecaster):
    """A token per channel."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Linear(32, width),
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True),
            nn.Linear(width, 8),
        )

    def forecast(self, x):
        return self.head(self.layer(self.embed(x.transpose(1, 2)))).transpose(1, 2)


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
        self.gate, self.norm, self.attention, self.out = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(width),
            nn.MultiheadAttention(width, 2, batch_first=True),
            nn.Linear(width, 12),
        )

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


@stranger_class("times_net", past, future)
class TimesNet(Forecaster):
    """Series folded by fixed periods into pictures."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.conv, self.out = (
            nn.Linear(4, width),
            nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2) for k in (1, 3)),
            nn.Linear(32, 8),
        )
        self.mix, self.back = nn.Parameter(torch.zeros(3)), nn.Linear(width, 4)

    def forecast(self, x):
        h = self.embed(x)
        found = []
        for period in (4, 7, 8):
            p = F.pad(h, (0, 0, 0, -h.shape[1] % period)).unflatten(1, (-1, period)).permute(0, 3, 1, 2)
            y = F.gelu(sum(conv(p) for conv in self.conv) / 2)
            found.append(y.permute(0, 2, 3, 1).flatten(1, 2)[:, : h.shape[1]])
        h = h + (torch.stack(found, -1) * self.mix.softmax(0)).sum(-1)
        return self.back(self.out(h.transpose(1, 2)).transpose(1, 2))

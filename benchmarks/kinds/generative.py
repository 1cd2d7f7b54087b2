"""Models that generate: variational, flows, diffusion, and autoregressive ones."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import TRAINING, stranger_class


def mlp(*sizes, act=nn.SiLU):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def pixels(batch=8, channels=3, size=16):
    return torch.rand(batch, channels, size, size)


@stranger_class("vae", lambda: (torch.rand(8, 64),), draws=True, refused="random")
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(64, 32, 2 * 16), mlp(16, 32, 64)

    def forward(self, x):
        mu, logvar = self.encode(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        logits = self.decode(z)
        if not self.training:
            return logits.sigmoid()
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x) + kl


@stranger_class("vae_given_noise", lambda: (torch.rand(8, 64), torch.randn(8, 16)))
class ReparameterizedVAE(VAE):
    """Beta-VAE whose noise is an input."""

    def forward(self, x, noise):
        mu, logvar = self.encode(x).chunk(2, dim=-1)
        logits = self.decode(mu + noise * (0.5 * logvar).exp())
        kl = 0.5 * (logvar.exp() + mu**2 - 1 - logvar).sum(-1)
        return F.mse_loss(logits.sigmoid(), x) + 4.0 * kl.mean() if self.training else logits.sigmoid()


@stranger_class("glow_step", lambda: (pixels(8, 4, 8),))
class GlowStep(nn.Module):
    """ActNorm, an invertible 1x1 convolution by its determinant, and a coupling, after a squeeze."""

    def __init__(self, channels=16):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1, channels, 1, 1)), nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.net = nn.Sequential(nn.Conv2d(channels // 2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, channels, 3, padding=1))

    def forward(self, x):
        x = F.pixel_unshuffle(x, 2)
        H, W = x.shape[2:]
        x = (x + self.bias) * self.scale
        logdet = H * W * self.scale.abs().log().sum() + H * W * torch.linalg.slogdet(self.weight)[1]
        a, b = F.conv2d(x, self.weight[:, :, None, None]).chunk(2, 1)
        shift, s = self.net(a).chunk(2, 1)
        s = torch.sigmoid(s + 2)
        z = torch.cat([a, (b + shift) * s], 1)
        logdet = logdet + s.log().flatten(1).sum(1)
        return (0.5 * z.pow(2).flatten(1).sum(1) - logdet).mean() if self.training else (z, logdet)


@stranger_class("spline_flow", lambda: (torch.rand(8, 8) * 1.8 - 0.9,))
class SplineFlow(nn.Module):
    """Monotonic linear splines: the bin of each value by searchsorted."""

    def __init__(self, dim=8, bins=8):
        super().__init__()
        self.bins, self.net = bins, mlp(dim // 2, 32, dim // 2 * bins)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        height = F.softmax(self.net(a).view(len(x), -1, self.bins), -1)
        knots = F.pad(height.cumsum(-1), (1, 0))
        u = (b + 1) / 2
        edges = torch.linspace(0, 1, self.bins + 1, device=x.device, dtype=x.dtype)
        k = (torch.searchsorted(edges, u.contiguous()) - 1).clamp(0, self.bins - 1).unsqueeze(-1)
        slope = height.gather(-1, k).squeeze(-1) * self.bins
        y = knots.gather(-1, k).squeeze(-1) + (u - k.squeeze(-1) / self.bins) * slope
        return -slope.log().sum(-1).mean() + y.var() if self.training else torch.cat([a, 2 * y - 1], -1)


@stranger_class("ddpm_draws", lambda: (pixels(8, 3, 8),), modes=(TRAINING,), draws=True, refused="random")
class DDPMDraws(nn.Module):
    """As most people write it: time and noise are drawn in the step."""

    def __init__(self, steps=100, width=16):
        super().__init__()
        self.time, self.width = mlp(width, 64, width), width
        self.inp, self.norm, self.out = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, padding=1)
        self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def predicted(self, x, t):
        angles = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=t.device) / (self.width // 2))
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        return self.out(F.silu(self.norm(self.inp(x)) + time[:, :, None, None]))

    def forward(self, x):
        t, noise = torch.randint(0, len(self.alpha_bar), (len(x),), device=x.device), torch.randn_like(x)
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        return F.mse_loss(self.predicted(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


@stranger_class("consistency", lambda: (torch.randn(8, 32), torch.rand(8) + 0.5, torch.randn(8, 32)))
class Consistency(nn.Module):
    """A teacher that is a moving average, updated in the step."""

    def __init__(self):
        super().__init__()
        self.net = mlp(33, 64, 32)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @staticmethod
    def boundary(net, x, t):
        c_skip, c_out = 0.25 / ((t - 0.002) ** 2 + 0.25), 0.5 * (t - 0.002) / (t**2 + 0.25).sqrt()
        return c_skip[:, None] * x + c_out[:, None] * net(torch.cat([x, t.log()[:, None] / 4], -1))

    def forward(self, x, t, noise):
        student = self.boundary(self.net, x + t[:, None] * noise, t)
        if not self.training:
            return student
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters()):
                slow.lerp_(fast, 0.05)
            target = self.boundary(self.teacher, x + 0.9 * t[:, None] * noise, 0.9 * t)
        c = 0.00054 * math.sqrt(32)
        return (((student - target) ** 2).sum(-1) + c**2).sqrt().sub(c).mean()


@stranger_class("sliced_score", lambda: (torch.randn(8, 16), torch.randn(8, 16)))
class SlicedScore(nn.Module):
    """Sliced score matching: a product with the Jacobian, forward over the network."""

    def __init__(self):
        super().__init__()
        self.net = mlp(16, 64, 64, 16, act=nn.Softplus)

    def forward(self, x, v):
        if not self.training:
            return self.net(x)
        score, jvp = torch.func.jvp(self.net, (x,), (v,))
        return ((v * jvp).sum(-1) + 0.5 * (score * v).sum(-1) ** 2).mean()


@stranger_class("flow_matching", lambda: (torch.randn(8, 32), torch.rand(8, 1)), lambda: (torch.randn(8, 32),))
class FlowMatching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(33, 64, 64, 32)

    def velocity(self, x, t):
        return self.net(torch.cat([x, t], -1))

    def forward(self, x0, t, x1=None):
        if x1 is None:
            for k in range(4):  # Euler's steps
                x0 = x0 + 0.25 * self.velocity(x0, torch.full_like(t, k / 4))
            return x0
        return F.mse_loss(self.velocity(torch.lerp(x0, x1, t), t), x1 - x0)


@stranger_class("made", lambda: (torch.rand(8, 32),))
class MADE(nn.Module):
    def __init__(self, dim=32, hidden=64):
        super().__init__()
        self.a, self.b = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        order, units = torch.arange(dim), torch.arange(hidden) % (dim - 1)
        self.register_buffer("into", units[:, None] >= order[None])
        self.register_buffer("out", order[:, None] > units[None])

    def forward(self, x):
        h = F.relu(F.linear(x, self.a.weight * self.into, self.a.bias))
        logits = F.linear(h, self.b.weight * self.out, self.b.bias)
        return F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1).mean() if self.training else logits.sigmoid()


@stranger_class("gumbel_codes", lambda: (torch.randn(8, 16, 32),), draws=True, modes=(TRAINING,), refused="random")
class GumbelCodes(nn.Module):
    """A discrete bottleneck by the straight-through Gumbel softmax."""

    def __init__(self):
        super().__init__()
        self.to_logits, self.codes, self.back = nn.Linear(32, 16), nn.Embedding(16, 32), nn.Linear(32, 32)

    def forward(self, x):
        hot = F.gumbel_softmax(self.to_logits(x), tau=0.9, hard=True)
        probs = self.to_logits(x).softmax(-1)
        kl = (probs * (probs * 16 + 1e-9).log()).sum(-1).mean()
        return F.mse_loss(self.back(hot @ self.codes.weight), x) + 0.01 * kl

"""Models that generate: variational, adversarial, flows, diffusion, and autoregressive models of pixels."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import INFERENCE, TRAINING, stranger_class


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


@stranger_class("vqvae", lambda: (pixels(),))
class VQVAE(nn.Module):
    def __init__(self, codes=32, dim=16):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 4, 2, 1))
        self.codebook = nn.Embedding(codes, dim)
        self.decode = nn.Sequential(nn.ConvTranspose2d(dim, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x):
        z = self.encode(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.weight.t() + self.codebook.weight.pow(2).sum(1)
        indices = distances.argmin(1)
        q = self.codebook(indices).view_as(z)
        loss = F.mse_loss(q.detach(), z) * 0.25 + F.mse_loss(q, z.detach())
        q = z + (q - z).detach()
        y = self.decode(q.permute(0, 3, 1, 2))
        return F.mse_loss(y, x) + loss if self.training else (y, indices)


@stranger_class("gan", lambda: (torch.randn(8, 16, 1, 1), pixels()))
class GAN(nn.Module):
    """Both losses of a step; the discriminator's sees the fake ones detached."""

    def __init__(self):
        super().__init__()
        self.generate = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16),
            nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
        )  # fmt: skip
        self.judge = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
                                   nn.Flatten(), nn.Linear(32 * 16, 1))  # fmt: skip

    def forward(self, noise, real):
        fake = self.generate(noise)
        if not self.training:
            return fake
        of_real, of_fake, fooled = self.judge(real), self.judge(fake.detach()), self.judge(fake)
        loss_d = F.softplus(-of_real).mean() + F.softplus(of_fake).mean()
        return loss_d + F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))


@stranger_class("wgan_gp", lambda: (torch.randn(8, 32), torch.rand(8, 1)), modes=(TRAINING,))
class GradientPenalty(nn.Module):
    """A critic whose gradient by its input is part of the loss."""

    def __init__(self):
        super().__init__()
        self.critic = mlp(32, 64, 64, 1, act=nn.Tanh)

    def forward(self, real, mix):
        x = mix * real + (1 - mix) * real.roll(1, 0)
        slope = torch.func.vmap(torch.func.grad(lambda row: self.critic(row).squeeze(-1)))(x)
        return -self.critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.net = mlp(dim // 2, 32, dim)
        self.flip = flip

    def forward(self, x):
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        s, t = self.net(a).chunk(2, -1)
        b = b * torch.tanh(s).exp() + t
        return torch.cat((b, a) if self.flip else (a, b), -1), torch.tanh(s).sum(-1)


@stranger_class("realnvp", lambda: (torch.randn(8, 16),))
class RealNVP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(16, k % 2) for k in range(4))

    def forward(self, x):
        total = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        log_prob = -0.5 * (x**2 + math.log(2 * math.pi)).sum(-1) + total
        return -log_prob.mean() if self.training else log_prob


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


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], -1)


class ResBlock(nn.Module):
    def __init__(self, a, b, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, a), nn.Conv2d(a, b, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, b), nn.Conv2d(b, b, 3, padding=1)
        self.time, self.skip = nn.Linear(time, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class AttentionBlock(nn.Module):
    def __init__(self, channels, heads=2):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(4, channels), nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)
        self.heads = heads

    def forward(self, x):
        B, C, H, W = x.shape
        q, k, v = self.qkv(self.norm(x).view(B, C, H * W)).view(B, self.heads, 3, C // self.heads, H * W).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3))
        return x + self.out(y.transpose(2, 3).reshape(B, C, H * W)).view(B, C, H, W)


class SmallUNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inp, self.time = nn.Conv2d(3, width, 3, padding=1), mlp(width, 64, 64)
        self.down1, self.pool = ResBlock(width, width, 64), nn.Conv2d(width, width, 3, 2, 1)
        self.mid1, self.attention, self.mid2 = ResBlock(width, 32, 64), AttentionBlock(32), ResBlock(32, width, 64)
        self.up1, self.out = ResBlock(2 * width, width, 64), nn.Conv2d(width, 3, 3, padding=1)
        self.width = width

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.width).to(x.dtype))
        h = skip = self.down1(self.inp(x), emb)
        h = self.mid2(self.attention(self.mid1(self.pool(h), emb)), emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.out(self.up1(torch.cat([h, skip], 1), emb))


@stranger_class("ddpm", lambda: (pixels(8, 3, 8), torch.randint(0, 100, (8,)), torch.randn(8, 3, 8, 8)))
class DDPM(nn.Module):
    """The noise is an input."""

    def __init__(self, steps=100):
        super().__init__()
        self.net = SmallUNet()
        self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x, t, noise):
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        predicted = self.net(a.sqrt() * x + (1 - a).sqrt() * noise, t)
        return F.mse_loss(predicted, noise) if self.training else predicted


@stranger_class("ddpm_draws", lambda: (pixels(8, 3, 8),), modes=(TRAINING,), draws=True, refused="random")
class DDPMDraws(DDPM):
    """As most people write it: time and noise are drawn in the step."""

    def forward(self, x):
        t = torch.randint(0, len(self.alpha_bar), (len(x),), device=x.device)
        return super().forward(x, t, torch.randn_like(x))


@stranger_class("ddim_sampler", lambda: (torch.randn(8, 3, 8, 8),), modes=(INFERENCE,))
class DDIMSampler(DDPM):
    """Three steps in one program, with guidance clipped."""

    def forward(self, x):
        for now, then in ((90, 60), (60, 30), (30, 0)):
            t = torch.full((len(x),), now, device=x.device)
            eps = self.net(x, t)
            x0 = ((x - (1 - self.alpha_bar[now]).sqrt() * eps) / self.alpha_bar[now].sqrt()).clamp(-1, 1)
            x = self.alpha_bar[then].sqrt() * x0 + (1 - self.alpha_bar[then]).sqrt() * eps
        return x


class DiTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), mlp(width, 4 * width, width, act=nn.GELU)
        self.ada, self.heads = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width)), heads

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        q, k, v = self.qkv(h).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        h = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + gate1.unsqueeze(1) * h
        return x + gate2.unsqueeze(1) * self.mlp(self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1))


@stranger_class(
    "dit", lambda: (torch.randn(8, 4, 8, 8), torch.rand(8) * 999, torch.randint(0, 10, (8,))), lambda: (torch.randn(8, 4, 8, 8),)
)
class DiT(nn.Module):
    def __init__(self, width=32, heads=4, patch=2):
        super().__init__()
        self.patch = nn.Conv2d(4, width, patch, patch)
        self.pos = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.time, self.label = mlp(width, width, width), nn.Embedding(11, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(2))
        self.ada, self.final = nn.Linear(width, 2 * width), nn.Linear(width, patch * patch * 4)

    def forward(self, x, t, y, noise=None):
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        c = self.time(timestep_embedding(t, h.shape[-1]).to(x.dtype)) + self.label(y)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.ada(F.silu(c)).chunk(2, -1)
        h = self.final(F.layer_norm(h, h.shape[-1:]) * (1 + scale[:, None]) + shift[:, None])
        h = torch.einsum("nhwpqc->nchpwq", h.reshape(len(x), 4, 4, 2, 2, 4)).reshape(len(x), 4, 8, 8)
        return h if noise is None else F.mse_loss(h, noise)


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


class MaskedConv2d(nn.Conv2d):
    def __init__(self, kind, *args, **kwargs):
        super().__init__(*args, **kwargs)
        k = self.kernel_size[0]
        mask = torch.ones(k, k)
        mask[k // 2, k // 2 + (kind == "B") :] = 0
        mask[k // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self._conv_forward(x, self.weight * self.mask, self.bias)


@stranger_class("pixelcnn", lambda: (torch.randint(0, 16, (8, 8, 8)),))
class PixelCNN(nn.Module):
    """Gated, over 16 grey levels."""

    def __init__(self, width=16):
        super().__init__()
        self.first = MaskedConv2d("A", 1, width, 5, padding=2)
        self.gated = nn.ModuleList(MaskedConv2d("B", width, 2 * width, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(width, 16, 1)

    def forward(self, x):
        h = self.first(x.unsqueeze(1).to(self.first.weight.dtype) / 15)
        for conv in self.gated:
            a, b = conv(h).chunk(2, 1)
            h = h + a.tanh() * b.sigmoid()
        logits = self.out(h)
        return F.cross_entropy(logits, x) if self.training else logits.argmax(1)


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


@stranger_class("stylegan_block", lambda: (torch.randn(8, 16), torch.randn(8, 1, 8, 8)))
class StyleBlock(nn.Module):
    """Modulated convolution: a kernel per sample, by groups."""

    def __init__(self):
        super().__init__()
        self.const, self.map = nn.Parameter(torch.randn(1, 16, 4, 4)), mlp(16, 32, 32)
        self.style, self.weight = nn.Linear(32, 16), nn.Parameter(torch.randn(8, 16, 3, 3))
        self.strength = nn.Parameter(torch.tensor(0.1))

    def forward(self, z, noise):
        B = len(z)
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        w = self.weight * (self.style(self.map(z)) + 1)[:, None, :, None, None]
        w = w * torch.rsqrt(w.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        x = F.interpolate(self.const, scale_factor=2, mode="bilinear", align_corners=False).repeat(B, 1, 1, 1)
        y = F.conv2d(x.reshape(1, -1, 8, 8), w.reshape(-1, 16, 3, 3), padding=1, groups=B).reshape(B, 8, 8, 8)
        y = F.leaky_relu(y + self.strength * noise, 0.2) * math.sqrt(2)
        return y.square().mean() if self.training else y


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

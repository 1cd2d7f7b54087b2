"""Representations learned by comparison: pairs, views, clusters, and teachers that are moving averages."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import TRAINING, stranger_class


def mlp(*sizes):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
    return nn.Sequential(*layers[:-2])


def encoder(width=32):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, width, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def views(count=2):
    return lambda: tuple(torch.randn(8, 3, 16, 16) for _ in range(count))


@stranger_class("clip_own", lambda: (torch.randn(8, 3, 16, 16), torch.randint(1, 48, (8, 10))))
class CLIP(nn.Module):
    """A learned temperature, both directions; the text at its largest token."""

    def __init__(self, width=32):
        super().__init__()
        self.image, self.words, self.text = (
            encoder(),
            nn.Embedding(48, width),
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True),
        )
        self.p, self.q, self.scale = (
            nn.Parameter(torch.randn(width, 16) * 0.2),
            nn.Parameter(torch.randn(width, 16) * 0.2),
            nn.Parameter(torch.tensor(2.6592)),
        )

    def forward(self, image, text):
        mask = torch.full((10, 10), -torch.inf, device=image.device, dtype=image.dtype).triu_(1)
        h = self.text(self.words(text), src_mask=mask)
        t = h[torch.arange(len(h), device=h.device), text.argmax(-1)] @ self.q
        i = self.image(image) @ self.p
        i, t = i / i.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)
        logits = self.scale.exp().clamp(max=100) * i @ t.t()
        at = torch.arange(len(i), device=i.device)
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.t(), at)) / 2 if self.training else logits.softmax(-1)


@stranger_class("siglip", lambda: (torch.randn(8, 24), torch.randn(8, 20)))
class SigLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.t, self.bias = (
            mlp(24, 32, 16),
            mlp(20, 32, 16),
            nn.Parameter(torch.tensor(2.3)),
            nn.Parameter(torch.tensor(-10.0)),
        )

    def forward(self, x, y):
        logits = F.normalize(self.a(x)) @ F.normalize(self.b(y)).T * self.t.exp() + self.bias
        sign = 2 * torch.eye(len(x), device=x.device, dtype=x.dtype) - 1
        return -F.logsigmoid(sign * logits).sum() / len(x) if self.training else logits.sigmoid()


@stranger_class("simclr", views())
class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = encoder(), mlp(32, 32, 16)

    def forward(self, a, b):
        x = torch.cat([a, b])
        h = self.f(x)
        if not self.training:
            return h
        z = F.normalize(self.g(h), dim=1)
        s = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
        return F.cross_entropy(s, torch.arange(len(z), device=z.device).roll(len(a)))


@stranger_class("supcon", views(), lambda: (torch.randint(0, 3, (8,)),), modes=(TRAINING,))
class SupCon(SimCLR):
    def forward(self, a, b, label):
        z = F.normalize(self.g(self.f(torch.cat([a, b]))), dim=1)
        label = label.repeat(2)
        itself = torch.eye(len(z), device=z.device, dtype=z.dtype)
        same = (label[:, None] == label[None]).to(z.dtype) - itself
        s = z @ z.t() / 0.1
        s = s - s.max(1, keepdim=True)[0].detach()
        logp = s - (s.exp() * (1 - itself)).sum(1, keepdim=True).log()
        return -((same * logp).sum(1) / same.sum(1)).mean()


@stranger_class("byol", views())
class BYOL(nn.Module):
    """The target is buffers of its own, moved in the forward."""

    def __init__(self):
        super().__init__()
        self.online, self.predict = nn.Sequential(encoder(), mlp(32, 32, 16)), mlp(16, 32, 16)
        for name, parameter in self.online.named_parameters():
            self.register_buffer("target_" + name.replace(".", "_"), parameter.detach().clone())

    def slow(self):
        return {name: getattr(self, "target_" + name.replace(".", "_")) for name, _ in self.online.named_parameters()}

    def forward(self, a, b):
        p = self.predict(self.online(a))
        if not self.training:
            return p
        with torch.no_grad():
            for name, parameter in self.online.named_parameters():
                self.slow()[name].mul_(0.99).add_(parameter, alpha=0.01)
            z = torch.func.functional_call(self.online, self.slow(), (b,))
        return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


@stranger_class("moco", views())
class MoCo(nn.Module):
    """A queue of keys with a pointer, a slow encoder."""

    def __init__(self, queue=32):
        super().__init__()
        self.q = nn.Sequential(encoder(), nn.Linear(32, 16))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, queue), dim=0))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        if not self.training:
            return q
        with torch.no_grad():
            for slow, fast in zip(self.k.parameters(), self.q.parameters()):
                slow.copy_(slow * 0.99 + fast * 0.01)
            k = F.normalize(self.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))
        with torch.no_grad():
            where = (self.at + torch.arange(len(k), device=k.device)) % self.queue.shape[1]
            self.queue.copy_(self.queue.index_copy(1, where, k.t()))
            self.at.copy_((self.at + len(k)) % self.queue.shape[1])
        return loss


@stranger_class("barlow_twins", views())
class BarlowTwins(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g, self.norm = encoder(), mlp(32, 64, 32), nn.BatchNorm1d(32, affine=False)

    def forward(self, a, b):
        za, zb = self.g(self.f(a)), self.g(self.f(b))
        c = self.norm(za).T @ self.norm(zb) / len(a)
        on = torch.diagonal(c).add(-1).pow(2).sum()
        off = c.flatten()[:-1].view(31, 33)[:, 1:].flatten().pow(2).sum()
        return on + 0.005 * off if self.training else za


@stranger_class("vicreg", views())
class VICReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = encoder(), mlp(32, 64, 32)

    def forward(self, a, b):
        za, zb = self.g(self.f(a)), self.g(self.f(b))
        if not self.training:
            return za
        loss = 25 * F.mse_loss(za, zb)
        for z in (za, zb):
            z = z - z.mean(0)
            loss = loss + 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
            cov = z.T @ z / (len(z) - 1)
            loss = loss + (cov - torch.diag(cov.diagonal())).pow(2).sum() / 32
        return loss


@stranger_class("swav", views())
class SwAV(nn.Module):
    """Codes by Sinkhorn and Knopp over the batch; prototypes of norm 1."""

    def __init__(self):
        super().__init__()
        self.f, self.g, self.prototypes = encoder(), mlp(32, 32, 16), nn.Linear(16, 8, bias=False)

    @torch.no_grad()
    def codes(self, scores):
        Q = torch.exp(scores / 0.5).t()
        Q = Q / Q.sum()
        for _ in range(3):
            Q = Q / Q.sum(1, keepdim=True) / Q.shape[0]
            Q = Q / Q.sum(0, keepdim=True) / Q.shape[1]
        return (Q * Q.shape[1]).t()

    def forward(self, a, b):
        weight = F.normalize(self.prototypes.weight, dim=1)
        scores = F.linear(F.normalize(self.g(self.f(torch.cat([a, b]))), dim=1), weight)
        if not self.training:
            return scores
        sa, sb = scores.chunk(2)
        return -0.5 * ((self.codes(sa) * (sb / 0.1).log_softmax(1)).sum(1) + (self.codes(sb) * (sa / 0.1).log_softmax(1)).sum(1)).mean()


@stranger_class("dino_own", lambda: (torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16), torch.randn(8, 3, 8, 8)))
class DINO(nn.Module):
    """A center that follows the teacher; small crops go to the student only."""

    def __init__(self):
        super().__init__()
        wn = nn.utils.parametrizations.weight_norm
        self.student = nn.Sequential(encoder(), nn.Linear(32, 32), nn.GELU(), wn(nn.Linear(32, 24, bias=False)))
        self.teacher = nn.Sequential(encoder(), nn.Linear(32, 32), nn.GELU(), wn(nn.Linear(32, 24, bias=False))).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("center", torch.zeros(1, 24))

    def forward(self, a, b, small):
        s = [self.student(torch.cat([a, b])), self.student(small)]
        if not self.training:
            return s[0]
        with torch.no_grad():
            t = self.teacher(torch.cat([a, b]))
            target = ((t - self.center) / 0.04).softmax(-1).chunk(2)
            self.center.mul_(0.9).add_(t.mean(0, keepdim=True), alpha=0.1)
        s = [(x / 0.1).log_softmax(-1) for x in (*s[0].chunk(2), s[1])]
        terms = [-(q * p).sum(-1).mean() for k, q in enumerate(target) for j, p in enumerate(s) if j != k]
        return sum(terms) / len(terms)


@stranger_class("ijepa", lambda: (torch.randn(8, 16, 24), torch.randint(0, 16, (8, 6)), torch.randint(0, 16, (8, 4))))
class JEPA(nn.Module):
    """Targets of other places from a context, in the space of a slow encoder."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.pos = nn.Linear(24, width), nn.Parameter(torch.randn(16, width) * 0.02)
        self.encode, self.predict = (nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.slow, self.token = copy.deepcopy(self.encode).requires_grad_(False), nn.Parameter(torch.zeros(width))

    def forward(self, patches, context, target):
        x = self.embed(patches) + self.pos
        c = self.encode(torch.take_along_dim(x, context.unsqueeze(-1), 1))
        h = self.predict(torch.cat([c, self.token + self.pos[target]], 1))[:, context.shape[1] :]
        if not self.training:
            return h
        with torch.no_grad():
            wanted = torch.take_along_dim(F.layer_norm(self.slow(x), x.shape[-1:]), target.unsqueeze(-1), 1)
        return F.smooth_l1_loss(h, wanted)


@stranger_class("triplet_hard", lambda: (torch.randn(8, 3, 16, 16),), lambda: (torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),))
class HardTriplets(nn.Module):
    """The hardest positive and negative of the batch."""

    def __init__(self):
        super().__init__()
        self.f, self.out = encoder(), nn.Linear(32, 16)

    def forward(self, x, label=None):
        z = F.normalize(self.out(self.f(x)), dim=-1)
        if label is None:
            return z
        d = torch.cdist(z, z)
        same = label[:, None] == label[None]
        positive = d.masked_fill(~same, 0).max(1).values
        negative = d.masked_fill(same, 1e9).min(1).values
        return F.margin_ranking_loss(negative, positive, torch.ones_like(positive), margin=0.3)


@stranger_class("arc_face", lambda: (torch.randn(8, 3, 16, 16),), lambda: (torch.randint(0, 20, (8,)),))
class ArcFace(nn.Module):
    """A margin in the angle of the right class."""

    def __init__(self, classes=20):
        super().__init__()
        self.f, self.out, self.weight = encoder(), nn.Linear(32, 16), nn.Parameter(torch.randn(classes, 16))

    def forward(self, x, label=None):
        cosine = F.linear(F.normalize(self.out(self.f(x))), F.normalize(self.weight))
        if label is None:
            return cosine
        theta = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
        margin = torch.zeros_like(cosine).scatter_(1, label.view(-1, 1), 0.5)
        return F.cross_entropy(30 * torch.cos(theta + margin), label)

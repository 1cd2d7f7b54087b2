"""Representations learned by comparison: views, margins, and teachers that are moving averages."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


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

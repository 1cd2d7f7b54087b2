"""Models that rank: bags of features, their interactions, and two tasks at once."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


def mlp(*sizes, act=nn.ReLU):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def fields(batch=8, count=6, rows=50):
    return torch.randint(0, rows, (batch, count))


def clicks(batch=8):
    return (torch.randint(0, 2, (batch,)).float(),)


class Ranker(nn.Module):
    """Its loss is that of clicks."""

    def forward(self, *inputs):
        if not self.training:
            return self.logit(*inputs).sigmoid()
        return F.binary_cross_entropy_with_logits(self.logit(*inputs[:-1]), inputs[-1])


@stranger_class(
    "dlrm_bags",
    lambda: (torch.randn(8, 13), [torch.randint(0, 100, (8, 3)) for _ in range(3)], [torch.rand(8, 3) for _ in range(3)]),
    clicks,
)
class WeightedDLRM(Ranker):
    """Bags of several rows with a weight each; interactions by the lower triangle."""

    def __init__(self, width=16):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, width, mode="sum") for _ in range(3))
        self.bottom, self.top = mlp(13, 32, width), mlp(width + 6, 32, 1)

    def logit(self, dense, ids, weights):
        x = self.bottom(dense)
        T = torch.stack([x, *[bag(i, per_sample_weights=w) for bag, i, w in zip(self.bags, ids, weights)]], 1)
        Z = torch.bmm(T, T.transpose(1, 2))
        li, lj = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, Z[:, li, lj]], 1)).squeeze(1)


@stranger_class("fibinet", lambda: (fields(),), clicks)
class BilinearInteractions(Ranker):
    """Fields weighed by squeeze and excitation, pairs through nn.Bilinear."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.weigh, self.pair, self.out = nn.Embedding(50, width), mlp(6, 3, 6), nn.Bilinear(width, width, 4), mlp(60, 16, 1)

    def logit(self, ids):
        x = self.embed(ids)
        x = x * self.weigh(x.mean(-1)).sigmoid().unsqueeze(-1)
        i, j = torch.triu_indices(6, 6, offset=1)
        return self.out(self.pair(x[:, i], x[:, j]).flatten(1)).squeeze(1)


@stranger_class("esmm", lambda: (fields(),), lambda: (*clicks(), *clicks()))
class ESMM(nn.Module):
    """A product of two probabilities, wide and deep."""

    def __init__(self):
        super().__init__()
        self.embed, self.wide, self.ctr, self.cvr = nn.Embedding(50, 8), nn.EmbeddingBag(50, 1), mlp(48, 16, 1), mlp(48, 16, 1)

    def forward(self, ids, click=None, bought=None):
        x = self.embed(ids).flatten(1)
        ctr = (self.ctr(x) + self.wide(ids)).sigmoid().squeeze(1)
        both = ctr * self.cvr(x).sigmoid().squeeze(1)
        return both if click is None else F.binary_cross_entropy(ctr, click) + F.binary_cross_entropy(both, click * bought)

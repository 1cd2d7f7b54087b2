"""Models that rank: crosses of features, towers, histories of users, and several tasks at once."""

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


@stranger_class("dcn_v2", lambda: (fields(), torch.randn(8, 4)), clicks)
class DCNv2(Ranker):
    """Low-rank crosses by a mixture of experts beside a deep part."""

    def __init__(self, width=8, rank=4, experts=3):
        super().__init__()
        self.embed, d = nn.Embedding(300, width), 6 * width + 4
        self.U, self.V, self.C = (
            nn.ParameterList(nn.Parameter(torch.randn(experts, *s) * 0.1) for _ in range(2)) for s in ((d, rank), (d, rank), (rank, rank))
        )
        self.bias, self.gate, self.deep, self.out = (
            nn.ParameterList(nn.Parameter(torch.zeros(d)) for _ in range(2)),
            nn.Linear(d, experts),
            mlp(d, 32, 16),
            nn.Linear(d + 16, 1),
        )

    def logit(self, ids, dense):
        x0 = x = torch.cat([self.embed(ids + torch.arange(6, device=ids.device) * 50).flatten(1), dense], 1)
        for U, V, C, bias in zip(self.U, self.V, self.C, self.bias):
            v = torch.tanh(torch.einsum("bd,edr->ber", x, V))
            v = torch.einsum("edr,ber->bed", U, torch.tanh(torch.einsum("ers,bes->ber", C, v)))
            x = (x0.unsqueeze(1) * (v + bias) * self.gate(x).softmax(-1).unsqueeze(-1)).sum(1) + x
        return self.out(torch.cat([x, self.deep(x0)], 1)).squeeze(1)


@stranger_class("deepfm", lambda: (fields(),), clicks)
class DeepFM(Ranker):
    def __init__(self, width=8):
        super().__init__()
        self.register_buffer("offsets", torch.arange(6) * 50)
        self.embed, self.linear, self.bias = nn.Embedding(300, width), nn.Embedding(300, 1), nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(nn.Linear(6 * width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def logit(self, ids):
        x = ids + self.offsets
        e = self.embed(x)
        fm = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        return (self.linear(x).sum(1) + self.bias + fm + self.deep(e.view(len(e), -1))).squeeze(1)


@stranger_class("xdeepfm", lambda: (fields(),), clicks)
class CompressedInteractions(Ranker):
    def __init__(self, width=8):
        super().__init__()
        self.embed, self.convs, self.out = (
            nn.Embedding(50, width),
            nn.ModuleList([nn.Conv1d(36, 12, 1), nn.Conv1d(36, 12, 1)]),
            nn.Linear(18, 1),
        )

    def logit(self, ids):
        x0 = h = self.embed(ids)
        found = []
        for conv in self.convs:
            x = F.relu(conv((x0.unsqueeze(2) * h.unsqueeze(1)).flatten(1, 2)))
            h, out = x.split(6, dim=1) if conv is self.convs[0] else (None, x)
            found.append(out)
        return self.out(torch.cat(found, 1).sum(2)).squeeze(1)


@stranger_class("autoint", lambda: (fields(),), clicks)
class AutoInt(Ranker):
    def __init__(self, width=16):
        super().__init__()
        self.embed, self.attention, self.skip = (
            nn.Embedding(50, width),
            nn.MultiheadAttention(width, 2, batch_first=True),
            nn.Linear(width, width, bias=False),
        )
        self.out = nn.Linear(6 * width, 1)

    def logit(self, ids):
        x = self.embed(ids)
        y, _ = self.attention(x, x, x, average_attn_weights=False)
        return self.out(F.relu(y + self.skip(x)).flatten(1)).squeeze(1)


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


@stranger_class("two_tower", lambda: (torch.randint(0, 50, (8,)), torch.randint(0, 80, (8,))), lambda: (torch.rand(8),))
class TwoTower(nn.Module):
    """Softmax over the batch, corrected by how often each item is drawn."""

    def __init__(self, width=16):
        super().__init__()
        self.user, self.item = (
            nn.Sequential(nn.Embedding(50, width), mlp(width, 32, width)),
            nn.Sequential(nn.Embedding(80, width), mlp(width, 32, width)),
        )

    def forward(self, user, item, frequency=None):
        u, v = F.normalize(self.user(user), dim=-1), F.normalize(self.item(item), dim=-1)
        if frequency is None:
            return (u * v).sum(-1)
        logits = u @ v.t() / 0.05 - frequency.log()
        same = item.unsqueeze(0) == item.unsqueeze(1)
        logits = logits.masked_fill(same & ~torch.eye(len(u), dtype=torch.bool, device=u.device), -1e9)
        return F.cross_entropy(logits, torch.arange(len(u), device=u.device))


class Dice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.alpha = nn.BatchNorm1d(width, affine=False), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        p = self.norm(x.flatten(0, -2)).view_as(x).sigmoid()
        return p * x + (1 - p) * self.alpha * x


@stranger_class("din", lambda: (torch.randint(1, 60, (8, 10)), torch.randint(1, 11, (8,)), torch.randint(1, 60, (8,))), clicks)
class InterestNetwork(Ranker):
    """A history weighed by its relation to the candidate, padded, with an activation that follows the batch."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.weigh = nn.Embedding(60, width, padding_idx=0), nn.Sequential(nn.Linear(4 * width, 16), Dice(16), nn.Linear(16, 1))
        self.out = nn.Sequential(nn.Linear(3 * width, 32), Dice(32), nn.Linear(32, 1))

    def logit(self, history, length, item):
        h, x = self.embed(history), self.embed(item)
        wide = x.unsqueeze(1).expand_as(h)
        scores = self.weigh(torch.cat([wide, h, wide - h, wide * h], -1)).squeeze(-1)
        scores = scores * (torch.arange(10, device=h.device) < length.unsqueeze(1))
        interest = torch.bmm(scores.unsqueeze(1), h).squeeze(1)
        return self.out(torch.cat([interest, x, interest * x], -1)).squeeze(-1)


@stranger_class("sasrec", lambda: (torch.randint(0, 60, (8, 10)),), lambda: (torch.randint(0, 60, (8, 10)), torch.randint(1, 60, (8, 10))))
class SASRec(nn.Module):
    """Causal over a padded history; positive and negative items share its embedding."""

    def __init__(self, width=16):
        super().__init__()
        self.items, self.pos = nn.Embedding(60, width, padding_idx=0), nn.Embedding(10, width)
        self.norms, self.attention = nn.ModuleList(nn.LayerNorm(width) for _ in range(3)), nn.MultiheadAttention(width, 2, batch_first=True)
        self.ff = nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, width, 1))

    def forward(self, history, positive=None, negative=None):
        x = self.items(history) * 4 + self.pos(torch.arange(10, device=history.device))
        x = x * (history != 0).unsqueeze(-1)
        causal = torch.ones(10, 10, dtype=torch.bool, device=x.device).triu(1)
        q = self.norms[0](x)
        x = q + self.attention(q, x, x, attn_mask=causal, need_weights=False)[0]
        x = self.norms[2](x + self.ff(self.norms[1](x).transpose(1, 2)).transpose(1, 2))
        if positive is None:
            return (x[:, -1] @ self.items.weight.t()).topk(5).indices
        yes, no = (x * self.items(positive)).sum(-1), (x * self.items(negative)).sum(-1)
        loss = F.softplus(-yes) + F.softplus(no)
        return (loss * (positive != 0)).sum() / (positive != 0).sum()


@stranger_class("gru4rec", lambda: (torch.randint(0, 60, (8, 10)),), lambda: (torch.randint(0, 60, (8,)),))
class SessionGRU(nn.Module):
    """BPR-max over the items of the batch."""

    def __init__(self, width=16):
        super().__init__()
        self.items, self.gru = nn.Embedding(60, width), nn.GRU(width, width, batch_first=True)

    def forward(self, session, item=None):
        h = self.gru(self.items(session))[1][-1]
        if item is None:
            return h @ self.items.weight.t()
        scores = h @ self.items(item).t()
        other = ~torch.eye(len(h), dtype=torch.bool, device=h.device)
        weight = scores.masked_fill(~other, -1e9).softmax(1)
        better = (scores.diagonal().unsqueeze(1) - scores).sigmoid()
        return (-(weight * better).sum(1).clamp(min=1e-10).log() + (weight * scores.square()).sum(1)).mean()


@stranger_class("mmoe", lambda: (torch.randn(8, 24),), lambda: (torch.randint(0, 2, (8, 2)).float(),))
class MMoE(nn.Module):
    """A gate per task over shared experts; losses weighed by learned uncertainties."""

    def __init__(self, experts=4, width=16):
        super().__init__()
        self.experts = nn.ModuleList(mlp(24, 32, width) for _ in range(experts))
        self.gates, self.towers = nn.ModuleList(nn.Linear(24, experts) for _ in range(2)), nn.ModuleList(mlp(width, 8, 1) for _ in range(2))
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x, label=None):
        made = torch.stack([expert(x) for expert in self.experts], 1)
        logits = torch.cat(
            [tower(torch.einsum("be,bew->bw", gate(x).softmax(-1), made)) for gate, tower in zip(self.gates, self.towers)], 1
        )
        if label is None:
            return logits.sigmoid()
        losses = F.binary_cross_entropy_with_logits(logits, label, reduction="none").mean(0)
        return (losses * torch.exp(-self.log_var) + self.log_var).sum()


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


@stranger_class(
    "light_gcn",
    lambda: (torch.randint(0, 24, (2, 60)), torch.randint(0, 24, (8,)), torch.randint(0, 24, (8,))),
    lambda: (torch.randint(0, 24, (8,)),),
)
class LightGCN(nn.Module):
    """Embeddings spread along the edges, their mean over layers, BPR with decay."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)

    def forward(self, edges, user, item, negative=None):
        source, to = edges
        degree = (
            torch.zeros(24, device=source.device)
            .index_add(0, to, torch.ones(60, device=source.device))
            .clamp(min=1)
            .to(self.embed.weight.dtype)
        )
        h, found = self.embed.weight, [self.embed.weight]
        for _ in range(2):
            h = torch.zeros_like(h).index_add_(0, to, h[source] * (degree[source] * degree[to]).rsqrt()[:, None])
            found.append(h)
        h = torch.stack(found).mean(0)
        yes = (h[user] * h[item]).sum(1)
        if negative is None:
            return yes
        decay = sum(self.embed(k).square().sum() for k in (user, item, negative)) / (2 * len(user))
        return -F.logsigmoid(yes - (h[user] * h[negative]).sum(1)).mean() + 1e-4 * decay

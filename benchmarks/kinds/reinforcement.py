"""Losses of agents: distributions of values, and ensembles."""

import torch
from torch import nn

from benchmarks.strangers import stranger_class


def mlp(*sizes, act=nn.Tanh):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def states(batch=8, width=16):
    return torch.randn(batch, width)


def actions(batch=8, count=4):
    return torch.randint(0, count, (batch,))


@stranger_class("c51", lambda: (states(),), lambda: (actions(), torch.randn(8), states()))
class CategoricalDQN(nn.Module):
    """Distributions of returns, projected onto their atoms by index_add_."""

    def __init__(self, atoms=21):
        super().__init__()
        self.net, self.atoms = mlp(16, 32, 4 * atoms, act=nn.ReLU), atoms
        self.register_buffer("support", torch.linspace(-5, 5, atoms))

    def forward(self, x, action=None, reward=None, after=None):
        logp = self.net(x).view(-1, 4, self.atoms).log_softmax(-1)
        if action is None:
            return (logp.exp() * self.support).sum(-1).argmax(1)
        rows = torch.arange(len(x), device=x.device)
        with torch.no_grad():
            p = self.net(after).view(-1, 4, self.atoms).softmax(-1)
            p = p[rows, (p * self.support).sum(-1).argmax(1)]
            b = ((reward[:, None] + 0.99 * self.support).clamp(-5, 5) + 5) / 0.5
            low, high = b.floor().long(), b.ceil().long().clamp(max=self.atoms - 1)
            m, offset = torch.zeros_like(p), (rows * self.atoms)[:, None]
            m.view(-1).index_add_(0, (low + offset).view(-1), (p * (high - b + (low == high))).view(-1))
            m.view(-1).index_add_(0, (high + offset).view(-1), (p * (b - low)).view(-1))
        return -(m * logp[rows, action]).sum(-1).mean()


@stranger_class("conservative_q", lambda: (states(), actions()), lambda: (torch.randn(8), states()))
class ConservativeQ(nn.Module):
    """An ensemble by vmap-free batched weights; logsumexp pushes the unseen down."""

    def __init__(self, ensemble=4):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(ensemble, 16, 32) / 4), nn.Parameter(torch.zeros(ensemble, 1, 32))
        self.w2, self.b2 = nn.Parameter(torch.randn(ensemble, 32, 4) / 6), nn.Parameter(torch.zeros(ensemble, 1, 4))

    def q(self, x):
        h = torch.baddbmm(self.b1, x.expand(len(self.w1), -1, -1), self.w1).relu()
        return torch.baddbmm(self.b2, h, self.w2)

    def forward(self, x, action, reward=None, after=None):
        q = self.q(x)
        taken = q.gather(2, action.view(1, -1, 1).expand(len(q), -1, -1)).squeeze(-1)
        if reward is None:
            return taken.min(0).values
        target = reward + 0.99 * self.q(after).amin(0).amax(-1).detach()
        return (taken - target).square().mean() + (q.logsumexp(-1) - taken).mean() + (q.std(0) * 0.1).mean()

"""Losses of agents: actors and critics, distributions of values, world models, sequences of decisions."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import TRAINING, stranger_class


def mlp(*sizes, act=nn.Tanh):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def states(batch=8, width=16):
    return torch.randn(batch, width)


def actions(batch=8, count=4):
    return torch.randint(0, count, (batch,))


@stranger_class(
    "ppo", lambda: (torch.rand(8, 4, 21, 21),), lambda: (actions(), torch.randn(8) - 1.4, torch.randn(8), torch.randn(8), torch.randn(8))
)
class PPO(nn.Module):
    """Clipped policy and value, entropy; advantages normalized over the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 32), nn.ReLU()
        )
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x, action=None, old=None, advantage=None, returns=None, old_value=None):
        h = self.body(x)
        logits, value = self.actor(h), self.critic(h).squeeze(-1)
        if action is None:
            return logits.argmax(-1), value
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        ratio = (logp.gather(1, action[:, None]).squeeze(1) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
        loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy + 0.5 * loss - 0.01 * entropy


@stranger_class("dueling_dqn", lambda: (states(),), lambda: (actions(), torch.randn(8), states(), torch.rand(8) < 0.2))
class DuelingDQN(nn.Module):
    """Double: the online net chooses, the target net judges."""

    def __init__(self):
        super().__init__()
        self.body, self.value, self.advantage = mlp(16, 32, 32, act=nn.ReLU), nn.Linear(32, 1), nn.Linear(32, 4)
        self.target = nn.ModuleList(copy.deepcopy(m) for m in (self.body, self.value, self.advantage)).requires_grad_(False)

    @staticmethod
    def q(nets, x):
        h = F.relu(nets[0](x))
        a = nets[2](h)
        return nets[1](h) + a - a.mean(1, keepdim=True)

    def forward(self, x, action=None, reward=None, after=None, done=None):
        online = (self.body, self.value, self.advantage)
        if action is None:
            return self.q(online, x).argmax(1)
        with torch.no_grad():
            best = self.q(online, after).argmax(1, keepdim=True)
            target = reward + 0.99 * (~done) * self.q(self.target, after).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(self.q(online, x).gather(1, action.unsqueeze(1)).squeeze(1), target)


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


@stranger_class("quantile_dqn", lambda: (states(), torch.rand(8, 8)), lambda: (actions(), torch.randn(8, 8)))
class ImplicitQuantiles(nn.Module):
    """Cosines of quantiles, the quantile Huber loss over all pairs."""

    def __init__(self):
        super().__init__()
        self.psi, self.phi, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, tau, action=None, target=None):
        cosines = torch.cos(math.pi * torch.arange(16, device=x.device) * tau.unsqueeze(-1))
        q = self.out(F.relu(self.psi(x)).unsqueeze(1) * F.relu(self.phi(cosines)))
        if action is None:
            return q.mean(1).argmax(-1)
        q = q.gather(2, action[:, None, None].expand(-1, q.shape[1], 1)).squeeze(2)
        u = target.unsqueeze(1) - q.unsqueeze(2)
        huber = torch.where(u.abs() <= 1, 0.5 * u**2, u.abs() - 0.5)
        return ((tau.unsqueeze(2) - (u.detach() < 0).to(u.dtype)).abs() * huber).sum(1).mean()


@stranger_class("sac", lambda: (states(), torch.randn(8, 4)), lambda: (torch.rand(8, 4) * 2 - 1, torch.randn(8), states()))
class SAC(nn.Module):
    """Two critics, their slow copies, a squashed Gaussian, a learned temperature."""

    def __init__(self):
        super().__init__()
        self.actor, self.critics = mlp(16, 32, 8, act=nn.ReLU), nn.ModuleList(mlp(20, 32, 1, act=nn.ReLU) for _ in range(2))
        self.slow, self.log_alpha = copy.deepcopy(self.critics).requires_grad_(False), nn.Parameter(torch.zeros(1))

    def act(self, x, noise):
        mean, log_std = self.actor(x).chunk(2, -1)
        log_std = -5 + 3.5 * (torch.tanh(log_std) + 1)
        u = mean + log_std.exp() * noise
        logp = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
        return u.tanh(), logp

    def forward(self, x, noise, action=None, reward=None, after=None):
        if action is None:
            return self.act(x, noise)
        alpha = self.log_alpha.exp()
        with torch.no_grad():
            then, logp = self.act(after, noise)
            q = torch.min(*[critic(torch.cat([after, then], -1)) for critic in self.slow]).squeeze(-1)
            target = reward + 0.99 * (q - alpha * logp)
        critics = sum(F.mse_loss(critic(torch.cat([x, action], -1)).squeeze(-1), target) for critic in self.critics)
        mine, logp = self.act(x, noise)
        values = [
            torch.func.functional_call(c, {k: p.detach() for k, p in c.named_parameters()}, torch.cat([x, mine], -1)) for c in self.critics
        ]
        actor = (alpha.detach() * logp - torch.min(*values).squeeze(-1)).mean()
        return critics + actor - (self.log_alpha * (logp - 4).detach()).mean()


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


@stranger_class(
    "decision_transformer", lambda: (torch.randn(8, 5, 1), torch.randn(8, 5, 12), torch.randn(8, 5, 4), torch.randint(0, 20, (8, 5)))
)
class DecisionTransformer(nn.Module):
    """Returns, states and actions interleaved."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.time = nn.ModuleList([nn.Linear(1, width), nn.Linear(12, width), nn.Linear(4, width)]), nn.Embedding(20, width)
        self.norm, self.layer, self.out = (
            nn.LayerNorm(width),
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True),
            nn.Linear(width, 4),
        )

    def forward(self, returns, state, action, time):
        B, T = time.shape
        t = self.time(time)
        parts = [embed(x) + t for embed, x in zip(self.embed, (returns, state, action))]
        x = self.norm(torch.stack(parts, 1).permute(0, 2, 1, 3).reshape(B, 3 * T, -1))
        mask = nn.Transformer.generate_square_subsequent_mask(3 * T, device=x.device, dtype=x.dtype)
        h = self.layer(x, src_mask=mask, is_causal=True)
        a = self.out(h.reshape(B, T, 3, -1)[:, :, 1]).tanh()
        return F.mse_loss(a, action) if self.training else a[:, -1]


@stranger_class("rssm", lambda: (torch.randn(8, 5, 24), torch.randn(8, 5, 4)))
class WorldModel(nn.Module):
    """A recurrent state with categorical latents, straight through their modes; balanced divergences, free bits."""

    def __init__(self, width=32, groups=4, classes=8):
        super().__init__()
        self.shape, z = (groups, classes), groups * classes
        self.encode, self.decode, self.inp, self.cell = (
            mlp(24, 32, 32),
            mlp(width + z, 32, 24),
            nn.Linear(z + 4, width),
            nn.GRUCell(width, width),
        )
        self.prior, self.posterior, self.reward = nn.Linear(width, z), nn.Linear(width + 32, z), nn.Linear(width + z, 1)

    def forward(self, observed, action):
        e, B = self.encode(observed), len(observed)
        h, z = e.new_zeros(B, 32), e.new_zeros(B, 32)
        loss, found = 0.0, []
        for t in range(observed.shape[1]):
            h = self.cell(F.elu(self.inp(torch.cat([z, action[:, t]], -1))), h)
            prior = self.prior(h).unflatten(-1, self.shape).log_softmax(-1)
            post = self.posterior(torch.cat([h, e[:, t]], -1)).unflatten(-1, self.shape).log_softmax(-1)
            hot = F.one_hot(post.argmax(-1), self.shape[1]).to(post.dtype)
            z = (hot + post.exp() - post.exp().detach()).flatten(1)
            for a, b, weight in ((post.detach(), prior, 0.8), (post, prior.detach(), 0.2)):
                loss = loss + weight * F.kl_div(b, a, log_target=True, reduction="none").sum((-1, -2)).clamp(min=1.0).mean()
            found.append(torch.cat([h, z], -1))
        s = torch.stack(found, 1)
        return F.mse_loss(self.decode(s), observed) + loss + self.reward(s).square().mean() if self.training else (s, self.reward(s))


@stranger_class(
    "vtrace", lambda: (torch.randn(6, 8, 16), torch.randint(0, 4, (6, 8)), torch.randn(6, 8), torch.randn(6, 8) - 1.4), modes=(TRAINING,)
)
class VTrace(nn.Module):
    """An actor with an LSTM, corrections by a loop back in time without gradients."""

    def __init__(self):
        super().__init__()
        self.lstm, self.actor, self.critic = nn.LSTM(16, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x, action, reward, behaviour):
        h, _ = self.lstm(x)
        logp, value = self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1)
        mine = logp.gather(2, action.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            rho = (mine - behaviour).exp().clamp(max=1.0)
            after = torch.cat([value[1:], value[-1:]])
            delta, acc, vs = rho * (reward + 0.99 * after - value), torch.zeros_like(value[0]), []
            for t in reversed(range(len(x))):
                acc = delta[t] + 0.99 * rho[t] * acc
                vs.append(acc)
            vs = torch.stack(vs[::-1]) + value
            advantage = rho * (reward + 0.99 * torch.cat([vs[1:], vs[-1:]]) - value)
        return -(mine * advantage).mean() + 0.5 * (vs - value).square().mean() + 0.01 * (logp.exp() * logp).sum(-1).mean()


@stranger_class(
    "muzero",
    lambda: (states(), torch.randint(0, 4, (8, 3))),
    lambda: (torch.rand(8, 3, 4).softmax(-1), torch.randn(8, 3), torch.randn(8, 3)),
)
class MuZero(nn.Module):
    """Three steps of imagined dynamics, gradients halved at each."""

    def __init__(self):
        super().__init__()
        self.represent, self.dynamics, self.reward, self.predict = mlp(16, 32, 16), mlp(20, 32, 16), nn.Linear(16, 1), mlp(16, 32, 5)

    def forward(self, x, plan, policy=None, value=None, reward=None):
        s, loss, values = self.represent(x), 0.0, []
        for k in range(3):
            low, high = s.amin(1, keepdim=True), s.amax(1, keepdim=True)
            s = (s - low) / (high - low + 1e-5)
            s = self.dynamics(torch.cat([s, F.one_hot(plan[:, k], 4).to(s.dtype)], -1))
            logits, v = self.predict(s).split([4, 1], -1)
            values.append(v)
            if policy is not None:
                loss = (
                    loss
                    + F.cross_entropy(logits, policy[:, k])
                    + F.mse_loss(v[:, 0], value[:, k])
                    + F.mse_loss(self.reward(s)[:, 0], reward[:, k])
                )
                s = 0.5 * s + 0.5 * s.detach()
        return torch.cat(values, 1) if policy is None else loss / 3

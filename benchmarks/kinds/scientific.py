"""Models of physics, chemistry and geometry: operators between functions, residuals of equations, graphs, points, kernels."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import hessian, jacrev, vmap

from benchmarks.strangers import stranger_class


def mlp(*sizes, act=nn.Tanh):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


@stranger_class("deeponet", lambda: (torch.randn(8, 32), torch.rand(20, 2)), lambda: (torch.randn(8, 20),))
class DeepONet(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch, self.trunk, self.bias = mlp(32, 64, 16), mlp(2, 64, 16), nn.Parameter(torch.zeros(()))

    def forward(self, u, at, target=None):
        y = torch.einsum("bp,np->bn", self.branch(u), self.trunk(at)) + self.bias
        return y if target is None else F.mse_loss(y, target)


@stranger_class("pinn", lambda: (torch.rand(32, 2), torch.rand(8, 2)))
class BurgersPINN(nn.Module):
    """u_t + u u_x = nu u_xx by torch.func, and the boundary."""

    def __init__(self):
        super().__init__()
        self.net = mlp(2, 32, 32, 1)

    def forward(self, inner, boundary):
        def u(at):
            return self.net(at).squeeze(-1)

        if not self.training:
            return u(inner)
        value = vmap(u)(inner)
        slope = vmap(jacrev(u))(inner)
        curvature = vmap(hessian(u))(inner)
        residual = slope[:, 1] + value * slope[:, 0] - 0.01 / math.pi * curvature[:, 0, 0]
        return residual.square().mean() + u(boundary).square().mean()


def graph(nodes=16, edges=40):
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges)), torch.randn(edges, 8)


@stranger_class("gat", lambda: graph()[:2], lambda: (torch.randint(0, 4, (16,)),))
class GAT(nn.Module):
    """Softmax over the edges of a node by scatter_reduce."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        self.w, self.a = nn.Linear(16, heads * width, bias=False), nn.Parameter(torch.randn(2, heads, width) * 0.3)
        self.head, self.heads = nn.Linear(heads * width, 4), heads

    def forward(self, x, edge_index, label=None):
        source, to = edge_index
        h = self.w(x).view(len(x), self.heads, -1)
        score = F.leaky_relu((h * self.a[0]).sum(-1)[source] + (h * self.a[1]).sum(-1)[to], 0.2)
        where = to.unsqueeze(-1).expand_as(score)
        top = torch.full((len(x), self.heads), -1e9, dtype=x.dtype, device=x.device).scatter_reduce(0, where, score.detach(), "amax")
        weight = (score - top[to]).exp()
        total = torch.zeros_like(top).scatter_add(0, where, weight)
        y = torch.zeros_like(h).index_add(0, to, h[source] * (weight / (total[to] + 1e-9)).unsqueeze(-1))
        logits = self.head(F.elu(y.flatten(1)))
        return logits if label is None else F.cross_entropy(logits, label)


@stranger_class("dgcnn", lambda: (torch.randn(8, 3, 16),), lambda: (torch.randint(0, 4, (8,)),))
class EdgeConv(nn.Module):
    """The nearest neighbours by topk, gathered."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Sequential(nn.Conv2d(6, 32, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)), nn.Linear(64, 4)

    def forward(self, x, label=None, k=4):
        B, C, N = x.shape
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        square = torch.sum(x**2, dim=1, keepdim=True)
        nearest = (-square - inner - square.transpose(2, 1)).topk(k=k, dim=-1)[1]
        flat = (nearest + torch.arange(B, device=x.device).view(-1, 1, 1) * N).view(-1)
        near = x.transpose(2, 1).reshape(B * N, C)[flat].view(B, N, k, C)
        here = x.transpose(2, 1).unsqueeze(2).expand(-1, -1, k, -1)
        h = self.conv(torch.cat([near - here, here], 3).permute(0, 3, 1, 2)).max(-1)[0]
        logits = self.head(torch.cat([F.adaptive_max_pool1d(h, 1), F.adaptive_avg_pool1d(h, 1)], 1).squeeze(-1))
        return logits if label is None else F.cross_entropy(logits, label, label_smoothing=0.2)


@stranger_class("heat_residual", lambda: (torch.randn(8, 1, 16, 16),))
class HeatResidual(nn.Module):
    """A step of a solver learned without data: the residual of the heat equation by a stencil, periodic."""

    def __init__(self):
        super().__init__()
        conv = [nn.Conv2d(1, 16, 5, padding=2, padding_mode="circular"), nn.Conv2d(16, 1, 5, padding=2, padding_mode="circular")]
        self.net = nn.Sequential(conv[0], nn.GELU(), conv[1])
        self.register_buffer("stencil", torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])[None, None])

    def forward(self, u):
        after = u + self.net(u)
        if not self.training:
            return after
        mid = (u + after) / 2
        by_hand = sum(torch.roll(mid, s, d) for s in (1, -1) for d in (2, 3)) - 4 * mid
        laplacian = F.conv2d(F.pad(mid, (1, 1, 1, 1), mode="circular"), self.stencil)
        return ((after - u) - 0.1 * laplacian).square().mean() + (by_hand - laplacian).abs().max()


@stranger_class("nerf", lambda: (torch.randn(8, 3), torch.randn(8, 3)), lambda: (torch.rand(8, 3),))
class NeRF(nn.Module):
    """Points along rays, positions encoded, colours summed by transmittance."""

    def __init__(self):
        super().__init__()
        self.a, self.b = mlp(3 + 24, 32, 32, act=nn.ReLU), mlp(32 + 27, 32, 4, act=nn.ReLU)

    @staticmethod
    def encoded(x):
        angles = x.unsqueeze(-1) * 2.0 ** torch.arange(4, device=x.device)
        return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)

    def forward(self, origin, direction, colour=None):
        t = torch.linspace(2, 6, 12, device=origin.device, dtype=origin.dtype)
        p = self.encoded(origin[:, None] + t[:, None] * F.normalize(direction, dim=-1)[:, None])
        raw = self.b(torch.cat([self.a(p), p], -1))
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * F.pad(t.diff(), (0, 1), value=1e10))
        T = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        rgb = ((alpha * T).unsqueeze(-1) * raw[..., :3].sigmoid()).sum(1)
        return rgb if colour is None else F.mse_loss(rgb, colour)


@stranger_class("kan", lambda: (torch.rand(8, 16) * 2 - 1,), lambda: (torch.randint(0, 4, (8,)),))
class KAN(nn.Module):
    """Splines on the edges, by the recursion of Cox and de Boor."""

    def __init__(self, a=16, b=4, grid=5, order=3):
        super().__init__()
        h = 2 / grid
        self.register_buffer("grid", torch.arange(-order, grid + order + 1) * h - 1)
        self.base, self.spline = nn.Parameter(torch.randn(b, a) * 0.3), nn.Parameter(torch.randn(b, a, grid + order) * 0.1)
        self.order = order

    def forward(self, x, label=None):
        g, u = self.grid, x.unsqueeze(-1)
        bases = ((u >= g[:-1]) & (u < g[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (u - g[: -(k + 1)]) / (g[k:-1] - g[: -(k + 1)]) * bases[..., :-1]
            bases = left + (g[k + 1 :] - u) / (g[k + 1 :] - g[1:-k]) * bases[..., 1:]
        y = F.linear(F.silu(x), self.base) + F.linear(bases.flatten(1), self.spline.flatten(1))
        return y if label is None else F.cross_entropy(y, label)


@stranger_class("deep_kernel_gp", lambda: (torch.randn(16, 8), torch.randn(16), torch.randn(8, 8)))
class DeepKernelGP(nn.Module):
    """The marginal likelihood of a Gaussian process over features of a net, by Cholesky."""

    def __init__(self):
        super().__init__()
        self.net, self.log_noise = mlp(8, 32, 4), nn.Parameter(torch.tensor(-1.0))

    @staticmethod
    def kernel(a, b):
        return torch.exp(-0.5 * (a.unsqueeze(1) - b.unsqueeze(0)).square().sum(-1))

    def forward(self, x, y, at):
        h = self.net(x)
        K = self.kernel(h, h) + self.log_noise.exp() * torch.eye(len(x), device=x.device, dtype=x.dtype)
        L = torch.linalg.cholesky(K)
        alpha = torch.cholesky_solve(y.unsqueeze(-1), L)
        if self.training:
            return 0.5 * (y @ alpha).squeeze() + L.diagonal().log().sum()
        cross = self.kernel(self.net(at), h)
        v = torch.linalg.solve_triangular(L, cross.t(), upper=False)
        return (cross @ alpha).squeeze(-1), 1 - v.square().sum(0)


@stranger_class("set_transformer", lambda: (torch.randn(8, 12, 16),), lambda: (torch.randn(8),))
class SetTransformer(nn.Module):
    """Induced points, and pooling by a learned seed."""

    def __init__(self, width=16):
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 4, width)), nn.Parameter(torch.randn(1, 1, width))
        self.mab = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x, target=None):
        B = len(x)
        h = self.mab[0](self.points.expand(B, -1, -1), x, x, need_weights=False)[0]
        x = x + self.mab[1](x, h, h, need_weights=False)[0]
        y = self.head(self.mab[2](self.seed.expand(B, -1, -1), x, x)[0]).view(B)
        return y if target is None else F.huber_loss(y, target)

"""Models of physics, chemistry and geometry: operators between functions, residuals of equations, graphs, point clouds, proteins."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from benchmarks.strangers import TRAINING, stranger_class


def mlp(*sizes, act=nn.Tanh):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


class SpectralConv2d(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.low, self.high = (nn.Parameter(torch.randn(width, width, modes, modes, 2) / width**2) for _ in range(2))

    def forward(self, x):
        B, C, H, W = x.shape
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(B, C, H, W // 2 + 1, dtype=spectrum.dtype, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], torch.view_as_complex(self.low))
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], torch.view_as_complex(self.high))
        return torch.fft.irfft2(out, s=(H, W))


@stranger_class("fno", lambda: (torch.randn(8, 16, 16, 1),), lambda: (torch.randn(8, 16, 16, 1),))
class FNO(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.lift, self.head = nn.Linear(3, width), mlp(width, 32, 1, act=nn.GELU)
        self.spectral = nn.ModuleList(SpectralConv2d(width, 4) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, a, target=None):
        B, H, W, _ = a.shape
        grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, H), torch.linspace(0, 1, W), indexing="ij"), -1).to(a)
        x = self.lift(torch.cat([a, grid.expand(B, -1, -1, -1)], -1)).permute(0, 3, 1, 2)
        for spectral, local in zip(self.spectral, self.local):
            x = F.gelu(spectral(x) + local(x))
        y = self.head(x.permute(0, 2, 3, 1))
        if target is None:
            return y
        return ((y - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


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


@stranger_class("neural_ode", lambda: (torch.randn(8, 16),), lambda: (torch.randint(0, 4, (8,)),))
class NeuralODE(nn.Module):
    """Four steps of Runge and Kutta."""

    def __init__(self):
        super().__init__()
        self.f, self.head = mlp(17, 32, 16), nn.Linear(16, 4)

    def forward(self, z, label=None):
        def f(t, z):
            return self.f(torch.cat([z, torch.full_like(z[:, :1], t)], -1))

        h = 0.25
        for k in range(4):
            t = k * h
            k1 = f(t, z)
            k2 = f(t + h / 2, z + h / 2 * k1)
            k3 = f(t + h / 2, z + h / 2 * k2)
            k4 = f(t + h, z + h * k3)
            z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(z) if label is None else F.cross_entropy(self.head(z), label)


def graph(nodes=16, edges=40):
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges)), torch.randn(edges, 8)


@stranger_class("graph_net", graph, lambda: (torch.randn(16, 16),))
class GraphNetwork(nn.Module):
    """MeshGraphNet: edges and nodes in turn, sums by index_add."""

    def __init__(self, width=16):
        super().__init__()
        self.edge_in = nn.Linear(8, width)
        self.edges = nn.ModuleList(nn.Sequential(mlp(3 * width, 32, width, act=nn.ReLU), nn.LayerNorm(width)) for _ in range(2))
        self.nodes = nn.ModuleList(nn.Sequential(mlp(2 * width, 32, width, act=nn.ReLU), nn.LayerNorm(width)) for _ in range(2))

    def forward(self, x, edge_index, edge, target=None):
        source, to = edge_index
        e = self.edge_in(edge)
        for edges, nodes in zip(self.edges, self.nodes):
            e = e + edges(torch.cat([x[source], x[to], e], -1))
            x = x + nodes(torch.cat([x, torch.zeros_like(x).index_add(0, to, e)], -1))
        return x if target is None else F.mse_loss(x, target)


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


@stranger_class("gcn_normalized", lambda: graph()[:2], lambda: (torch.randint(0, 4, (16,)), torch.rand(16) < 0.5))
class GCN(nn.Module):
    """Degrees by bincount; the loss over a mask of nodes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, edge_index, label=None, mask=None):
        source, to = edge_index
        degree = torch.ones(len(x), dtype=x.dtype, device=x.device).scatter_add(0, to, torch.ones_like(to, dtype=x.dtype))
        weight = (degree[source] * degree[to]).rsqrt().unsqueeze(-1)

        def spread(h):
            return h / degree.unsqueeze(-1) + torch.zeros_like(h).index_add(0, to, h[source] * weight)

        logits = spread(self.b(F.relu(spread(self.a(x)))))
        if label is None:
            return logits.log_softmax(-1)
        loss = F.cross_entropy(logits, label, reduction="none")
        return (loss * mask).sum() / mask.sum()


@stranger_class("egnn", lambda: (torch.randn(8, 6, 16), torch.randn(8, 6, 3)), lambda: (torch.randn(8),))
class EGNN(nn.Module):
    """Equivariant coordinates over all pairs."""

    def __init__(self, width=16):
        super().__init__()
        self.edge, self.coordinate, self.node = (
            mlp(2 * width + 1, 32, width, act=nn.SiLU),
            mlp(width, width, 1, act=nn.SiLU),
            mlp(2 * width, 32, width, act=nn.SiLU),
        )
        self.energy = nn.Linear(width, 1)

    def forward(self, h, x, target=None):
        n = h.shape[1]
        for _ in range(2):
            away = x.unsqueeze(2) - x.unsqueeze(1)
            pair = [h.unsqueeze(2).expand(-1, -1, n, -1), h.unsqueeze(1).expand(-1, n, -1, -1), away.square().sum(-1, keepdim=True)]
            m = self.edge(torch.cat(pair, -1)) * (1 - torch.eye(n, device=h.device, dtype=h.dtype)).unsqueeze(-1)
            x = x + (away * self.coordinate(m)).sum(2) / (n - 1)
            h = h + self.node(torch.cat([h, m.sum(2)], -1))
        energy = self.energy(h).sum((1, 2))
        return (energy, x) if target is None else F.l1_loss(energy, target)


@stranger_class("schnet", lambda: (torch.randint(0, 10, (8, 6)), torch.randn(8, 6, 3)), lambda: (torch.randn(8), torch.randn(8, 6, 3)))
class SchNet(nn.Module):
    """Energies, and forces as their gradient by the positions."""

    def __init__(self, width=16, rbf=8):
        super().__init__()
        self.embed, self.filter = nn.Embedding(10, width), mlp(rbf, width, width, act=nn.Softplus)
        self.inp, self.out = nn.Linear(width, width, bias=False), mlp(width, 16, 1, act=nn.Softplus)
        self.register_buffer("centers", torch.linspace(0, 5, rbf))

    def energy(self, x, z):
        n = z.shape[-1]
        distance = ((x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1) + torch.eye(n, device=x.device)).sqrt()
        cut = 0.5 * (torch.cos(distance * math.pi / 5) + 1) * (distance < 5)
        W = self.filter(torch.exp(-((distance.unsqueeze(-1) - self.centers) ** 2))) * cut.unsqueeze(-1)
        h = self.embed(z)
        h = h + torch.einsum("...ijc,...jc->...ic", W, self.inp(h))
        return self.out(h).sum((-1, -2))

    def forward(self, z, x, energy=None, force=None):
        if energy is None:
            return self.energy(x, z)
        forces = -grad(lambda x: self.energy(x, z).sum())(x)
        return F.mse_loss(self.energy(x, z), energy) + 10 * F.mse_loss(forces, force)


@stranger_class("hamiltonian", lambda: (torch.randn(8, 4),), lambda: (torch.randn(8, 4),))
class Hamiltonian(nn.Module):
    def __init__(self):
        super().__init__()
        self.H = mlp(4, 64, 64, 1)

    def forward(self, qp, target=None):
        dH = vmap(grad(lambda x: self.H(x).squeeze(-1)))(qp)
        dq, dp = dH.chunk(2, -1)
        flow = torch.cat([dp, -dq], -1)
        return flow if target is None else F.mse_loss(flow, target)


@stranger_class("triangle_block", lambda: (torch.randn(2, 8, 8, 16), torch.randn(2, 4, 8, 16)))
class TriangleBlock(nn.Module):
    """Pairs and rows of an alignment, as in AlphaFold: outer product mean, triangles multiplied and attended, row attention with bias."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.norm, self.ab, self.gate_ab, self.gate = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.inner, self.out, self.heads = nn.LayerNorm(width), nn.Linear(width, width), heads
        self.qkv, self.bias, self.attended = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, heads, bias=False),
            nn.Linear(width, width),
        )
        self.row_qkv, self.row_bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, heads, bias=False)
        self.outer = nn.Linear(16, width)
        self.left, self.right = nn.Linear(width, 4), nn.Linear(width, 4)

    def multiplied(self, z):
        x = self.norm(z)
        a, b = (self.gate_ab(x).sigmoid() * self.ab(x)).chunk(2, -1)
        return self.gate(x).sigmoid() * self.out(self.inner(torch.einsum("bikc,bjkc->bijc", a, b)))

    def attention(self, x, qkv, bias):
        q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        scores = torch.einsum("brihd,brjhd->brhij", q, k) / math.sqrt(q.shape[-1]) + bias
        return torch.einsum("brhij,brjhd->brihd", scores.softmax(-1), v).flatten(-2)

    def forward(self, z, m):
        m = m + self.attention(m, self.row_qkv, self.row_bias(z).permute(0, 3, 1, 2).unsqueeze(1))
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(m), self.right(m)) / m.shape[1]
        z = z + self.outer(outer.flatten(-2))
        z = z + self.multiplied(z)
        x = self.norm(z)
        z = z + self.attended(self.attention(x, self.qkv, self.bias(x).permute(0, 3, 1, 2).unsqueeze(1)))
        return z.square().mean() + m.square().mean() if self.training else (z, m)


@stranger_class("invariant_points", lambda: (torch.randn(2, 8, 16), torch.randn(2, 8, 4), torch.randn(2, 8, 3)))
class InvariantPoints(nn.Module):
    """Points in the frame of each residue attend by their distance; frames come from quaternions."""

    def __init__(self, width=16, heads=2, points=4):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, heads * points * 3) for _ in range(3))
        self.heads, self.weight, self.out = heads, nn.Parameter(torch.zeros(heads)), nn.Linear(heads * points * 3, width)

    def forward(self, s, quaternion, t):
        w, x, y, z = F.normalize(quaternion, dim=-1).unbind(-1)
        R = torch.stack([
            torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], -1),
            torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], -1),
            torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], -1),
        ], -2)  # fmt: skip
        q, k, v = (
            torch.einsum("bnij,bnhpj->bnhpi", R, f(s).unflatten(-1, (self.heads, -1, 3))) + t[:, :, None, None]
            for f in (self.q, self.k, self.v)
        )
        apart = (q.unsqueeze(2) - k.unsqueeze(1)).square().sum((-1, -2))
        a = (-F.softplus(self.weight) * apart / 10).softmax(2)
        y = torch.einsum("bijh,bjhpc->bihpc", a, v) - t[:, :, None, None]
        y = self.out(torch.einsum("bnji,bnhpj->bnhpi", R, y).flatten(2))
        return y.square().mean() if self.training else y


@stranger_class("pointnet", lambda: (torch.randn(8, 3, 24),), lambda: (torch.randint(0, 4, (8,)),))
class PointNet(nn.Module):
    """A transform of the points by a net of its own, max over all points, and its penalty."""

    def __init__(self):
        super().__init__()
        self.t1, self.t2 = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU()), nn.Linear(32, 9)
        self.features, self.head = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1)), nn.Linear(64, 4)

    def forward(self, x, label=None):
        eye = torch.eye(3, device=x.device, dtype=x.dtype)
        T = self.t2(self.t1(x).max(2)[0]).view(-1, 3, 3) + eye
        logits = self.head(self.features(torch.bmm(T, x)).max(2)[0])
        if label is None:
            return logits
        return F.nll_loss(F.log_softmax(logits, 1), label) + 1e-3 * torch.norm(T @ T.transpose(1, 2) - eye, dim=(1, 2)).mean()


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


@stranger_class("spherical_harmonics", lambda: (torch.randn(8, 10, 3), torch.randn(8, 10, 8)))
class SphericalConv(nn.Module):
    """Harmonics up to l = 2, a radial net per degree, invariants of each."""

    def __init__(self, width=8):
        super().__init__()
        self.radial, self.out = mlp(4, 16, 3 * width, act=nn.SiLU), nn.Linear(3 * width, 1)

    @staticmethod
    def harmonics(v):
        x, y, z = v.unbind(-1)
        one = [x, y, z]
        two = [x * y * 3**0.5, y * z * 3**0.5, (2 * z * z - x * x - y * y) / 2, x * z * 3**0.5, (x * x - y * y) * 3**0.5 / 2]
        return torch.stack([torch.ones_like(x)], -1), torch.stack(one, -1), torch.stack(two, -1)

    def forward(self, position, feature):
        r = position.norm(dim=-1, keepdim=True)
        radial = self.radial(torch.exp(-((r - torch.arange(4, device=r.device)) ** 2))).chunk(3, -1)
        moments = [torch.einsum("bnc,bnm->bcm", feature * w, Y) for w, Y in zip(radial, self.harmonics(position / r))]
        energy = self.out(torch.cat([m.square().sum(-1) for m in moments], -1)).squeeze(-1)
        return energy.square().mean() if self.training else energy


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
        self.base, self.spline, self.order = (
            nn.Parameter(torch.randn(b, a) * 0.3),
            nn.Parameter(torch.randn(b, a, grid + order) * 0.1),
            order,
        )

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


@stranger_class("sindy", lambda: (torch.randn(32, 3),), lambda: (torch.randn(32, 3),))
class SINDyAutoencoder(nn.Module):
    """Derivatives through an encoder by jvp, a library of terms, a sparse loss."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode, self.xi = (
            mlp(3, 16, 2, act=nn.Sigmoid),
            mlp(2, 16, 3, act=nn.Sigmoid),
            nn.Parameter(torch.randn(6, 2) * 0.1),
        )

    def forward(self, x, dx=None):
        z = self.encode(x)
        a, b = z.unbind(-1)
        terms = torch.stack([torch.ones_like(a), a, b, a * a, a * b, b * b], -1) @ self.xi
        if dx is None:
            return self.decode(z), terms
        dz = torch.func.jvp(self.encode, (x,), (dx,))[1]
        return F.mse_loss(self.decode(z), x) + F.mse_loss(terms, dz) + 1e-3 * self.xi.abs().sum()


@stranger_class("maml", lambda: (torch.randn(4, 8, 1), torch.randn(4, 8, 1), torch.randn(4, 8, 1), torch.randn(4, 8, 1)), modes=(TRAINING,))
class MAML(nn.Module):
    """A step of SGD inside, per task, by functional_call."""

    def __init__(self):
        super().__init__()
        self.net = mlp(1, 32, 1)

    def forward(self, x, y, x_query, y_query):
        weights = dict(self.net.named_parameters())

        def loss(weights, x, y):
            return F.mse_loss(functional_call(self.net, weights, (x,)), y)

        def task(x, y, x_query, y_query):
            slopes = grad(loss)(weights, x, y)
            return loss({name: w - 0.1 * slopes[name] for name, w in weights.items()}, x_query, y_query)

        return vmap(task)(x, y, x_query, y_query).mean()

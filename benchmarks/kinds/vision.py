"""Models of images and videos: branches, pyramids, detectors, segmenters, masked ones, and ones that track or restore."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


def images(size=32, channels=3, batch=8):
    return torch.randn(batch, channels, size, size)


def labels(classes=4, batch=8):
    return (torch.randint(0, classes, (batch,)),)


class Classifier(nn.Module):
    def forward(self, x, label=None):
        logits = self.logits(x)
        return logits if label is None else F.cross_entropy(logits, label)


@stranger_class("inception", lambda: (images(17),), labels)
class Inception(Classifier):
    """Branches of several kernels on an image of 17: what is left over by strides and ceil_mode."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, (1, 7), padding=(0, 3)), nn.Conv2d(8, 8, (7, 1), padding=(3, 0)))
        self.c = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 8, 1))
        self.pool, self.norm, self.head = nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(3), nn.Linear(24 * 4, 4)

    def logits(self, x):
        x = self.norm(self.pool(F.relu(torch.cat([self.a(x), self.b(x), self.c(x)], 1))))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


@stranger_class(
    "detr_set_loss",
    lambda: (images(),),
    lambda: (torch.stack([torch.randperm(8)[:3] for _ in range(8)]), torch.randint(0, 4, (8, 3)), torch.rand(8, 3, 4)),
)
class SetDetector(nn.Module):
    """Queries, boxes by L1 and generalized IoU; the matching is an input."""

    def __init__(self, width=32):
        super().__init__()
        self.backbone, self.pos = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.rand(1, 16, width))
        self.queries = nn.Embedding(8, width)
        self.transformer = nn.Transformer(width, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(width, 5), nn.Linear(width, 4)

    @staticmethod
    def corners(b):
        return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1)

    def giou(self, a, b):
        a, b = self.corners(a), self.corners(b)
        (w1, h1), (w2, h2) = (a[..., 2:] - a[..., :2]).unbind(-1), (b[..., 2:] - b[..., :2]).unbind(-1)
        inner = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
        union = w1 * h1 + w2 * h2 - inner
        outer = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
        return inner / (union + 1e-6) - (outer - union) / (outer + 1e-6)

    def forward(self, x, matched=None, label=None, box=None):
        h = self.backbone(x).flatten(2).transpose(1, 2) + self.pos
        h = self.transformer(h, self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1))
        logits, boxes = self.classes(h), self.boxes(h).sigmoid()
        if matched is None:
            return {"logits": logits, "boxes": boxes}
        wanted = torch.full(logits.shape[:2], 4, dtype=torch.int64, device=x.device).scatter(1, matched, label)
        weight = torch.ones(5, device=x.device, dtype=logits.dtype)
        weight[-1] = 0.1
        chosen = torch.take_along_dim(boxes, matched.unsqueeze(-1), 1)
        return (
            F.cross_entropy(logits.transpose(1, 2), wanted, weight) + 5 * F.l1_loss(chosen, box) + 2 * (1 - self.giou(chosen, box)).mean()
        )


@stranger_class("deeplab", lambda: (images(),), lambda: (torch.randint(0, 4, (8, 32, 32)),))
class DeepLab(nn.Module):
    """Atrous pyramid, upsampled; cross entropy with an ignored class, and the Dice loss."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.aspp = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.image, self.project, self.head = nn.Conv2d(16, 8, 1), nn.Conv2d(32, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x, label=None):
        h = self.stem(x)
        pooled = F.interpolate(self.image(F.adaptive_avg_pool2d(h, 1)), size=h.shape[2:], mode="bilinear", align_corners=False)
        h = F.relu(self.project(torch.cat([*[conv(h) for conv in self.aspp], pooled], 1)))
        logits = F.interpolate(self.head(h), size=x.shape[2:], mode="bilinear", align_corners=False)
        if label is None:
            return logits.argmax(1)
        hot = F.one_hot(label, 4).permute(0, 3, 1, 2)
        p = logits.softmax(1)
        dice = 1 - (2 * (p * hot).sum((0, 2, 3)) + 1) / (p.sum((0, 2, 3)) + hot.sum((0, 2, 3)) + 1)
        return F.cross_entropy(logits, label, ignore_index=0) + dice.mean()


@stranger_class("masked_autoencoder", lambda: (images(), torch.rand(8, 16)))
class MaskedAutoencoder(nn.Module):
    """The order of the patches is a sort of noise, which is an input."""

    def __init__(self, width=32):
        super().__init__()
        self.patch, self.pos = nn.Linear(192, width), nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.mask = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder, self.out = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True), nn.Linear(width, 192)

    def forward(self, x, noise, keep=4):
        p = torch.einsum("nchpwq->nhwpqc", x.reshape(len(x), 3, 4, 8, 4, 8)).reshape(len(x), 16, 192)
        h = self.patch(p) + self.pos
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = torch.gather(h, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, h.shape[-1]))
        kept = self.encoder(kept)
        if not self.training:
            return kept, restore
        full = torch.cat([kept, self.mask.repeat(len(x), 16 - keep, 1)], 1)
        full = torch.gather(full, 1, restore.unsqueeze(-1).repeat(1, 1, h.shape[-1])) + self.pos
        mask = torch.ones(len(x), 16, device=x.device, dtype=x.dtype)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        loss = (self.out(self.decoder(full)) - p).pow(2).mean(-1)
        return (loss * mask).sum() / mask.sum()


@stranger_class(
    "promptable_segmenter",
    lambda: (images(), torch.rand(8, 2, 2), torch.randint(0, 2, (8, 2))),
    lambda: (torch.randint(0, 2, (8, 3, 16, 16)).float(),),
)
class PromptableSegmenter(nn.Module):
    """Points as random Fourier features, attention in two ways, masks by a product with upscaled features."""

    def __init__(self, width=32):
        super().__init__()
        self.image = nn.Conv2d(3, width, 8, 8)
        self.register_buffer("gauss", torch.randn(2, width // 2))
        self.kinds, self.tokens = nn.Embedding(2, width), nn.Embedding(4, width)
        self.to_image, self.to_tokens = (nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.up = nn.Sequential(nn.ConvTranspose2d(width, 16, 2, 2), nn.GroupNorm(1, 16), nn.GELU(), nn.ConvTranspose2d(16, 8, 2, 2))
        self.hyper, self.iou = nn.ModuleList(nn.Linear(width, 8) for _ in range(3)), nn.Linear(width, 3)

    def encoded(self, at):
        angles = 2 * math.pi * (2 * at - 1) @ self.gauss
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, x, points, kinds, mask=None):
        h = self.image(x)
        B, C, H, W = h.shape
        at = torch.stack(torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij"), -1).to(points) / H
        pos, h = self.encoded(at.flatten(0, 1)).unsqueeze(0), h.flatten(2).transpose(1, 2)
        t = torch.cat([self.tokens.weight.expand(B, -1, -1), self.encoded(points) + self.kinds(kinds)], 1)
        t = t + self.to_image(t, h + pos, h)[0]
        h = h + self.to_tokens(h + pos, t, t)[0]
        up = self.up(h.transpose(1, 2).view(B, C, H, W))
        masks = torch.einsum("bkc,bchw->bkhw", torch.stack([f(t[:, k + 1]) for k, f in enumerate(self.hyper)], 1), up)
        if mask is None:
            return masks > 0, self.iou(t[:, 0])
        loss = F.binary_cross_entropy_with_logits(masks, mask, reduction="none").mean((2, 3))
        return loss.min(1).values.mean() + self.iou(t[:, 0]).square().mean()


@stranger_class("spatial_transformer", lambda: (images(16, 1),), labels)
class SpatialTransformer(Classifier):
    def __init__(self):
        super().__init__()
        self.locate, self.theta = nn.Sequential(nn.Conv2d(1, 8, 7), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()), nn.Linear(8 * 25, 6)
        self.net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))

    def logits(self, x):
        grid = F.affine_grid(self.theta(self.locate(x)).view(-1, 2, 3).tanh(), list(x.shape), align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))


@stranger_class("super_resolution", lambda: (images(8),), lambda: (images(16),))
class SuperResolution(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inp, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.PReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)
        )

    def forward(self, x, target=None):
        h = self.inp(x)
        for block in self.body:
            h = h + 0.1 * block(h)
        y = self.out(h) + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        if target is None:
            return y.clamp(0, 1)
        total = (y[..., 1:] - y[..., :-1]).abs().mean() + (y[..., 1:, :] - y[..., :-1, :]).abs().mean()
        return ((y - target) ** 2 + 1e-6).sqrt().mean() + 0.01 * total


@stranger_class("raft_correlation", lambda: (images(8, 3), images(8, 3)), lambda: (torch.randn(8, 2, 8, 8),))
class OpticalFlow(nn.Module):
    """All pairs, looked up where the flow leads, flow refined twice."""

    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Conv2d(3, width, 3, padding=1)
        self.update = nn.Sequential(nn.Conv2d(9 + 2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 3, padding=1))

    def forward(self, a, b, target=None):
        a, b = self.features(a), self.features(b)
        B, C, H, W = a.shape
        volume = (a.flatten(2).transpose(1, 2) @ b.flatten(2) / C**0.5).reshape(B * H * W, 1, H, W)
        y, x = torch.meshgrid(torch.arange(H, device=a.device), torch.arange(W, device=a.device), indexing="ij")
        home = torch.stack([x, y]).to(a.dtype)[None]
        flow, loss = torch.zeros(B, 2, H, W, dtype=a.dtype, device=a.device), 0.0
        around = torch.stack(torch.meshgrid(torch.arange(-1, 2), torch.arange(-1, 2), indexing="ij"), -1).to(a)
        for k in range(2):
            at = (home + flow.detach()).permute(0, 2, 3, 1).reshape(B * H * W, 1, 1, 2) + around
            seen = F.grid_sample(volume, 2 * at / (H - 1) - 1, align_corners=True).view(B, H, W, 9).permute(0, 3, 1, 2)
            flow = flow + self.update(torch.cat([seen, flow], 1))
            if target is not None:
                loss = loss + 0.8 ** (1 - k) * (flow - target).abs().mean()
        return flow if target is None else loss


@stranger_class("video_factorized", lambda: (torch.randn(8, 3, 4, 16, 16),), labels)
class FactorizedVideo(Classifier):
    """Convolutions over space, then over time."""

    def __init__(self):
        super().__init__()
        self.space, self.n1 = nn.Conv3d(3, 16, (1, 3, 3), (1, 2, 2), (0, 1, 1)), nn.BatchNorm3d(16)
        self.time, self.n2 = nn.Conv3d(16, 16, (3, 1, 1), padding=(1, 0, 0)), nn.InstanceNorm3d(16, affine=True)
        self.pool, self.head = nn.MaxPool3d((1, 2, 2)), nn.Linear(16, 4)

    def logits(self, x):
        x = self.pool(F.relu(self.n1(self.space(x))))
        return self.head(F.adaptive_avg_pool3d(F.relu(self.n2(self.time(x))), 1).flatten(1))


@stranger_class("cbam", lambda: (images(16, 16),), labels)
class CBAM(Classifier):
    """Attention over channels, then over places."""

    def __init__(self, width=16):
        super().__init__()
        self.mlp, self.space = nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, width)), nn.Conv2d(2, 1, 7, padding=3)
        self.head = nn.Linear(width, 4)

    def logits(self, x):
        x = x * torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))[..., None, None]
        x = x * self.space(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)).sigmoid()
        return self.head(F.lp_pool2d(x, 2, 4).mean((2, 3)))


@stranger_class("bifpn_fusion", lambda: (images(16, 16), images(8, 16), images(4, 16)))
class WeightedFusion(nn.Module):
    """Levels of an image's pyramid, summed with learned positive weights."""

    def __init__(self, width=16):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 3))
        self.conv = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(2))

    def forward(self, p3, p4, p5):
        w = F.relu(self.w)
        w = w / (w.sum(1, keepdim=True) + 1e-4)
        up = self.conv[0](F.silu(w[0, 0] * p4 + w[0, 1] * F.interpolate(p5, scale_factor=2)))
        out = self.conv[1](F.silu(w[1, 0] * p4 + w[1, 1] * up + w[1, 2] * F.max_pool2d(p3, 3, 2, 1)))
        return out.square().mean() if self.training else out

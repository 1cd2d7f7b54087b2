"""Models of images and videos: mixers, windows, pyramids, detectors, segmenters, masked ones, and ones that track or restore."""

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


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dw, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.up, self.down, self.gamma = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x):
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


@stranger_class("convnext_own", lambda: (images(),), labels)
class ConvNeXt(Classifier):
    def __init__(self):
        super().__init__()
        self.stem, self.block1 = nn.Conv2d(3, 16, 4, 4), ConvNeXtBlock(16)
        self.norm, self.down, self.block2 = nn.LayerNorm(16), nn.Conv2d(16, 32, 2, 2), ConvNeXtBlock(32)
        self.head = nn.Linear(32, 4)

    def logits(self, x):
        x = self.block1(self.stem(x))
        x = self.down(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.head(F.layer_norm(self.block2(x).mean([-2, -1]), (32,)))


@stranger_class("swin_own", lambda: (torch.randn(8, 8, 8, 16),))
class ShiftedWindows(nn.Module):
    """Windows shifted by roll, with a table of relative positions and a mask."""

    def __init__(self, width=16, heads=4, w=4, size=8):
        super().__init__()
        self.qkv, self.out, self.heads, self.w, self.norm = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            w,
            nn.LayerNorm(width),
        )
        at = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + w - 1
        self.register_buffer("index", apart[0] * (2 * w - 1) + apart[1])
        self.table = nn.Parameter(torch.randn((2 * w - 1) ** 2, heads) * 0.02)
        area = torch.zeros(1, size, size, 1)
        for k, rows in enumerate((slice(0, -w), slice(-w, -w // 2), slice(-w // 2, None))):
            for j, columns in enumerate((slice(0, -w), slice(-w, -w // 2), slice(-w // 2, None))):
                area[:, rows, columns] = 3 * k + j
        area = self.windows(area).squeeze(-1)
        self.register_buffer("mask", torch.where(area[:, None] != area[:, :, None], -100.0, 0.0))

    def windows(self, x):
        B, H, W, C = x.shape
        return x.view(B, H // self.w, self.w, W // self.w, self.w, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, self.w**2, C)

    def forward(self, x):
        B, H, W, C = x.shape
        for shift in (0, self.w // 2):
            y = self.windows(torch.roll(self.norm(x), (-shift, -shift), (1, 2)) if shift else self.norm(x))
            q, k, v = self.qkv(y).reshape(len(y), -1, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1) + self.table[self.index.view(-1)].view(self.w**2, self.w**2, -1).permute(
                2, 0, 1
            )
            if shift:
                n = len(self.mask)
                scores = (scores.view(B, n, self.heads, self.w**2, -1) + self.mask[None, :, None]).view(
                    -1, self.heads, self.w**2, self.w**2
                )
            y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(y), -1, C))
            y = y.view(B, H // self.w, W // self.w, self.w, self.w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
            x = x + (torch.roll(y, (shift, shift), (1, 2)) if shift else y)
        return x.square().mean() if self.training else x


@stranger_class("mlp_mixer", lambda: (images(),), labels)
class MLPMixer(Classifier):
    def __init__(self, width=32, patches=16):
        super().__init__()
        self.stem, self.norms = nn.Conv2d(3, width, 8, 8), nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def logits(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for k in range(2):
            x = x + self.tokens[k](self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[k](self.norms[2 * k + 1](x))
        return self.head(x.mean(1))


@stranger_class("mbconv_se", lambda: (images(),), labels)
class MBConv(Classifier):
    """Squeeze and excitation between a depth-wise and a point-wise convolution."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        self.up = nn.Sequential(nn.Conv2d(width, 64, 1, bias=False), nn.BatchNorm2d(64), nn.SiLU())
        self.dw = nn.Sequential(nn.Conv2d(64, 64, 5, 1, 2, groups=64, bias=False), nn.BatchNorm2d(64), nn.SiLU())
        self.se = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(64, 4, 1), nn.SiLU(), nn.Conv2d(4, 64, 1), nn.Sigmoid())
        self.down, self.head = nn.Sequential(nn.Conv2d(64, width, 1, bias=False), nn.BatchNorm2d(width)), nn.Linear(width, 4)

    def logits(self, x):
        x = self.stem(x)
        h = self.dw(self.up(x))
        x = x + self.down(h * self.se(h))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@stranger_class("densenet", lambda: (images(16),), labels)
class DenseNet(Classifier):
    def __init__(self, growth=8):
        super().__init__()
        sizes = [16 + k * growth for k in range(4)]
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(s), nn.ReLU(True), nn.Conv2d(s, growth, 3, padding=1, bias=False)) for s in sizes[:-1]
        )
        self.transition, self.head = nn.Sequential(nn.Conv2d(sizes[-1], 16, 1), nn.AvgPool2d(2)), nn.Linear(16, 4)

    def logits(self, x):
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(self.transition(torch.cat(found, 1)).amax((2, 3)))


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


@stranger_class("shufflenet", lambda: (images(16, 8),), labels)
class ShuffleNet(Classifier):
    def __init__(self):
        super().__init__()
        self.inp, self.dw, self.out = nn.Conv2d(8, 16, 1, groups=4), nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.Conv2d(16, 24, 1, groups=4)
        self.n1, self.n2, self.head = nn.BatchNorm2d(16), nn.BatchNorm2d(24), nn.Linear(32, 4)

    def logits(self, x):
        h = F.relu(self.n1(self.inp(x)))
        B, C, H, W = h.shape
        h = h.view(B, 4, C // 4, H, W).transpose(1, 2).reshape(B, C, H, W)
        h = F.relu(torch.cat([F.avg_pool2d(x, 3, 2, 1), self.n2(self.out(self.dw(h)))], 1))
        return self.head(h.mean((2, 3)))


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


@stranger_class("fpn_retina", lambda: (images(),), lambda: (torch.randint(0, 2, (8, 3, 16, 16)).float(), torch.randn(8, 4, 16, 16)))
class RetinaFPN(nn.Module):
    """A pyramid from above, one head for all levels, focal loss."""

    def __init__(self):
        super().__init__()
        self.c = nn.ModuleList([nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, 2, 1)])
        self.lateral = nn.ModuleList(nn.Conv2d(c, 16, 1) for c in (16, 32, 64))
        self.smooth, self.classes, self.boxes = (
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Conv2d(16, 3, 3, padding=1),
            nn.Conv2d(16, 4, 3, padding=1),
        )

    def forward(self, x, label=None, box=None):
        found = []
        for conv in self.c:
            x = F.relu(conv(x))
            found.append(x)
        tops = [self.lateral[2](found[2])]
        for k in (1, 0):
            tops.append(self.lateral[k](found[k]) + F.interpolate(tops[-1], size=found[k].shape[-2:], mode="nearest"))
        heads = [(self.classes(self.smooth(p)), self.boxes(self.smooth(p))) for p in tops]
        if label is None:
            return heads
        logits, boxes = heads[-1]
        p, ce = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, label, reduction="none")
        focal = (label * 0.25 + (1 - label) * 0.75) * (label * (1 - p) + (1 - label) * p) ** 2 * ce
        others = sum(c.square().mean() + b.abs().mean() for c, b in heads[:-1])
        return focal.sum() / label.sum().clamp(min=1) + F.smooth_l1_loss(boxes, box, beta=0.1) + 0.01 * others


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
        self.mask, self.decoder, self.out = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True),
            nn.Linear(width, 192),
        )

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


@stranger_class("vit_registers", lambda: (images(),), labels)
class ViTRegisters(Classifier):
    def __init__(self, width=32):
        super().__init__()
        self.patch, self.cls, self.registers = (
            nn.Conv2d(3, width, 8, 8),
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.randn(1, 3, width) * 0.02),
        )
        self.pos, self.scale = nn.Parameter(torch.randn(1, 25, width) * 0.02), nn.Parameter(torch.full((2, width), 1e-5))
        self.norm1, self.norm2, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.w12, self.w3, self.head = nn.Linear(width, 128), nn.Linear(64, width), nn.Linear(2 * width, 4)

    def logits(self, x):
        B = len(x)
        pos = F.interpolate(self.pos.reshape(1, 5, 5, -1).permute(0, 3, 1, 2), size=(4, 4), mode="bicubic").flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(B, -1, -1), self.registers.expand(B, -1, -1), self.patch(x).flatten(2).transpose(1, 2) + pos], 1)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k = F.layer_norm(q, q.shape[-1:]), F.layer_norm(k, k.shape[-1:])
        x = x + self.scale[0] * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        a, b = self.w12(self.norm2(x)).chunk(2, -1)
        x = x + self.scale[1] * self.w3(F.silu(a) * b)
        return self.head(torch.cat([x[:, 0], x[:, 4:].mean(1)], -1))


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


@stranger_class("perceiver", lambda: (torch.randn(8, 24, 16),), labels)
class Perceiver(Classifier):
    def __init__(self, width=32):
        super().__init__()
        self.latents, self.kv, self.q = nn.Parameter(torch.randn(8, width) * 0.02), nn.Linear(16, 2 * width), nn.Linear(width, width)
        self.block, self.head = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True), nn.Linear(width, 4)

    def logits(self, x):
        z = self.latents.repeat(len(x), 1, 1)
        k, v = self.kv(x).chunk(2, -1)
        for _ in range(2):
            q, k4, v4 = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q(z), k, v))
            z = self.block(z + F.scaled_dot_product_attention(q, k4, v4).transpose(1, 2).flatten(2))
        return self.head(z.mean(1))


@stranger_class("slot_attention", lambda: (torch.randn(8, 16, 32), torch.randn(8, 4, 32)))
class SlotAttention(nn.Module):
    """Slots compete for inputs and are updated by a cell."""

    def __init__(self, width=32):
        super().__init__()
        self.mu, self.sigma = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.zeros(1, 1, width))
        self.q, self.k, self.v, self.cell, self.norm = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.GRUCell(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x, noise):
        slots = self.mu + self.sigma.exp() * noise
        k, v = self.k(x), self.v(x)
        for _ in range(2):
            a = (torch.einsum("bnd,bsd->bns", k, self.q(self.norm(slots))) * 32**-0.5).softmax(-1) + 1e-8
            updates = torch.einsum("bns,bnd->bsd", a / a.sum(1, keepdim=True), v)
            slots = self.cell(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return F.mse_loss(torch.einsum("bns,bsd->bnd", a, slots), x) if self.training else slots


@stranger_class("raft_correlation", lambda: (images(8, 3), images(8, 3)), lambda: (torch.randn(8, 2, 8, 8),))
class OpticalFlow(nn.Module):
    """All pairs, looked up where the flow leads, flow refined twice."""

    def __init__(self, width=16):
        super().__init__()
        self.features, self.update = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Sequential(nn.Conv2d(9 + 2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 3, padding=1)),
        )

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


@stranger_class("capsules", lambda: (images(16, 1),), labels)
class Capsules(nn.Module):
    """Three rounds of routing by agreement."""

    def __init__(self):
        super().__init__()
        self.conv, self.W = nn.Conv2d(1, 16, 5, 3), nn.Parameter(torch.randn(1, 4, 64, 8, 4) * 0.1)

    @staticmethod
    def squash(x):
        square = x.square().sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x, label=None):
        u = self.squash(self.conv(x).view(len(x), -1, 4))
        u_hat = torch.einsum("bic,jidc->bjid", u, self.W[0, :, : u.shape[1]])
        b = torch.zeros(len(x), 4, u.shape[1], 1, device=x.device, dtype=x.dtype)
        for k in range(3):
            v = self.squash((b.softmax(1) * (u_hat if k == 2 else u_hat.detach())).sum(2, keepdim=True))
            b = b + (u_hat.detach() * v).sum(-1, keepdim=True)
        length = v.squeeze(2).norm(dim=-1)
        if label is None:
            return length
        hot = F.one_hot(label, 4).to(x.dtype)
        return (hot * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hot) * F.relu(length - 0.1) ** 2).sum(1).mean()


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
        self.mlp, self.space, self.head = (
            nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, width)),
            nn.Conv2d(2, 1, 7, padding=3),
            nn.Linear(width, 4),
        )

    def logits(self, x):
        x = x * torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))[..., None, None]
        x = x * self.space(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)).sigmoid()
        return self.head(F.lp_pool2d(x, 2, 4).mean((2, 3)))


@stranger_class("bifpn_fusion", lambda: (images(16, 16), images(8, 16), images(4, 16)))
class WeightedFusion(nn.Module):
    """Levels of an image's pyramid, summed with learned positive weights."""

    def __init__(self, width=16):
        super().__init__()
        self.w, self.conv = (
            nn.Parameter(torch.ones(2, 3)),
            nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(2)),
        )

    def forward(self, p3, p4, p5):
        w = F.relu(self.w)
        w = w / (w.sum(1, keepdim=True) + 1e-4)
        up = self.conv[0](F.silu(w[0, 0] * p4 + w[0, 1] * F.interpolate(p5, scale_factor=2)))
        out = self.conv[1](F.silu(w[1, 0] * p4 + w[1, 1] * up + w[1, 2] * F.max_pool2d(p3, 3, 2, 1)))
        return out.square().mean() if self.training else out

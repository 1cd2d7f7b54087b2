"""U-Net as diffusion models use it: residual blocks with group norm and a time embedding, skips, attention at the bottom.

Each function returns `(module, example_inputs)` on the meta device. With `loss` the inputs are (images, times, noise) and
the module returns the mean squared error of the predicted noise; without, they are (images, times) and it returns it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def time_features(times: Tensor, width: int) -> Tensor:
    """[B] -> [B, width]: cosines and sines of the time at geometric frequencies."""
    steps = torch.arange(width // 2, dtype=torch.float32, device=times.device)
    angles = times.float()[:, None] * torch.exp(-math.log(10000.0) / (width // 2) * steps)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, width_time: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, channels_in), nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(width_time, channels_out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, channels_out), nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels_out, 1) if channels_in != channels_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int, groups: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (project(y).view(B, H * W, self.heads, C // self.heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, H * W, C)
        return x + self.out(y).transpose(1, 2).reshape(B, C, H, W)


class UNet(nn.Module):
    def __init__(self, channels: int, widths: tuple[int, ...], heads: int, groups: int):
        super().__init__()
        first, time = widths[0], 4 * widths[0]
        self.width_time = first
        self.embed = nn.Sequential(nn.Linear(first, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, first, 3, padding=1)
        pairs = list(zip((first, *widths[:-1]), widths))
        self.down = nn.ModuleList(Block(a, b, time, groups) for a, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for _, b in pairs)
        self.middle = Block(widths[-1], widths[-1], time, groups)
        self.attention = Attention(widths[-1], heads, groups)
        self.up = nn.ModuleList(Block(2 * b, a, time, groups) for a, b in reversed(pairs))
        self.norm, self.head = nn.GroupNorm(groups, first), nn.Conv2d(first, channels, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, noise: Tensor | None = None) -> Tensor:
        time = F.silu(self.embed(time_features(times, self.width_time).to(x.dtype)))
        x, skips = self.stem(x), []
        for block, shrink in zip(self.down, self.shrink):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, skips.pop()), dim=1), time)
        predicted = self.head(F.silu(self.norm(x)))
        return predicted if noise is None else F.mse_loss(predicted, noise)


def build(*, widths: tuple[int, ...], heads: int, groups: int, batch: int, image: int, loss: bool, dtype: str):
    with torch.device("meta"):
        module = UNet(3, widths, heads, groups).to(getattr(torch, dtype))
        images = torch.empty(batch, 3, image, image, dtype=getattr(torch, dtype))
        times = torch.empty(batch, dtype=torch.int64)
        noise = (torch.empty_like(images),) if loss else ()
    return module, (images, times, *noise)


def base(*, batch: int = 64, image: int = 64, loss: bool = True, dtype: str = "float32"):
    """Four levels of 128 to 512 channels."""
    return build(widths=(128, 256, 384, 512), heads=8, groups=32, batch=batch, image=image, loss=loss, dtype=dtype)


def tiny(*, batch: int = 8, image: int = 16, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; channels, groups, heads and batch divide by 8."""
    return build(widths=(16, 32), heads=8, groups=8, batch=batch, image=image, loss=loss, dtype=dtype)

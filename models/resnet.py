"""ResNet: convolutions, batch norm, residual blocks, an average pool, a linear head.

Each function returns `(module, example_inputs)` on the meta device. With `loss` the inputs are (images, targets) and the
module returns the mean cross entropy; without, the input is (images,) and it returns the logits. Names and shapes are those
of torchvision's checkpoints. Training normalises over the whole batch, wherever it lies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


def shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module | None:
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(channels_in, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(channels_in, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = shortcut(channels_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, block: type, depths: tuple[int, ...], width: int, classes: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(3, width, 7, 2), nn.BatchNorm2d(width)
        channels = width
        for stage, depth in enumerate(depths):
            blocks = []
            for k in range(depth):
                blocks.append(block(channels, width << stage, 2 if stage and not k else 1))
                channels = (width << stage) * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(depths)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        logits = self.fc(x.mean((2, 3)))
        return logits if targets is None else F.cross_entropy(logits.float(), targets)


def build(*, block: type, depths: tuple[int, ...], width: int, classes: int, batch: int, image: int, loss: bool, dtype: str):
    with torch.device("meta"):
        module = ResNet(block, depths, width, classes).to(getattr(torch, dtype)).train(loss)
        images = torch.empty(batch, 3, image, image, dtype=getattr(torch, dtype))
        targets = (torch.empty(batch, dtype=torch.int64),) if loss else ()
    return module, (images, *targets)


def resnet18(*, batch: int = 256, image: int = 224, classes: int = 1000, loss: bool = True, dtype: str = "float32"):
    """11.7e6 parameters."""
    return build(block=BasicBlock, depths=(2, 2, 2, 2), width=64, classes=classes, batch=batch, image=image, loss=loss, dtype=dtype)


def resnet50(*, batch: int = 256, image: int = 224, classes: int = 1000, loss: bool = True, dtype: str = "float32"):
    """25.6e6 parameters."""
    return build(block=Bottleneck, depths=(3, 4, 6, 3), width=64, classes=classes, batch=batch, image=image, loss=loss, dtype=dtype)


def tiny(*, batch: int = 8, image: int = 32, classes: int = 16, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; channels and batch divide by 8."""
    return build(block=Bottleneck, depths=(1, 1), width=8, classes=classes, batch=batch, image=image, loss=loss, dtype=dtype)

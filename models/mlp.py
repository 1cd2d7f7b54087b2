"""A multilayer perceptron: `layers` blocks of  x + W2 gelu(W1 x)  between an input and an output of the same width.

Each function returns `(module, example_inputs)` on the meta device. With `loss` the inputs are (x, y) and the module
returns the mean squared error; without, the input is (x,) and it returns the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if y is None else F.mse_loss(x, y)


def mlp(*, batch: int = 64, width: int = 512, hidden: int = 2048, layers: int = 2, loss: bool = True, dtype: str = "float32"):
    """Two blocks of 512 -> 2048 -> 512."""
    with torch.device("meta"):
        module = MLP(width, hidden, layers).to(getattr(torch, dtype))
        example_inputs = tuple(torch.empty(batch, width, dtype=getattr(torch, dtype)) for _ in range(1 + loss))
    return module, example_inputs


def tiny(*, batch: int = 16, width: int = 32, hidden: int = 64, layers: int = 2, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; every dim divides by 16."""
    return mlp(batch=batch, width=width, hidden=hidden, layers=layers, loss=loss, dtype=dtype)

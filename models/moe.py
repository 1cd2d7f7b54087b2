"""A mixture of experts with a capacity, as GShard has it: what goes to which expert is a product with a mask, no index.

    gate[b,t,e]      = softmax over e of x[b,t] . g[e], kept where e is among the best k
    place[b,t,e]     = how many earlier tokens of example b chose e; dropped where that is C or more
    mask[b,t,e,c]    = gate[b,t,e] if place[b,t,e] == c
    in[e,b,c]        = sum over t of (mask[b,t,e,c] > 0) x[b,t]          out[e,b,c] = MLP of expert e
    y[b,t]           = sum over e, c of mask[b,t,e,c] out[e,b,c]

Between x, cut by examples, and the experts, cut by experts, tokens go by all-to-all. Each function returns
`(module, example_inputs)` on the meta device; with `loss` the inputs are (x, y) and the module returns the mean squared error.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    def __init__(self, experts: int, width: int, hidden: int, chosen: int, capacity: int):
        super().__init__()
        self.experts, self.chosen, self.capacity = experts, chosen, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def routing(self, x: Tensor) -> Tensor:
        """mask[b,t,e,c]"""
        gate = F.softmax(self.gate(x).float(), dim=-1)
        best = gate.topk(self.chosen, dim=-1).indices
        taken = (best.unsqueeze(-1) == torch.arange(self.experts, device=x.device)).any(2).to(gate.dtype)
        place = taken.cumsum(1) - taken
        there = (place.unsqueeze(-1) == torch.arange(self.capacity, device=x.device)).to(gate.dtype)
        return ((gate * taken).unsqueeze(-1) * there).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        B, T, H = x.shape
        E, C = self.experts, self.capacity
        mask = self.routing(x)
        sent = torch.bmm((mask > 0).to(x.dtype).view(B, T, E * C).transpose(1, 2), x)  # [B, E*C, H]
        at_experts = sent.view(B, E, C, H).transpose(0, 1).reshape(E, B * C, H)
        made = torch.bmm(F.gelu(torch.bmm(at_experts, self.up)), self.down)
        back = made.view(E, B, C, H).transpose(0, 1).reshape(B, E * C, H)
        return torch.bmm(mask.view(B, T, E * C), back)


class MoE(nn.Module):
    def __init__(self, layers: int, experts: int, width: int, hidden: int, chosen: int, capacity: int):
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts, width, hidden, chosen, capacity) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return x if y is None else F.mse_loss(x, y)


def moe(
    *, batch: int = 64, seq: int = 512, width: int = 1024, hidden: int = 4096, experts: int = 64, chosen: int = 2, layers: int = 2,
    factor: float = 1.25, loss: bool = True, dtype: str = "float32",
):  # fmt: skip
    """Layers of 64 experts, of which each token takes two; an expert takes 1.25 times its fair share of an example's tokens."""
    capacity = max(int(factor * chosen * seq / experts), 1)
    with torch.device("meta"):
        module = MoE(layers, experts, width, hidden, chosen, capacity).to(getattr(torch, dtype))
        example_inputs = tuple(torch.empty(batch, seq, width, dtype=getattr(torch, dtype)) for _ in range(1 + loss))
    return module, example_inputs


def tiny(*, batch: int = 8, seq: int = 16, layers: int = 2, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices; experts and batch divide by 8."""
    return moe(batch=batch, seq=seq, width=16, hidden=32, experts=8, layers=layers, loss=loss, dtype=dtype)

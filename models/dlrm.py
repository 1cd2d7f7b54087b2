"""DLRM: embedding tables for categories, an MLP for numbers, all pairs of their dot products, an MLP on top.

Each function returns `(module, example_inputs)` on the meta device. The inputs are (numbers, ids[, clicks]): ids[t] holds
`bag` ids per example for table t, summed. With `loss` the module returns the mean binary cross entropy, else the scores.
Names are those of the reference implementation (bot_l, emb_l, top_l).

`criteo_dense` and `tiny_dense` give the same model without its tables: inputs are (numbers, pooled[, clicks]), and pooled, of shape
(batch, tables, width), holds what the tables give. `criteo_tables` and `tiny_tables` say what the tables are, as autoshard's Table does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(widths: tuple[int, ...]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))


class DLRM(nn.Module):
    def __init__(self, tables: tuple[int, ...], numbers: int, width: int, bottom: tuple[int, ...], top: tuple[int, ...]):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
        self.bot_l = mlp((numbers, *bottom, width))
        features = len(tables) + 1
        self.top_l = mlp((width + features * (features - 1) // 2, *top, 1))

    def forward(self, numbers: Tensor, ids: Tensor, clicks: Tensor | None = None) -> Tensor:
        x = self.bottom(numbers)
        return self.above(x, torch.stack([x, *(table(ids[t]) for t, table in enumerate(self.emb_l))], dim=1), clicks)

    def bottom(self, numbers: Tensor) -> Tensor:
        x = numbers
        for layer in self.bot_l:
            x = F.relu(layer(x))
        return x

    def above(self, x: Tensor, features: Tensor, clicks: Tensor | None) -> Tensor:
        """From x (batch, width) and the features (batch, 1 + tables, width), x first, to scores or the loss."""
        products = torch.bmm(features, features.transpose(1, 2))
        below = torch.tril_indices(features.shape[1], features.shape[1], -1, device=x.device)
        x = torch.cat((x, products[:, below[0], below[1]]), dim=1)
        for k, layer in enumerate(self.top_l):
            x = layer(x) if k + 1 == len(self.top_l) else F.relu(layer(x))
        scores = x.squeeze(1)
        return scores if clicks is None else F.binary_cross_entropy_with_logits(scores, clicks)


class Dense(DLRM):
    """DLRM above its tables: `pooled` (batch, tables, width) comes from elsewhere."""

    def __init__(self, tables: int, numbers: int, width: int, bottom: tuple[int, ...], top: tuple[int, ...]):
        super().__init__((1,) * tables, numbers, width, bottom, top)
        del self.emb_l

    def forward(self, numbers: Tensor, pooled: Tensor, clicks: Tensor | None = None) -> Tensor:
        x = self.bottom(numbers)
        return self.above(x, torch.cat((x.unsqueeze(1), pooled), dim=1), clicks)


def build_dense(*, tables: int, numbers: int, width: int, bottom: tuple, top: tuple, batch: int, loss: bool, dtype: str):
    kind = getattr(torch, dtype)
    with torch.device("meta"):
        module = Dense(tables, numbers, width, bottom, top).to(kind)
        given = (torch.empty(batch, numbers, dtype=kind), torch.empty(batch, tables, width, dtype=kind))
        clicks = (torch.empty(batch, dtype=kind),) if loss else ()
    return module, (*given, *clicks)


def build(*, tables: tuple[int, ...], numbers: int, width: int, bottom: tuple, top: tuple, batch: int, bag: int, loss: bool, dtype: str):
    kind = getattr(torch, dtype)
    with torch.device("meta"):
        module = DLRM(tables, numbers, width, bottom, top).to(kind)
        given = (torch.empty(batch, numbers, dtype=kind), torch.empty(len(tables), batch, bag, dtype=torch.int64))
        clicks = (torch.empty(batch, dtype=kind),) if loss else ()
    return module, (*given, *clicks)


def criteo(*, batch: int = 8192, rows: int = 1 << 22, bag: int = 1, loss: bool = True, dtype: str = "float32"):
    """26 tables of width 128, the MLPs of the MLPerf model."""
    bottom, top = (512, 256), (1024, 1024, 512, 256)
    return build(tables=(rows,) * 26, numbers=13, width=128, bottom=bottom, top=top, batch=batch, bag=bag, loss=loss, dtype=dtype)


def tiny(*, batch: int = 16, rows: int = 32, bag: int = 4, loss: bool = True, dtype: str = "float32"):
    """Small enough to run on many simulated devices."""
    tables = (rows, 2 * rows, rows)
    return build(tables=tables, numbers=8, width=16, bottom=(32,), top=(32,), batch=batch, bag=bag, loss=loss, dtype=dtype)


def criteo_dense(*, batch: int = 8192, loss: bool = True, dtype: str = "float32"):
    """`criteo` above its tables."""
    bottom, top = (512, 256), (1024, 1024, 512, 256)
    return build_dense(tables=26, numbers=13, width=128, bottom=bottom, top=top, batch=batch, loss=loss, dtype=dtype)


def criteo_tables(*, rows: int = 1 << 22, bag: int = 1) -> list[dict]:
    """The tables of `criteo`."""
    return [{"name": f"emb_l.{t}", "rows": rows, "columns": 128, "pooling": float(bag)} for t in range(26)]


def tiny_dense(*, batch: int = 16, loss: bool = True, dtype: str = "float32"):
    """`tiny` above its tables."""
    return build_dense(tables=3, numbers=8, width=16, bottom=(32,), top=(32,), batch=batch, loss=loss, dtype=dtype)


def tiny_tables(*, rows: int = 32, bag: int = 4) -> list[dict]:
    """The tables of `tiny`."""
    return [{"name": f"emb_l.{t}", "rows": n, "columns": 16, "pooling": float(bag)} for t, n in enumerate((rows, 2 * rows, rows))]

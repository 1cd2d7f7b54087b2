"""Models of language that are no plain decoder: pointers, and vectors of words."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class

WORDS = 48


@stranger_class("pointer_network", lambda: (torch.rand(8, 6, 2),), lambda: (torch.stack([torch.randperm(6) for _ in range(8)]),))
class PointerNetwork(nn.Module):
    """An order of points: what was chosen is masked."""

    def __init__(self, width=32):
        super().__init__()
        self.encoder, self.cell = nn.LSTM(2, width, batch_first=True), nn.LSTMCell(width, width)
        self.start = nn.Parameter(torch.zeros(width))
        self.w1, self.w2 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, points, order=None):
        memory, (h, c) = self.encoder(points)
        h, c, x = h[0], c[0], self.start.expand(len(points), -1)
        rows, loss, tour = torch.arange(len(points), device=points.device), 0.0, []
        used = torch.zeros(points.shape[:2], dtype=torch.bool, device=points.device)
        for t in range(points.shape[1]):
            h, c = self.cell(x, (h, c))
            logits = (torch.tanh(self.w1(memory) + self.w2(h).unsqueeze(1)) @ self.v).masked_fill(used, -1e9)
            chosen = logits.argmax(-1) if order is None else order[:, t]
            if order is not None:
                loss = loss + F.cross_entropy(logits, chosen)
            used = used.scatter(1, chosen.unsqueeze(1), True)
            x = memory[rows, chosen]
            tour.append(chosen)
        return torch.stack(tour, 1) if order is None else loss / points.shape[1]


@stranger_class("word2vec", lambda: (torch.randint(0, 100, (16,)), torch.randint(0, 100, (16,))), lambda: (torch.randint(0, 100, (16, 5)),))
class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center, self.context = nn.Embedding(100, 16), nn.Embedding(100, 16)

    def forward(self, word, near, negative=None):
        u, v = self.center(word), self.context(near)
        if negative is None:
            return F.cosine_similarity(u, v)
        noise = torch.bmm(self.context(negative), u.unsqueeze(2)).squeeze(2)
        return -(F.logsigmoid((u * v).sum(1)) + F.logsigmoid(-noise).sum(1)).mean()

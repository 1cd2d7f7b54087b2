"""Models of language that are no plain decoder: relative positions, recurrent ones with attention, parsers, taggers, detectors."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class

WORDS = 48


def ids(length=12, batch=8):
    return torch.randint(1, WORDS, (batch, length))


def text():
    return (ids(),)


@stranger_class("t5_own", lambda: (ids(), ids(8)), lambda: (ids(8),))
class RelativeBiasSeq2Seq(nn.Module):
    """Buckets of distances, one table for all layers; the label moved right by the caller."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embed, self.bias, self.heads = nn.Embedding(WORDS, width), nn.ModuleList(nn.Embedding(8, heads) for _ in range(2)), heads
        self.proj = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))
        self.norms, self.ff = (
            nn.ModuleList(nn.RMSNorm(width) for _ in range(3)),
            nn.Sequential(nn.Linear(width, 64, bias=False), nn.ReLU(), nn.Linear(64, width, bias=False)),
        )

    def bucket(self, q, k, both):
        apart, buckets = torch.arange(k)[None] - torch.arange(q)[:, None], 4 if both else 8
        out = (apart > 0).long() * buckets if both else 0
        apart = apart.abs() if both else -apart.clamp(max=0)
        exact = buckets // 2
        far = exact + (torch.log(apart.clamp(min=1).float() / exact) / math.log(16 / exact) * (buckets - exact)).long().clamp(
            max=buckets - exact - 1
        )
        return out + torch.where(apart < exact, apart, far)

    def attend(self, k, x, memory, bias):
        q, kk, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, y in zip(self.proj[4 * k : 4 * k + 3], (x, memory, memory)))
        scores = q @ kk.transpose(-1, -2) + bias
        return self.proj[4 * k + 3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, source, target, label=None):
        S, T = source.shape[1], target.shape[1]
        h = self.embed(source)
        h = h + self.attend(0, self.norms[0](h), self.norms[0](h), self.bias[0](self.bucket(S, S, True).to(source.device)).permute(2, 0, 1))
        h = h + self.ff(self.norms[1](h))
        y = self.embed(target)
        causal = torch.full((T, T), -1e9, device=h.device, dtype=h.dtype).triu(1)
        y = y + self.attend(
            1, self.norms[0](y), self.norms[0](y), self.bias[1](self.bucket(T, T, False).to(source.device)).permute(2, 0, 1) + causal
        )
        y = y + self.attend(2, self.norms[2](y), h, 0.0)
        logits = y @ self.embed.weight.t() * y.shape[-1] ** -0.5
        return logits if label is None else F.cross_entropy(logits.transpose(1, 2), label, label_smoothing=0.1)


@stranger_class("alibi", text)
class ALiBi(nn.Module):
    """Slopes per head added to the scores, as a mask of attention."""

    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.embed, self.heads = nn.Embedding(WORDS, width), heads
        self.qkv, self.out = (
            nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers)),
            nn.ModuleList(nn.Linear(width, width) for _ in range(layers)),
        )
        self.register_buffer("slopes", 2.0 ** (-8 / heads * torch.arange(1, heads + 1)))

    def forward(self, tokens):
        x = self.embed(tokens)
        at = torch.arange(x.shape[1], device=x.device)
        apart = at[None] - at[:, None]
        bias = (self.slopes[:, None, None] * apart).masked_fill(apart > 0, -torch.inf).to(x.dtype)
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        logits = x @ self.embed.weight.t()
        if not self.training:
            return logits[:, -1]
        z = logits.logsumexp(-1)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + 1e-4 * z.square().mean()


@stranger_class("electra_own", lambda: (ids(), torch.rand(8, 12) < 0.25))
class ReplacedTokens(nn.Module):
    """A small generator fills masked places, the discriminator says which were replaced."""

    def __init__(self, width=32):
        super().__init__()
        self.words, self.small, self.big = (
            nn.Embedding(WORDS, width),
            nn.Linear(width, 16),
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True),
        )
        self.generator, self.back, self.judge = (
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            nn.Linear(16, width),
            nn.Linear(width, 1),
        )

    def forward(self, tokens, masked):
        hidden = self.generator(self.small(self.words(tokens.masked_fill(masked, 0))))
        logits = self.back(hidden) @ self.words.weight.t()
        filled = torch.where(masked, logits.detach().argmax(-1), tokens)
        score = self.judge(self.big(self.words(filled))).squeeze(-1)
        if not self.training:
            return score.sigmoid()
        loss = F.cross_entropy(logits.flatten(0, 1), torch.where(masked, tokens, -100).flatten(), ignore_index=-100)
        return loss + 50 * F.binary_cross_entropy_with_logits(score, (filled != tokens).to(score.dtype))


@stranger_class("seq2seq_attention", lambda: (ids(8), ids(6)), lambda: (ids(6),))
class Seq2SeqAttention(nn.Module):
    """A bidirectional encoder, a decoder of cells with additive attention fed its own words."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.encoder, self.bridge = (
            nn.Embedding(WORDS, width),
            nn.GRU(width, 16, bidirectional=True, batch_first=True),
            nn.Linear(32, width),
        )
        self.cell, self.query, self.key, self.v, self.out = (
            nn.GRUCell(2 * width, width),
            nn.Linear(width, 16),
            nn.Linear(width, 16, bias=False),
            nn.Linear(16, 1),
            nn.Linear(2 * width, WORDS),
        )

    def forward(self, source, target, label=None):
        memory, last = self.encoder(self.embed(source))
        h = torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1)))
        keys, mask, made = self.key(memory), source == 1, []
        words = self.embed(target)
        for t in range(target.shape[1]):
            scores = self.v(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1).masked_fill(mask, -1e9)
            context = torch.einsum("bs,bsd->bd", scores.softmax(-1), memory)
            h = self.cell(torch.cat([words[:, t], context], -1), h)
            made.append(self.out(torch.cat([h, context], -1)))
        logits = torch.stack(made, 1)
        return logits if label is None else F.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=1)


@stranger_class("pointer_network", lambda: (torch.rand(8, 6, 2),), lambda: (torch.stack([torch.randperm(6) for _ in range(8)]),))
class PointerNetwork(nn.Module):
    """An order of points: what was chosen is masked."""

    def __init__(self, width=32):
        super().__init__()
        self.encoder, self.cell, self.start = (
            nn.LSTM(2, width, batch_first=True),
            nn.LSTMCell(width, width),
            nn.Parameter(torch.zeros(width)),
        )
        self.w1, self.w2, self.v = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, bias=False),
            nn.Parameter(torch.randn(width) * 0.1),
        )

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


@stranger_class("biaffine_parser", lambda: (ids(),), lambda: (torch.randint(0, 12, (8, 12)), torch.randint(0, 5, (8, 12))))
class BiaffineParser(nn.Module):
    def __init__(self, width=32, labels=5):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, width, padding_idx=1), nn.LSTM(width, 16, bidirectional=True, batch_first=True)
        self.head, self.dep = nn.Linear(32, 16), nn.Linear(32, 16)
        self.arc, self.label = nn.Parameter(torch.randn(17, 16) * 0.1), nn.Parameter(torch.randn(labels, 17, 17) * 0.1)

    def forward(self, tokens, heads=None, labels=None):
        h, _ = self.lstm(self.embed(tokens))
        head, dep = F.leaky_relu(self.head(h), 0.1), F.leaky_relu(self.dep(h), 0.1)
        one = torch.ones_like(dep[..., :1])
        arcs = torch.cat([dep, one], -1) @ self.arc @ head.transpose(1, 2)
        kinds = torch.einsum("bxi,oij,byj->bxyo", torch.cat([dep, one], -1), self.label, torch.cat([head, one], -1))
        if heads is None:
            best = arcs.argmax(-1)
            return best, kinds.gather(2, best[..., None, None].expand(-1, -1, 1, kinds.shape[-1])).squeeze(2).argmax(-1)
        mask = tokens != 1
        chosen = kinds.gather(2, heads[..., None, None].expand(-1, -1, 1, kinds.shape[-1])).squeeze(2)
        loss = F.cross_entropy(arcs.transpose(1, 2), heads, reduction="none") + F.cross_entropy(
            chosen.transpose(1, 2), labels, reduction="none"
        )
        return (loss * mask).sum() / mask.sum()


@stranger_class("crf_tagger", lambda: (ids(8),), lambda: (torch.randint(0, 6, (8, 8)),))
class CRFTagger(nn.Module):
    """The partition function by a loop of logsumexp; the best path by Viterbi, traced back."""

    def __init__(self, tags=6):
        super().__init__()
        self.embed, self.conv, self.out = nn.Embedding(WORDS, 16), nn.Conv1d(16, 32, 3, padding=1), nn.Linear(32, tags)
        self.transition, self.start, self.end = (
            nn.Parameter(torch.randn(tags, tags) * 0.1),
            nn.Parameter(torch.zeros(tags)),
            nn.Parameter(torch.zeros(tags)),
        )

    def forward(self, tokens, tags=None):
        e = self.out(F.relu(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2))
        B, T, _ = e.shape
        if tags is None:
            score, back = self.start + e[:, 0], []
            for t in range(1, T):
                best, index = (score.unsqueeze(2) + self.transition).max(1)
                score = best + e[:, t]
                back.append(index)
            path = [(score + self.end).argmax(-1)]
            for index in reversed(back):
                path.append(index.gather(1, path[-1].unsqueeze(1)).squeeze(1))
            return torch.stack(path[::-1], 1)
        alpha = self.start + e[:, 0]
        for t in range(1, T):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transition, 1) + e[:, t]
        total = torch.logsumexp(alpha + self.end, 1)
        gold = e.gather(2, tags.unsqueeze(-1)).sum((1, 2)) + self.start[tags[:, 0]] + self.end[tags[:, -1]]
        gold = gold + self.transition[tags[:, :-1], tags[:, 1:]].sum(1)
        return (total - gold).mean()


@stranger_class("char_cnn", lambda: (torch.randint(0, 30, (8, 6, 10)),), lambda: (torch.randint(0, WORDS, (8, 6)),))
class CharCNN(nn.Module):
    """Widths of several kernels, max over time, a highway, an LSTM."""

    def __init__(self):
        super().__init__()
        self.embed, self.convs = nn.Embedding(30, 8), nn.ModuleList(nn.Conv1d(8, 8 * k, k) for k in (1, 2, 3))
        self.gate, self.other, self.lstm, self.out = (
            nn.Linear(48, 48),
            nn.Linear(48, 48),
            nn.LSTM(48, 32, batch_first=True),
            nn.Linear(32, WORDS),
        )

    def forward(self, chars, label=None):
        x = self.embed(chars.flatten(0, 1)).transpose(1, 2)
        x = torch.cat([torch.tanh(conv(x)).max(-1).values for conv in self.convs], -1)
        g = self.gate(x).sigmoid()
        x = g * F.relu(self.other(x)) + (1 - g) * x
        logits = self.out(self.lstm(x.view(*chars.shape[:2], -1))[0])
        return logits if label is None else F.cross_entropy(logits.flatten(0, 1), label.flatten())


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


@stranger_class("fast_text", lambda: (torch.randint(0, 100, (40,)), torch.arange(0, 40, 5)), lambda: (torch.randint(0, 4, (8,)),))
class FastText(nn.Module):
    """Bags by their offsets."""

    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(100, 16, mode="mean"), nn.Linear(16, 4)

    def forward(self, words, offsets, label=None):
        logits = self.out(self.bag(words, offsets))
        return logits if label is None else F.cross_entropy(logits, label)


@stranger_class("latent_attention", text)
class LatentAttention(nn.Module):
    """Keys and values from a small latent, positions apart; two tokens ahead are predicted."""

    def __init__(self, width=32, heads=4, latent=8, rope=4):
        super().__init__()
        self.embed, self.heads, self.rope = nn.Embedding(WORDS, width), heads, rope
        self.q, self.down, self.up, self.out = (
            nn.Linear(width, heads * (8 + rope)),
            nn.Linear(width, latent + rope),
            nn.Linear(latent, heads * 16),
            nn.Linear(heads * 8, width),
        )
        self.norm, self.ahead = nn.RMSNorm(latent), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def turned(self, x):
        angle = torch.outer(torch.arange(x.shape[1], device=x.device), 1 / 100 ** torch.arange(0, 1, 2 / self.rope, device=x.device))
        a, b = x[..., ::2], x[..., 1::2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, q_rope = self.q(x).unflatten(-1, (self.heads, -1)).split([8, self.rope], -1)
        c, k_rope = self.down(x).split([8, self.rope], -1)
        k, v = self.up(self.norm(c)).unflatten(-1, (self.heads, 16)).chunk(2, -1)
        k_rope = self.turned(k_rope.unsqueeze(2)).expand(-1, -1, self.heads, -1)
        q, k = torch.cat([q, self.turned(q_rope)], -1), torch.cat([k, k_rope], -1)
        y = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)), is_causal=True)
        h = x + self.out(y.transpose(1, 2).flatten(2))
        logits = [F.silu(f(h)) @ self.embed.weight.t() for f in self.ahead]
        if not self.training:
            return logits[0][:, -1], logits[1][:, -1]
        return sum(F.cross_entropy(p[:, : -k - 1].flatten(0, 1), tokens[:, k + 1 :].flatten()) for k, p in enumerate(logits))


@stranger_class("hierarchical_attention", lambda: (torch.randint(0, WORDS, (8, 4, 6)),), lambda: (torch.randint(0, 3, (8,)),))
class HierarchicalAttention(nn.Module):
    """Words to sentences to documents."""

    def __init__(self):
        super().__init__()
        self.embed, self.words, self.sentences = (
            nn.Embedding(WORDS, 16, padding_idx=0),
            nn.GRU(16, 8, bidirectional=True, batch_first=True),
            nn.GRU(16, 8, bidirectional=True, batch_first=True),
        )
        self.look, self.context, self.out = (
            nn.ModuleList(nn.Linear(16, 16) for _ in range(2)),
            nn.Parameter(torch.randn(2, 16) * 0.1),
            nn.Linear(16, 3),
        )

    def pooled(self, k, h):
        return torch.einsum("bt,btd->bd", (torch.tanh(self.look[k](h)) @ self.context[k]).softmax(-1), h)

    def forward(self, words, label=None):
        h = self.pooled(0, self.words(self.embed(words.flatten(0, 1)))[0]).view(*words.shape[:2], -1)
        logits = self.out(self.pooled(1, self.sentences(h)[0]))
        return (
            logits
            if label is None
            else F.cross_entropy(logits, label, weight=torch.tensor([1.0, 2.0, 3.0], device=h.device, dtype=h.dtype))
        )


@stranger_class("adaptive_softmax", text)
class AdaptiveInput(nn.Module):
    """Frequent words in full width, rare ones in less; the loss over clusters without looking at which occur."""

    def __init__(self, width=32):
        super().__init__()
        self.head, self.tails = (
            nn.Linear(width, 16 + 2),
            nn.ModuleList(nn.Sequential(nn.Linear(width, w, bias=False), nn.Linear(w, 16, bias=False)) for w in (16, 8)),
        )
        self.embed, self.rnn = nn.Embedding(WORDS, width), nn.RNN(width, width, batch_first=True)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        head = self.head(h).log_softmax(-1)
        logp = torch.cat([head[..., :16], *[head[..., 16 + k, None] + tail(h).log_softmax(-1) for k, tail in enumerate(self.tails)]], -1)
        return F.nll_loss(logp[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) if self.training else logp

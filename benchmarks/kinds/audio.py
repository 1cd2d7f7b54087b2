"""Models of sound: front ends, recognizers, vocoders and codecs."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.strangers import stranger_class


def wave(samples=256, batch=8):
    return torch.randn(batch, samples)


@stranger_class("wav2vec_contrastive", lambda: (wave(),), lambda: (torch.rand(8, 15) < 0.4, torch.randint(0, 15, (8, 15, 5))))
class Wav2Vec(nn.Module):
    """Convolutions without padding, masked frames, distractors by their places."""

    def __init__(self, width=32):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(1, width, 10, 4, bias=False), nn.Conv1d(width, width, 4, 4, bias=False)])
        self.norm, self.mask = nn.GroupNorm(width, width), nn.Parameter(torch.rand(width))
        self.pos = nn.Conv1d(width, width, 5, padding=2, groups=4)
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.final, self.target = nn.Linear(width, 16), nn.Linear(width, 16)

    def forward(self, x, masked=None, distractors=None):
        h = F.gelu(self.norm(self.convs[0](x.unsqueeze(1))))
        z = F.gelu(self.convs[1](h)).transpose(1, 2)
        h = z if masked is None else torch.where(masked.unsqueeze(-1), self.mask, z)
        c = self.layer(h + F.gelu(self.pos(h.transpose(1, 2))).transpose(1, 2))
        if masked is None:
            return c
        c, q = self.final(c), self.target(z)
        wrong = q.gather(1, distractors.flatten(1).unsqueeze(-1).expand(-1, -1, 16)).view(*distractors.shape, 16)
        logits = F.cosine_similarity(c.unsqueeze(2), torch.cat([q.unsqueeze(2), wrong], 2), dim=-1) / 0.1
        loss = F.cross_entropy(logits.transpose(1, 2), torch.zeros_like(masked, dtype=torch.long), reduction="none")
        return (loss * masked).sum() / masked.sum()


@stranger_class("mel_classifier", lambda: (wave(),), lambda: (torch.randint(0, 4, (8,)),))
class MelClassifier(nn.Module):
    """stft, powers, a mel bank, logs in decibels, then convolutions."""

    def __init__(self, bins=33, mels=16):
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.register_buffer("bank", torch.rand(bins, mels))
        self.norm, self.conv, self.head = nn.BatchNorm2d(1), nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x, label=None):
        spectrum = torch.stft(x, 64, 16, window=self.window, return_complex=True)
        mel = (spectrum.abs() ** 2).transpose(1, 2) @ self.bank
        db = 10 * torch.log10(mel.clamp(min=1e-10))
        db = torch.maximum(db, db.amax((1, 2), keepdim=True).detach() - 80)
        logits = self.head(F.relu(self.conv(self.norm(db.unsqueeze(1)))).mean((2, 3)))
        return logits if label is None else F.cross_entropy(logits, label)


@stranger_class(
    "speech_ctc", lambda: (torch.randn(8, 1, 16, 24),), lambda: (torch.randint(1, 10, (8, 4)), torch.full((8,), 12), torch.full((8,), 4))
)
class SpeechCTC(nn.Module):
    """Convolutions over frequency and time, a bidirectional GRU, the CTC loss."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, (5, 5), (2, 2), (2, 2)), nn.BatchNorm2d(8)
        self.rnn, self.head = nn.GRU(64, 16, bidirectional=True, batch_first=True), nn.Linear(32, 10)

    def forward(self, x, label=None, frames=None, lengths=None):
        h = F.hardtanh(self.norm(self.conv(x)), 0, 20)
        h, _ = self.rnn(h.flatten(1, 2).transpose(1, 2))
        logp = self.head(h).log_softmax(-1)
        return logp if label is None else F.ctc_loss(logp.transpose(0, 1), label, frames, lengths, zero_infinity=True)


@stranger_class("vocoder", lambda: (torch.randn(8, 16, 8),), lambda: (torch.randn(8, 1, 128),))
class Vocoder(nn.Module):
    """Upsampling by transposed convolutions with weight norm, receptive fields summed, a discriminator per period."""

    def __init__(self, width=32):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.pre = norm(nn.Conv1d(16, width, 7, padding=3))
        self.ups = nn.ModuleList([norm(nn.ConvTranspose1d(width, 16, 8, 4, 2)), norm(nn.ConvTranspose1d(16, 8, 8, 4, 2))])
        self.fields = nn.ModuleList(nn.ModuleList(norm(nn.Conv1d(c, c, k, padding=k // 2)) for k in (3, 7)) for c in (16, 8))
        self.post = norm(nn.Conv1d(8, 1, 7, padding=3))
        self.judge = nn.Sequential(nn.Conv2d(1, 8, (5, 1), (3, 1), (2, 0)), nn.LeakyReLU(0.1), nn.Conv2d(8, 1, (3, 1), padding=(1, 0)))

    def forward(self, mel, real=None):
        h = self.pre(mel)
        for up, fields in zip(self.ups, self.fields):
            h = up(F.leaky_relu(h, 0.1))
            h = sum(field(F.leaky_relu(h, 0.1)) for field in fields) / len(fields)
        y = torch.tanh(self.post(F.leaky_relu(h)))
        if real is None:
            return y
        loss = 45 * F.l1_loss(y, real)
        for period in (2, 3):
            x = F.pad(y, (0, -y.shape[-1] % period), "reflect").unflatten(-1, (-1, period))
            loss = loss + (1 - self.judge(x)).square().mean()
        return loss


@stranger_class("residual_codec", lambda: (wave(128).unsqueeze(1),))
class ResidualCodec(nn.Module):
    """Three codebooks, each of what the one before left over."""

    def __init__(self, width=16):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv1d(1, 8, 7, padding=3), nn.ELU(), nn.Conv1d(8, width, 8, 4, 2))
        self.decode = nn.Sequential(nn.ConvTranspose1d(width, 8, 8, 4, 2), nn.ELU(), nn.Conv1d(8, 1, 7, padding=3))
        self.codes = nn.ParameterList(nn.Parameter(torch.randn(32, width)) for _ in range(3))

    def forward(self, x):
        left = self.encode(x).transpose(1, 2)
        total, loss, found = torch.zeros_like(left), 0.0, []
        for codes in self.codes:
            index = torch.cdist(left.detach(), codes.detach()[None]).argmin(-1)
            q = F.embedding(index, codes)
            loss = loss + F.mse_loss(q, left.detach()) + 0.25 * F.mse_loss(left, q.detach())
            total, left = total + left + (q - left).detach(), left - q.detach()
            found.append(index)
        y = self.decode(total.transpose(1, 2))
        return F.l1_loss(y, x) + loss if self.training else (y, torch.stack(found))


@stranger_class("sinc_filters", lambda: (wave().unsqueeze(1),), lambda: (torch.randint(0, 4, (8,)),))
class SincFilters(nn.Module):
    """Band passes of two learned frequencies each."""

    def __init__(self, filters=16, size=31):
        super().__init__()
        self.low, self.band = nn.Parameter(torch.linspace(30, 3000, filters)[:, None]), nn.Parameter(torch.full((filters, 1), 200.0))
        self.register_buffer("n", 2 * math.pi * torch.arange(-(size // 2), 0).float() / 16000)
        self.register_buffer("window", torch.hamming_window(size, periodic=False)[: size // 2])
        self.head = nn.Linear(filters, 4)

    def forward(self, x, label=None):
        low = 50 + self.low.abs()
        high = (low + 50 + self.band.abs()).clamp(50, 8000)
        left = (torch.sin(high * self.n) - torch.sin(low * self.n)) / (self.n / 2) * self.window
        band = torch.cat([left, 2 * (high - low), left.flip(1)], 1) / (2 * (high - low))
        y = F.max_pool1d(F.conv1d(x, band.unsqueeze(1)).abs(), 3)
        logits = self.head(torch.log1p(y).mean(-1))
        return logits if label is None else F.multi_margin_loss(logits, label)

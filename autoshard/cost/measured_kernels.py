"""Seconds of kernels, from constants that were fitted to measured ones of a kind of device and a dtype (benchmarks/kernels.py).

A matmul (b of [m, k] by [k, n]) is computed in tiles of A elements of its result, by all multiprocessors at once, so in waves; k may be
split in s parts, which more multiprocessors can share. M bytes of both matrices and of the result are moved:

    counted   ( waves(A, s) * multiprocessors * A / s )^w  ( b m n )^(1 - w)      w = waves: how much of an unfilled wave counts
    loaded    k itemsize (rows + columns of a tile) tiles
    c         min over (A, s) of  sqrt( (2 counted (1 + small log2(128 * 256 / A)) (k + s deep) / rate)^2 + (loaded loads)^2 )
              + split where s > 1
    c'        c (1 + heat c / (c + warm)): a long kernel meets the device's power limit
    u         1 + .4, .7 or 1 times (unaligned - 1): rows of multiples of 4, 2 or 1 elements, not of 8, of 16 bits; c' is u times as long
    missed    M min(max(M / cache - 1/2, 0), 1)
    moving    max( M / bandwidth, missed / memory_bandwidth )
    t         max( sqrt( c'^2 + moving^2 ) + cast m k / bandwidth + launch, host + padding if m is no multiple of 4 )  (`matmul_seconds`)

Attention (heads h and pairs of keys and values g, head dims d of scores and e of values) has S scores, of which the longest tile of
queries of one head, on a multiprocessor of its own, has 128 K beside K keys:

    each      (1 + short / K) sqrt( (2 (d + e) / rate)^2 + (1 / exponentials)^2 ), of heads wider than 128 `wide` times
    c         (S + tail * 128 K multiprocessors) each
    t         launch + c + M / bandwidth                                                                            (`attention_seconds`)

and with one query per head, as a decode has it, the keys are split among all multiprocessors; P pairs of a sequence and a head of keys:

    parts     of the keys of a head: min( keys / 128, multiprocessors / P )
    t         launch + sqrt( (S each)^2 + (M / bandwidth)^2 + (P split / multiprocessors)^2 )      each without short
              + combine (16 + parts) where they are more than one                                                   (`decode_seconds`)

Experts (E with rows, R rows in all, W matrices of [h, i] each, P pairs of a token and an expert before the ranks divided them):

    t         launch + sqrt( (2 W (R + dense (P - R) + 32 E) h (i + narrow) / rate)^2 + (W E h i itemsize / bandwidth)^2 )
              + 2 R (3 h + 4 i) / bandwidth + others 2 P (2 h + 5 i) / memory_bandwidth                             (`experts_seconds`)

The gated delta rule of B sequences of T tokens (`capture.delta_rule`), heads H of K and V, chunks of C tokens, F FLOPs, kernels of
flash-linear-attention (Triton) as FlashQLA measured them on an H200, a GB200 and an H20 (tests/data/kernels/delta_rule.csv):

    t         start + tokens B T + work max( F / (1e12 multiprocessors), F / (peak / 3) )
              + chunk T / C max( 1, B H V / (64 multiprocessors) )
              of the forward, and of the backward by itself, which computes again some of it                    (`delta_rule_seconds`)
Letters that are words are fields of the form's record. Every t increases with the sizes, but for P, and decreases with the rates. Arguments
and fields are numbers or arrays: of one op of a plan, or of thousands of launches at once.
"""

import numpy as np

from autoshard.devices import WIDE, Amount, AttentionKernel, ExpertsKernel, MatmulKernel
from autoshard.graph import DELTA_CHUNK

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))  # rows and columns
SPLITS = (1, 2, 4, 8)
ROWS, COLUMNS, PARTS = np.array([(*tile, parts) for tile in TILES for parts in SPLITS], float).T
AREA = ROWS * COLUMNS
HALVINGS = np.log2(128 * 256 / AREA)
ATTENTION_TILE = 128  # queries of a tile of attention, and keys
SPLIT_KEYS = 3e-6  # seconds of a multiprocessor with the keys of one head of one sequence, at least (tests/data/kernels/decode.csv)
PART_KEYS, SECOND_KERNEL = 128, 16  # keys of a part, at least; what a second kernel takes, in parts (FlashAttention 2, decode.csv)
DELTA_FORWARD, DELTA_BACKWARD = (26e-6, 0.0, 1.0, 1.1e-6), (35e-6, 13e-9, 3.6, 1.9e-6)  # start, tokens, work, chunk of a gated delta rule
DELTA_COLUMNS = 64  # of a state that a multiprocessor has
EXPERT_ROWS = 64  # of a tile of experts: the last of an expert is half filled


def matmul_seconds(m: Amount, k: Amount, n: Amount, of: MatmulKernel, batch: Amount = 1, stored: Amount | None = None) -> Amount:
    """stored: how many elements of the first matrix are contiguous, m where its columns are; by default k."""
    along = (-1, *(1,) * np.ndim(m * n * k * batch * of.rate))  # the choices of tiles and parts, before the dims of the arguments
    rows, columns, parts, area, halvings = (choice.reshape(along) for choice in (ROWS, COLUMNS, PARTS, AREA, HALVINGS))
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    computed = np.ceil(tiles * parts / of.multiprocessors) * of.multiprocessors * area / parts
    counted = computed**of.waves * (batch * m * n) ** (1 - of.waves)
    unaligned = _unaligned(k if stored is None else stored, n, of)
    products = 2 * unaligned / of.rate * counted * (1 + of.small * halvings) * (k + parts * of.deep)
    loading = of.loads * of.itemsize * k * (rows + columns) * tiles
    least = (np.hypot(products, loading) + of.split * (parts > 1)).min(0)
    computing = least * (1 + of.heat * least / (least + of.warm))
    moved = batch * (of.itemsize * (m * k + k * n) + 2 * m * n)
    missed = moved * np.clip(moved / np.maximum(of.cache, 1.0) - 0.5, 0.0, 1.0)
    moving = np.maximum(moved / of.bandwidth, missed / of.memory_bandwidth)
    device = np.sqrt(computing**2 + moving**2) + of.cast * batch * m * k / of.bandwidth + of.launch
    return np.maximum(device, of.host + of.padding * (m % 4 != 0))


OF_ROWS = np.array([np.nan, 1.0, 0.7, np.nan, 0.4, np.nan, np.nan, np.nan, 0.0])  # by the greatest common divisor with 8


def _unaligned(stored: Amount, n: Amount, of: MatmulKernel) -> Amount:
    """By the elements that are contiguous, of the first matrix and of the result; how many are added up in a weight's gradient, or rows
    there are, does not matter. On an H200 rows of 50257 elements take 5.2 times as long as those of 50304, of 4100 2.6 times as long as of
    4104, and 1,023 to 16,383 tokens as long as 1,024 to 16,384 (docs/gpu.md)."""
    if not np.any(np.asarray(of.unaligned) > 1):
        return 1.0
    rows = np.stack(np.broadcast_arrays(stored, n, 8.0)).astype(float)
    integers = np.where(rows == np.floor(rows), rows, 8.0).astype(np.int64)  # rows of a group may be a mean
    return 1 + (of.unaligned - 1) * OF_ROWS[np.gcd.reduce(integers, axis=0)]


def attention_seconds(scores: Amount, keys: Amount, dims: Amount, moved: Amount, of: AttentionKernel) -> Amount:
    """scores: that are computed, of all heads; keys: of each query; dims: of a head's query and of its value, added; moved: bytes."""
    computing = (scores + of.tail * ATTENTION_TILE * keys * of.multiprocessors) * _each_score(dims, of) * (1 + of.short / keys)
    return of.launch + computing + moved / of.bandwidth


def decode_seconds(scores: Amount, pairs: Amount, dims: Amount, moved: Amount, of: AttentionKernel) -> Amount:
    """pairs: of a sequence and a head of keys; the others as for `attention_seconds`."""
    computing, reading = scores * _each_score(dims, of), moved / of.bandwidth
    parts = np.minimum(moved / (2 * dims * PART_KEYS), of.multiprocessors) / pairs  # moved: mostly keys and values, in 16 bits
    combining = of.combine * (SECOND_KERNEL + parts) * (parts > 1)
    return of.launch + np.sqrt(computing**2 + reading**2 + (pairs * SPLIT_KEYS / of.multiprocessors) ** 2) + combining


def _each_score(dims: Amount, of: AttentionKernel) -> Amount:
    rate = of.rate
    if of.by_dims:
        known, rates = np.array(of.by_dims).T
        rate = rate * np.interp(np.log2(dims), np.log2(2 * known), rates)
    return np.hypot(2 * dims / rate, 1 / of.exponentials) * (1 + (of.wide - 1) * (dims > 2 * WIDE))


def experts_seconds(
    rows: Amount, experts: Amount, pairs: Amount, hidden: Amount, inner: Amount, matrices: Amount, of: ExpertsKernel
) -> Amount:  # fmt: skip
    """rows: of all experts of the device; experts: that have rows; pairs: of a token and an expert, before ranks divide them."""
    computed = rows + of.dense * (pairs - rows)
    computing = 2 * matrices * (computed + EXPERT_ROWS / 2 * experts) * hidden * (inner + of.narrow) / of.rate
    reading = matrices * experts * hidden * inner * of.itemsize / of.bandwidth
    around = 2 * rows * (3 * hidden + 4 * inner) / of.bandwidth + of.others * 2 * pairs * (2 * hidden + 5 * inner) / of.memory_bandwidth
    return of.launch + np.hypot(computing, reading) + around


def delta_rule_seconds(
    flops: Amount, sequences: Amount, tokens: Amount, columns: Amount, peak: Amount, multiprocessors: Amount, backward: bool = False
) -> Amount:  # fmt: skip
    """flops: of the forward; tokens: of a sequence, whose chunks come one after the other; columns: of the states of all heads and
    sequences, which run side by side."""
    start, of_token, work, chunk = DELTA_BACKWARD if backward else DELTA_FORWARD
    waves = np.maximum(columns / (DELTA_COLUMNS * multiprocessors), 1.0)
    computing = work * np.maximum(flops / (1e12 * multiprocessors), flops / (peak / 3))
    return start + of_token * sequences * tokens + computing + chunk * tokens / DELTA_CHUNK * waves

"""Measured seconds of single ops on this rank's device, to which a roofline is fitted.

    matmul       (s, s) @ (s, s)                   FLOPs 2 s^3            bytes 3 s^2 itemsize
    attention    (8, s, 64), causal half not skipped     4 * 8 s^2 * 64   4 * 8 s 64 itemsize
    memory       y = x, s bytes                    0                      2 s
    launch       x += 1, one element               0                      0

The seconds of an op are the mean of five rounds, of three where a call is slow, without the fastest and the slowest. A round
repeats the op for about ROUND seconds and divides, so that the resolution of the clock does not matter, and at least twice: after a barrier
a collective over gloo is up to twice as fast as right after another one, when one rank is first, and steps have both.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from autoshard.calibrate.rates import OpSample

ROUND, ROUNDS = 0.02, 5  # seconds of a round, number of rounds
CPU_SIZES, CUDA_SIZES = (128, 256, 512, 1024, 2048), (256, 512, 1024, 2048, 4096, 8192, 16384)
MEMORY_SIZES = (2**22, 2**24, 2**26, 2**28, 2**30)  # bytes: larger than caches, as the tensors of plans are


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Clock = Callable[[], float]
Agree = Callable[[float], float]


def typical_seconds(op: Callable[[], object], device: torch.device, clock: Clock, agree: Agree = float) -> float:
    """Seconds of one call. agree: the largest of all ranks' numbers, where several ranks measure together."""

    def run(count: int) -> float:
        agree(0.0)  # all ranks start at the same time
        began = clock()
        for _ in range(count):
            op()
        sync(device)
        return agree((clock() - began) / count)

    run(1)  # warm-up: allocation, kernel choice, connections
    estimate = run(1)
    count = int(max(2, min(1000, ROUND / max(estimate, 1e-9))))
    rounds = sorted(run(count) for _ in range(3 if estimate > 10 * ROUND else ROUNDS))
    return statistics.mean(rounds[1:-1])


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.bfloat16)


@torch.no_grad()
def measure_device(device: torch.device, *, clock: Clock, seconds: float, agree: Agree = float) -> Iterator[tuple[int, OpSample]]:
    """Sizes and times of ops, small sizes first, each kind within its share of `seconds`; sizes that would exceed it are left out."""
    one = torch.zeros(1, device=device)
    yield 1, OpSample("launch", "float32", 0, 0, typical_seconds(lambda: one.add_(1), device, clock, agree))
    share = seconds / (1 + 2 * len(dtypes(device)))
    yield from _while_it_fits(_memory_ops(device), device, clock, share, agree)
    for dtype in dtypes(device):
        yield from _while_it_fits(_matmuls(device, dtype), device, clock, share, agree)
        yield from _while_it_fits(_attentions(device, dtype), device, clock, share, agree)


Op = tuple[str, str, int, float, float, Callable[[], object]]


def _while_it_fits(ops: Iterator[Op], device: torch.device, clock: Clock, share: float, agree: Agree) -> Iterator[tuple[int, OpSample]]:
    began = clock()
    for name, dtype, size, flops, moved, call in ops:
        sample = OpSample(name, dtype, flops, moved, typical_seconds(call, device, clock, agree))
        yield size, sample
        spent = agree(clock() - began)
        if spent + 8 * 8 * sample.seconds + ROUND * ROUNDS > share:  # the next size may take 8 times as long, for 8 calls
            return


def _memory_ops(device: torch.device) -> Iterator[Op]:
    for size in MEMORY_SIZES if device.type == "cuda" else MEMORY_SIZES[:3]:
        x = torch.ones(size // 4, device=device)
        y = torch.empty_like(x)
        yield "memory", "float32", size, 0, 2.0 * size, partial(y.copy_, x)


def _matmuls(device: torch.device, dtype: torch.dtype) -> Iterator[Op]:
    for s in CUDA_SIZES if device.type == "cuda" else CPU_SIZES:
        a, b = (torch.randn(s, s, device=device).to(dtype) for _ in range(2))
        yield "matmul", _name(dtype), s, 2.0 * s**3, 3.0 * s * s * a.element_size(), partial(torch.matmul, a, b)


def _attentions(device: torch.device, dtype: torch.dtype) -> Iterator[Op]:
    heads, d, attention = 8, 64, torch.nn.functional.scaled_dot_product_attention
    for s in CUDA_SIZES if device.type == "cuda" else CPU_SIZES[:4]:
        q, k, v = (torch.randn(1, heads, s, d, device=device).to(dtype) for _ in range(3))
        flops, moved = 4.0 * heads * s * s * d, 4.0 * heads * s * d * q.element_size()
        yield "attention", _name(dtype), s, flops, moved, partial(attention, q, k, v)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

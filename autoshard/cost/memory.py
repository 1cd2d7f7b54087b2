"""The bytes of an optimizer's state per parameter, and the seconds of its step.

    state bytes  = s * numel                                                        (`optimizer_state_bytes`)
    master bytes = 4 * numel of a parameter with less than 4 bytes per element, else 0            (`master_bytes`)
    step seconds = (2 * itemsize + itemsize + 2 * (s + m)) * numel / memory_rate   (`optimizer_step_bytes`)
    add seconds  = (2 * itemsize of the sum + itemsize of the gradient) * numel / memory_rate   (`accumulation_bytes`)

s = OPTIMIZERS[name] or the number given, m = 4 where there is a master copy, numel = elements of the local shard. The step
reads and writes the parameter, reads the gradient, and reads and writes states and master copy; its few FLOPs per element overlap with
that. There is no launch cost, because fused optimizers update all parameters in a handful of kernels; the same for adding up gradients.
"""

import math

from autoshard.options import OPTIMIZERS as OPTIMIZERS
from autoshard.options import bytes_per_parameter as bytes_per_parameter

MASTER_BYTES = 4  # float32


def optimizer_state_bytes(numel_local: int, optimizer: str | float) -> float:
    """Bytes of state for a local shard of `numel_local` elements; ValueError on an unknown optimizer."""
    return bytes_per_parameter(optimizer) * numel_local


def master_bytes(numel_local: int, itemsize: int) -> int:
    """Bytes of the float32 master copy of parameters with fewer than 4 bytes per element."""
    return MASTER_BYTES * numel_local if itemsize < MASTER_BYTES else 0


def optimizer_step_bytes(numel_local: int, itemsize: int, optimizer: str | float, *, master_weights: bool = False) -> float:
    """Bytes read and written to update a local shard of `numel_local` elements, parameter and gradient of `itemsize` bytes each."""
    kept = optimizer_state_bytes(numel_local, optimizer) + (master_bytes(numel_local, itemsize) if master_weights else 0)
    return 3 * itemsize * numel_local + 2 * kept


def spare_bytes(peak: float, limit: float | None = None) -> float:
    """By how much collectives that overlap with compute may raise a peak: by 2 %, so that the plan's figure stays true, or by half a
    megabyte, which matters in test models only; never beyond the memory limit of a plan that fits."""
    more = max(0.02 * peak, 5e5) if math.isfinite(peak) else 0.0
    return more if limit is None or limit < peak else min(more, limit - peak)


def accumulation_bytes(numel_local: int, itemsize: int, sum_itemsize: int) -> int:
    """Bytes moved to add a gradient of `numel_local` elements to a sum: both are read, the sum is written."""
    return (itemsize + 2 * sum_itemsize) * numel_local

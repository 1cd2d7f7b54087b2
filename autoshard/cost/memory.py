"""Bytes that an optimizer keeps per parameter, and seconds of its step.

    state bytes  = s * numel                                                      (`optimizer_state_bytes`)
    step seconds = (2 * itemsize + itemsize + 2 * s) * numel / memory_bandwidth   (`optimizer_step_seconds`)

s = OPTIMIZERS[name], numel = elements that this device holds. The step reads and writes the parameter, reads the gradient, reads
and writes the states; its few FLOPs per element hide behind that. No launch cost: fused optimizers update all
parameters in a handful of kernels.
"""

from __future__ import annotations

from autoshard.mesh import Device

# Bytes of state per element, states in float32 as in mixed-precision practice: two moments, none, one moment.
# A float32 master copy of 16-bit parameters is not counted: plan float32 parameters, or see it as four more.
OPTIMIZERS = {"adamw": 8, "sgd": 0, "momentum": 4}


def optimizer_state_bytes(numel_local: int, optimizer: str) -> int:
    """Bytes of state for a local part of `numel_local` elements; ValueError on an unknown optimizer."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; expected one of {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[optimizer] * numel_local


def optimizer_step_seconds(numel_local: int, itemsize: int, optimizer: str, device: Device) -> float:
    """Seconds to update a local part of `numel_local` elements, parameter and gradient of `itemsize` bytes each."""
    states = optimizer_state_bytes(numel_local, optimizer)
    return (3 * itemsize * numel_local + 2 * states) / device.memory_bandwidth

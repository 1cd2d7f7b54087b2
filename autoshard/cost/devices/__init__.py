"""Constants of kinds of devices and of software stacks: `<name>.json` of each device, and `stacks.json`.

Each constant has a published figure with its source (data sheets, published kernel and collective benchmarks), which no training run has
changed, and where benchmarks/fit_devices.py has fitted it, the fitted figure. `fitted=False` uses only the published ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from autoshard.devices import constants_of, device_file, kernels_of_file, known_devices

Numbers = np.ndarray  # one entry per run
Names = Sequence[str] | np.ndarray


@dataclass(frozen=True)
class DeviceConstants:
    """Of kinds of devices, as columns. The first five are from its data sheet, the next two from benchmarks, the others can be fitted."""

    peak16: Numbers  # FLOP/s, dense, 16-bit inputs
    peak8: Numbers
    peak4: Numbers
    memory_bandwidth: Numbers  # bytes/s
    link_bandwidth: Numbers  # bytes/s of one device to the others of its node, one direction
    sdpa: Numbers  # how much longer attention as torch runs it takes than the measured kernels, both in training
    flash2: Numbers  # and FlashAttention-2
    training: Numbers  # how much longer kernels take in training than alone on a warm device
    memory: Numbers  # share of the memory bandwidth that elementwise kernels reach
    link: Numbers  # share of link_bandwidth that collectives reach
    link_latency: Numbers  # seconds per round inside a node
    network: Numbers  # share of the adapters' bandwidth that collectives reach
    host: Numbers  # seconds in which the host launches one block's forward and backward, uncompiled


@dataclass(frozen=True)
class StackConstants:
    """Of software stacks, as columns. The last six can be fitted; the others say what the software does."""

    flash: Numbers  # rate of fused attention relative to FlashAttention-2; 0: scores are written to memory
    sdpa: Numbers  # 1: attention is what torch 2.9 or newer chooses, cuDNN's kernel on Hopper and B200
    windows: Numbers  # 1: attention computes no score that a window hides; 0: all, under a mask
    gradient_bytes: Numbers  # per parameter, as they are reduced
    balanced: Numbers  # 1: stages are balanced by cost, 0: even
    hides: Numbers  # 1: gradients are reduced during the last backward
    hides_gather: Numbers  # 1: ZeRO-1 gathers parameters during the next forward
    libraries: Numbers  # of kernels, uncompiled: 2: norms, rotary positions and activations are one each; 1: but activations; 0: none is
    torchs: Numbers  # 1: stages and losses are torch's own
    overlaps_tensor: Numbers  # 1: tensor parallel transfers run in pieces beside their matmuls
    regathers: Numbers  # 1: the inputs of sequence parallel matmuls are gathered again in the backward
    fused_loss: Numbers  # 1: softmax and loss are one kernel, which leaves the gradient in place of the logits
    fused_accumulation: Numbers  # 1: the matmul that computes a gradient adds it to those of earlier microbatches
    host: Numbers  # launches relative to the device's `host`
    traffic: Numbers  # elementwise bytes relative to the formula
    fixed: Numbers  # seconds per step
    transfer: Numbers  # seconds per microbatch and pipeline stage for a transfer between stages, besides its bytes
    hop: Numbers  # seconds per hop of a ring that leaves the node: of the cluster on which the stack was measured
    congestion: Numbers  # the network's bandwidth falls as nodes^-congestion


@dataclass(frozen=True)
class MemoryConstants:
    """Of software stacks, as columns: what autoshard.launch.peak_memory needs to know of them. None is fitted."""

    logits: Numbers  # bytes per logit while the loss and its gradient are computed
    gradients: Numbers  # bytes per parameter, between the backward and the update
    copies8: Numbers  # bytes per parameter of a block that runs in 8 bits
    gathered: Numbers  # 1: without a pipeline the gathered inputs of matmuls are kept, whatever `regathers` says
    pure: Numbers  # 1: gradients and optimizer state have 16 bits, and there is no float32 copy
    fragments: Numbers  # what the caching allocator holds besides, relative to what is allocated
    context: Numbers  # bytes of CUDA, NCCL and cuBLAS


def known_stacks() -> tuple[str, ...]:
    return tuple(device_file("stacks"))


def device_constants(names: Names, *, fitted: bool = True) -> DeviceConstants:
    """Columns, one entry per name; ValueError for an unknown device."""
    return DeviceConstants(**_columns(names, lambda name: _row(_device(name), fitted), DeviceConstants))


def kernel_columns(form: type, devices: Names, dtypes: Names) -> Any:
    """The form of each device's kernels of a dtype; its fields have an entry per name, or are numbers where all names are alike.

    A dtype without kernels of its own runs as the next wider one. ValueError for an unknown device.
    """
    pairs = list(zip(*(values.tolist() for values in np.broadcast_arrays(np.asarray(devices), np.asarray(dtypes)))))
    forms = {pair: _kernels_of(form, *pair) for pair in dict.fromkeys(pairs)}
    if len(forms) == 1:
        return next(iter(forms.values()))
    entries = np.unique(np.array([" ".join(pair) for pair in pairs]), return_inverse=True)[1].ravel()
    ordered = [forms[pair] for pair in sorted(forms, key=" ".join)]
    names = [field.name for field in fields(form) if field.name != "by_dims"]
    return form(**{name: np.array([getattr(one, name) for one in ordered])[entries] for name in names})


@cache
def _kernels_of(form: type, device: str, dtype: str) -> Any:
    return kernels_of_file(_device(device), form, dtype)


def stack_constants(names: Names, *, fitted: bool = True) -> StackConstants:
    """Columns, one entry per name; an unknown stack is the stack "other"."""
    return StackConstants(**_columns(names, lambda name: _row(_stack(name), fitted), StackConstants))


def memory_constants(names: Names, *, fitted: bool = True) -> MemoryConstants:
    """Columns, one entry per name; an unknown stack is the stack "other"."""
    return MemoryConstants(**_columns(names, lambda name: _row(_stack(name), fitted, "memory"), MemoryConstants))


def spread_of(names: Names, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest log(measured / predicted) between which `share` of the runs of each stack were, of runs not fitted to."""
    ends = (1 - share) / 2, (1 + share) / 2
    errors = {name: _stack(name)["errors"] for name in set(names)}
    spread = {name: np.interp(ends, row["levels"], row["quantiles"]) for name, row in errors.items()}
    low, high = np.array([spread[name] for name in names]).reshape(-1, 2).T
    return low, high


def memory_errors(names: Names) -> tuple[np.ndarray, np.ndarray]:
    """Levels, and quantiles [names, levels] of log(measured / predicted) peak bytes of published runs of each stack; nothing is fitted."""
    rows = {name: _stack(name)["memory_errors"] for name in set(np.asarray(names).tolist())}
    levels = next(iter(rows.values()))["levels"] if rows else [0.5]
    return np.array(levels), np.array([rows[name]["quantiles"] for name in np.asarray(names).tolist()]).reshape(-1, len(levels))


def _columns(names: Names, row_of: Callable[[str], Mapping[str, float]], record: type) -> dict[str, np.ndarray]:
    rows = {name: row_of(name) for name in set(names)}
    if len(rows) == 1:  # as for all launches of one job: nothing is copied
        (row,) = rows.values()
        return {field.name: np.broadcast_to(np.float64(row[field.name]), len(names)) for field in fields(record)}
    number = {name: i for i, name in enumerate(rows)}
    entries = np.array([number[name] for name in np.asarray(names).tolist()], dtype=int)  # names are many, rows few
    return {field.name: np.array([row[field.name] for row in rows.values()], dtype=float)[entries] for field in fields(record)}


def _row(file: Mapping[str, Any], fitted: bool, kind: str = "constants") -> dict[str, float]:
    return {**file["given"], **constants_of(file[kind], ("fitted", "published") if fitted else ("published",))}


def _device(name: str) -> Mapping[str, Any]:
    if name not in known_devices():
        raise ValueError(f"no constants of device {name!r}; known are {', '.join(known_devices())}")
    return device_file(name)


def _stack(name: str) -> Mapping[str, Any]:
    stacks = device_file("stacks")
    one = stacks.get(name, stacks["other"])
    return {**stacks[one["as"]], **one} if "as" in one else one

"""Seconds of one op on one device, from its local shapes: a roofline.

    t = max( F / (peak * EFFICIENCY),  M / memory_bandwidth ) + launch            (`op_seconds`) of a device without constants of kernels
    t = max( busy, host )                         of one with them (devices.Kernels): the host launches an op beside earlier ones
    busy       matmuls and attention of 16 bits, matmuls of 8: as measured, in a program (cost/measured_kernels.py, devices.in_program)
               the gated delta rule of 16 bits: likewise
               others: max( F / (peak * EFFICIENCY),  M / (memory_bandwidth * memory) ), of softmax and norms at most at `norms` bytes/s

F = FLOPs (`op_flops`, rows in FLOPS; a multiplication and an addition are two), M = bytes of inputs read and outputs written,
peak = device.flops_for(itemsize of the first input), which for float32 is a matter of settings: torch runs convolutions as TF32, matmuls
at full precision unless told otherwise (torch 2.13: backends.cudnn.allow_tf32 is True, backends.cuda.matmul.allow_tf32 False).
Views and getitem cost nothing: no kernel runs.

FLOPs count as torch.utils.flop_counter does (attention without the causal half), with two differences: grouped convolution
backward counts each group once, and a convolution counts min(input, output) points, which is right for transposed convolutions
as well: each filter tap is applied at most once to each input point and each output point. With constants of kernels, causal attention of
as many queries as keys counts half: a fused kernel leaves out what is masked (a shard of the queries may be the last, which sees all keys).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from autoshard.cost.measured_kernels import attention_seconds, decode_seconds, delta_rule_seconds, matmul_seconds
from autoshard.cost.several_kernels import Described, Kernel, Shape, expert_kernels, loss_kernels
from autoshard.devices import Device
from autoshard.graph import DELTA_CHUNK, ITEMSIZE, WRITES, Fused

# Assumption, not measured: the share of a data sheet's dense peak that large matmuls and attention reach. 0.6 to 0.8 is
# commonly reported for A100 and H100. `calibrate measure` finds the real figure.
EFFICIENCY = 0.7
ATTENTION = ("attention", "attention_backward")
# Seconds of attention's backward relative to its forward: 2.5 times the FLOPs, at 250 in place of 320 TFLOP/s (FlashAttention-2 on H100).
ATTENTION_BACK = 2.5 * 320 / 250
DELTA_RULE = ("delta_rule", "delta_rule_backward")
KIMI = 1.55  # seconds with a decay for each row of the state, relative to one for all: on an H20 (MoonshotAI/FlashKDA, BENCHMARK_H20.md)


@dataclass(frozen=True)
class Price:
    """What a user states about an operator: its seconds, or the bytes that its kernel moves."""

    seconds: Any = None
    bytes: Any = None


PRICES: dict[str, Price] = {}  # by target (model.register_price)


def stated(amounts: Any, what: str) -> Any:
    """What the user's prices state. ValueError where it is anything but numbers of 0 or more; inf is allowed, and forbids."""
    try:
        is_sound = not isinstance(amounts, str) and bool((np.asarray(amounts, dtype=float) >= 0).all())
    except (TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{what} is {amounts!r:.60}; expected numbers of 0 or more, or inf")
    return amounts


def op_seconds(
    target: str,
    inputs: Sequence[Described],
    outputs: Sequence[Described | None],
    alias: int | None,
    device: Device,
    share: float = 1.0,
    fused: Fused | None = None,
) -> float:
    """Seconds of op `target` ("aten.mm.default") on local inputs and outputs, in the order of the graph's Op.

    alias: the input whose storage the output shares, as in Op: of a view, or an op that writes rows into it.
    share: of its FLOPs that are computed; a causal mask leaves some out. An output that is not computed is None. fused: what it reads and
    writes in a kernel that it shares.
    """
    name, own = _name(target), PRICES.get(target)
    if own is not None and own.seconds is not None:
        return float(stated(own.seconds(inputs, outputs, device) if callable(own.seconds) else own.seconds, f"the price of {target}"))
    if name == "getitem" or (alias is not None and target not in WRITES):
        return 0.0
    if alias is not None:  # the rows alone are read and written
        inputs, outputs = inputs[1:], inputs[-1:]
    if name in SEVERAL:
        several = SEVERAL[name](inputs, backward="backward" in name)
        return sum(op_seconds(kernel, ins, outs, None, device) for kernel, ins, outs in several)
    busy, launches = busy_seconds(target, inputs, outputs, device, share, fused), fused is None or fused.launches
    if device.kernels is None:
        return busy + device.launch * launches
    return max(busy, device.kernels.host * launches)


def busy_seconds(
    target: str,
    inputs: Sequence[Described],
    outputs: Sequence[Described | None],
    device: Device,
    share: float = 1.0,
    fused: Fused | None = None,
    padded: bool = False,
) -> Any:
    """Of one kernel, whatever the host takes to launch it; arguments as for `op_seconds`. Dims, and the figures of `device`, are numbers,
    or arrays with an entry for each of many launches. padded: rows of matrices are, as in a compiled program, whose matmuls are `fused`."""
    name, computed = _name(target), [o for o in outputs if o is not None]
    operands = [*inputs, *computed]
    itemsize = ITEMSIZE[operands[0][1]] if operands else 1
    kernels, kind, i = device.kernels, _kind(name), [shape for shape, _ in inputs]
    if kernels is not None and kind in MATMULS and itemsize <= 2:
        form = kernels.matmul if itemsize == 2 else kernels.matmul8
        form = replace(form, unaligned=1.0) if padded or fused is not None else form
        batch, *mkn = MATMULS[kind](i, [None if o is None else o[0] for o in outputs])
        stored = mkn[0] if any(isinstance(shape, Columns) for shape in i) else mkn[1]
        return _of_form(matmul_seconds, batch * math.prod(mkn) * form.rate, *mkn, form, batch, stored)
    if kernels is not None and kind in ATTENTION and itemsize == 2:
        q, k, v = i[1:4] if kind == "attention_backward" else i[:3]
        scores, dims, of = share * math.prod(q[:-1]) * k[-2], q[-1] + v[-1], kernels.attention
        read = _bytes_moved(name, inputs, computed) if fused is None else _bytes_of_group(fused, inputs, outputs)
        if np.all(np.equal(q[-2], 1)):  # a decode reads keys and values as fast as a copy does: 2.7 to 3.0 TB/s on an H100 (docs/gpu.md)
            of = replace(of, bandwidth=most(of.bandwidth, device.memory_rate))
            return _of_form(decode_seconds, scores * of.rate, scores, math.prod(k[:-2]), dims, read, of)
        forward = _of_form(attention_seconds, scores * of.rate, scores, most(k[-2], 1), dims, read, of)
        return forward * (ATTENTION_BACK if kind == "attention_backward" else 1.0)
    if kernels is not None and kind in DELTA_RULE and itemsize == 2 and np.all(kernels.attention.multiprocessors > 1):
        back = kind == "delta_rule_backward"  # which runs the forward again
        k, (b, t, h, V) = i[1 + back : 3 + back]
        sizes = (_delta_rule(k, i[2 + back]), b, t, b * h * V, device.flops_for(itemsize), kernels.attention.multiprocessors)
        by_rows = KIMI if len(i[3 + back]) == 4 else 1.0
        return by_rows * sum(_of_form(delta_rule_seconds, sizes[0], *sizes, of) for of in ((False, True) if back else (False,)))
    peak = device.flops_for(itemsize, convolution=name.startswith("convolution"))
    moved = _bytes_moved(name, inputs, computed) if fused is None else _bytes_of_group(fused, inputs, outputs)
    if (own := PRICES.get(target)) is not None and own.bytes is not None:
        moved = stated(own.bytes(inputs, outputs), f"the bytes of {target}")
    seconds = most(share * op_flops(target, inputs, outputs) / (peak * EFFICIENCY), moved / device.memory_rate)
    if kernels is None or fused is not None or name.removesuffix("_data").removesuffix("_backward") not in NORM_OPS:
        return seconds
    return most(seconds, moved / kernels.norms) if np.all(kernels.norms) else seconds


class Columns(tuple):
    """The shape of a matrix whose columns are contiguous, and not its rows: the first one of a matmul."""


def most(*amounts: Any) -> Any:
    """The largest of numbers; of arrays, entry by entry."""
    return max(amounts) if not any(isinstance(one, np.ndarray) for one in amounts) else reduce(np.maximum, amounts)


def _of_form(seconds: Callable[..., Any], work: Any, *arguments: Any) -> Any:
    """`seconds` of its arguments, 0 without work; those of a single op are computed once."""
    if isinstance(work, np.ndarray):
        return seconds(*arguments)
    return _once(seconds, *arguments) if work else 0.0


@cache
def _once(seconds: Callable[..., Any], *arguments: Any) -> float:
    return float(seconds(*arguments))


def op_flops(target: str, inputs: Sequence[Described], outputs: Sequence[Described | None]) -> int:
    """FLOPs of an op; one per element of its largest tensor where FLOPS has no row."""
    name = _kind(_name(target))
    i, o = [shape for shape, _ in inputs], [None if out is None else out[0] for out in outputs]
    if name in FLOPS:
        return FLOPS[name](i, o)
    if name in SEVERAL:
        kernels = SEVERAL[name](_with_rows(inputs, name) if name in EXPERTS + KEEPING else inputs, backward="backward" in name)
        return sum(op_flops(kernel, ins, outs) for kernel, ins, outs in kernels)
    return most(0, *(math.prod(shape) for shape in [*i, *o] if shape is not None))


def _with_rows(inputs: Sequence[Described], name: str) -> list[Described]:
    """Inputs of experts with a row per pair of a token and an expert in place of ids."""
    at, described = (2 if "backward" in name else 1), list(inputs)
    described[at] = ((math.prod(inputs[at][0]), 1), inputs[at][1])
    return described


def _grouped_matmul(rows: Shape, w: Shape, ends: Shape) -> int:
    """(s, k) @ (e, k, n), each row by one group; w may be a shard of the groups that `ends` counts: the rows of its groups count."""
    return 2 * math.prod(rows) * w[-1] * w[0] // max(ends[0], 1)


def _grouped_mm(i: list[Shape], o: list) -> int:
    if len(i) < 3 or len(i[0]) != 2:
        return 2 * math.prod(_matrices(i[0], i[1]))
    if len(i[1]) == 2:  # the gradient of w: (k, s) @ (s, n) by group
        return 2 * math.prod(i[0]) * i[1][-1] * o[0][0] // max(i[2][0], 1)
    return _grouped_matmul(i[0], i[1], i[2])


def _attention(q: Shape, k: Shape, v: Shape, score_matmuls: int, value_matmuls: int) -> int:
    """Matmuls between (b, h, s_q, s_k) scores and q or k (dim d_q), and the scores and v (dim d_v); h counts query heads."""
    scores = math.prod(q[:-1]) * k[-2]
    return 2 * scores * (score_matmuls * q[-1] + value_matmuls * v[-1])


def _trilinear(i: list[Shape], o: list) -> int:
    """nn.Bilinear, and its gradients: each is one of (b, m), (n, m, p), (b, p), (b, n), computed of the others, most of it by a matmul."""
    *_, rows, weight = sorted((*i, *o), key=len)
    return 2 * math.prod(weight) * rows[0]


def _convolution(x: Shape, weight: Shape, y: Shape) -> int:
    return 2 * x[0] * math.prod(weight) * min(math.prod(x[2:]), math.prod(y[2:]))


def _delta_rule(k: Shape, v: Shape) -> int:
    """Of k [b, t, g, K] and v [b, t, h, V]: two matrices of scores, the system of a chunk, its values, and the state three times."""
    return v[0] * v[1] * v[2] * (DELTA_CHUNK * (5 * k[-1] + 3 * v[-1]) + 6 * k[-1] * v[-1])


def _matrices(a: Shape, b: Shape) -> Matrices:
    """(.., m, k) @ (.., k, n); a 3-d operand with a 2-d one is a grouped matmul: each row is multiplied with one group only. A vector is a
    matrix of one row."""
    m, k = (a[-2] if len(a) > 1 else 1), a[-1]
    return (math.prod(a[:-2]) if len(a) == len(b) else 1), m, k, b[-1]


def _grouped_matrices(i: list[Shape], o: list) -> Matrices:
    """As `_grouped_mm`: a group has its share of the rows."""
    if len(i) < 3 or len(i[0]) != 2:
        return _matrices(i[0], i[1])
    groups = max(i[2][0], 1)
    if len(i[1]) == 2:
        return o[0][0], i[0][0], i[0][1] / groups, i[1][1]
    return i[1][0], i[0][0] / groups, i[0][1], i[1][-1]


Matrices = tuple[Any, Any, Any, Any]  # how many, and m, k, n of each
# The matrices that a matmul multiplies, of its inputs i and outputs o.
OF_ONE_GROUP: dict[str, Callable[[list[Shape], list], Matrices]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm"), lambda i, o: _matrices(i[0], i[1])),
    **dict.fromkeys(("addmm", "baddbmm"), lambda i, o: _matrices(i[1], i[2])),  # bias, a, b
    "linear": lambda i, o: (1, math.prod(i[0][:-1]), i[0][-1], i[1][0]),  # (.., k) by (n, k)
}
MATMULS = {**OF_ONE_GROUP, **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_matrices)}


def _flops_of(matrices: Callable[[list[Shape], list], Matrices]) -> Callable[[list[Shape], list], int]:
    return lambda i, o: 2 * math.prod(matrices(i, o))


# FLOPs from the shapes of inputs i and outputs o (None for an output that is not computed).
FLOPS: dict[str, Callable[[list[Shape], list], int]] = {
    **{name: _flops_of(matrices) for name, matrices in OF_ONE_GROUP.items()},
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_mm),
    "grouped_mm_fallback_backward": lambda i, o: 2 * _grouped_matmul(i[0], i[1], i[2]),
    "_trilinear": _trilinear,
    "convolution": lambda i, o: _convolution(i[0], i[1], o[0]),
    # grad y, x, weight -> grad x, grad weight, grad bias: each of the first two costs as much as the forward
    "convolution_backward": lambda i, o: _convolution(i[1], i[2], i[0]) * sum(out is not None for out in o[:2]),
    # x (t, n, i), weights (g h, i) and (g h, h): every step multiplies both; backward twice that, and the forward once more
    "mkldnn_rnn_layer": lambda i, o: 2 * i[0][0] * i[0][1] * (math.prod(i[1]) + math.prod(i[2])),
    "mkldnn_rnn_layer_backward": lambda i, o: 6 * i[0][0] * i[0][1] * (math.prod(i[1]) + math.prod(i[2])),
    **dict.fromkeys(("attention", "dropout_attention"), lambda i, o: _attention(i[0], i[1], i[2], 1, 1)),  # scores; output
    # grad y, q, k, v: 2.5 times the forward. scores again, grad q, grad k; grad scores, grad v
    **dict.fromkeys(("attention_backward", "dropout_attention_backward"), lambda i, o: _attention(i[1], i[2], i[3], 3, 2)),
    "delta_rule": lambda i, o: _delta_rule(i[1], i[2]),
    "delta_rule_backward": lambda i, o: 4 * _delta_rule(i[2], i[3]),  # the forward again, and two products for each of its own
}

# How often an op reads or writes scores of four bytes that it holds while it runs, and which tensor has their shape, input or output:
# counted in lower.kernels.attention (matmul, softmax, dropout, matmul), at least
HELD_SCORES: dict[str, tuple[int, Callable[[list[Shape], list], Shape]]] = {
    "dropout_attention": (8, lambda i, o: o[2]),
    "dropout_attention_backward": (16, lambda i, o: i[6]),
}

EXPERTS = ("experts", "biased_experts", "experts_backward", "biased_experts_backward")
KEEPING = tuple(name.replace("experts", "experts_with_hidden") for name in EXPERTS)
# Operators whose local program is several kernels, one after the other.
SEVERAL: dict[str, Callable[..., list[Kernel]]] = {
    **dict.fromkeys(EXPERTS, expert_kernels),
    **dict.fromkeys(KEEPING, partial(expert_kernels, keeps=True)),
    **dict.fromkeys(("chunked_loss", "chunked_loss_backward"), loss_kernels),
}


NORM_OPS = ("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm")

# The elements of input 0 that an op reads, for ops that read only the elements that their indices select.
SELECTED: dict[str, Callable[[list[Shape], list[Shape]], int]] = {
    **dict.fromkeys(("embedding", "index", "index_select", "gather"), lambda i, o: math.prod(o[0])),
    "_embedding_bag": lambda i, o: math.prod(i[1]) * i[0][-1],
    "nll_loss_forward": lambda i, o: math.prod(i[1]),
}


def _bytes_moved(name: str, inputs: Sequence[Described], outputs: Sequence[Described]) -> int:
    """Of inputs that are read, outputs that are written, and scores that the op holds."""
    moved = sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype in [*inputs, *outputs])
    if name in SELECTED or name in HELD_SCORES:
        i, o = [shape for shape, _ in inputs], [shape for shape, _ in outputs]
        if name in SELECTED:
            moved += (SELECTED[name](i, o) - math.prod(i[0])) * ITEMSIZE[inputs[0][1]]
        else:
            times, shape_of = HELD_SCORES[name]
            moved += times * 4 * math.prod(shape_of(i, o))
    return moved


def _bytes_of_group(fused: Fused, inputs: Sequence[Described], outputs: Sequence[Described | None]) -> float:
    """That the op adds to what its kernel reads and writes."""
    moved = [(share, one) for share, one in zip((*fused.reads, *fused.writes), (*inputs, *outputs), strict=True) if share and one]
    return sum(share * math.prod(shape) * ITEMSIZE[dtype] for share, (shape, dtype) in moved)


def _kind(name: str) -> str:
    """The name, or for torch's kernels of attention, in a graph that draws for dropout, that of ours."""
    if not name.lstrip("_").startswith("scaled_dot_product"):
        return name
    return "attention_backward" if name.endswith("backward") else "attention"


def _name(target: str) -> str:
    """aten.mm.default -> mm, operator.getitem -> getitem."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target

"""Kernels of attention: the device, dtype, mask and head dim of a call decide which one runs it, forward and backward alike.

    flash for CPU   CPU     D = E                                                    any mask
    cuDNN           CUDA    as flash, D <= 128, on Hopper and B200                   any mask; causal only where T = S
    flash           CUDA    float16, bfloat16; D = E <= 256, a multiple of 8         no mask; causal only where T = S
    efficient       CUDA    rows of q, k, v of a multiple of 16 bytes                any mask; keys are repeated for more than D queries
    math            any     any: matmuls and softmax, with all scores in memory      any mask

q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], and so on as in `capture.attention`. cuDNN's kernel is taken where torch takes it, since
it is twice as fast there (docs/gpu.md), and only once it was seen to agree with flash on this device. Where ranks have some query heads of
a group and all key-value heads, each reads the key-value heads that its own queries need (`shared_heads`).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.capture import ATTENTION, BACKWARD
from autoshard.lower.collectives import Rank, RankGenerator
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local, wide
from autoshard.torch_private import disable_current_modes

aten = torch.ops.aten
HEADS = 1


@dataclass(frozen=True)
class Call:
    """Queries, keys, values and options of a call; every tensor has a dense last dim, the mask four dims."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    factors: Tensor | None = None  # of the probabilities, after softmax; for the matmuls and softmax alone

    @property
    def groups(self) -> int:
        """How many query heads share a key-value head."""
        return self.query.shape[HEADS] // self.key.shape[HEADS]


Backward = Callable[[Call, Tensor, Tensor, Tensor], tuple[Tensor, ...]]  # of the gradient of out, out, logsumexp


def _dense(x: Tensor) -> Tensor:
    """x with a dense last dim, as kernels read it whatever the strides say. Its other strides stay."""
    return x if x.stride(-1) == 1 else x.contiguous()


def call_of(query, key, value, attn_mask, is_causal, scale) -> Call:  # type: ignore[no-untyped-def]
    if attn_mask is not None:
        attn_mask = _dense(attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)))
    return Call(_dense(query), _dense(key), _dense(value), attn_mask, is_causal, scale)


def attention(query, key, value, attn_mask=None, is_causal=False, scale=None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """out [B, H, T, E] and logsumexp [B, H, T], of queries and keys in the natural order of the sequence."""
    call = call_of(query, key, value, attn_mask, is_causal, scale)
    return KERNELS_OF[kernel_of(call)][0](call)


def attention_backward(grad_out, query, key, value, out, logsumexp, attn_mask=None, is_causal=False, scale=None) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """The gradients of query, key and value."""
    call = call_of(query, key, value, attn_mask, is_causal, scale)
    # torch 2.13: flash reads the logsumexp by its pointer, whatever the strides say
    return KERNELS_OF[kernel_of(call)][1](call, _dense(grad_out), _dense(out), logsumexp.contiguous())


def kernel_of(call: Call) -> str:
    """The name of the kernel that runs the call: the first that can."""
    q, width, of_values = call.query, call.query.shape[-1], call.value.shape[-1]
    if 0 in (*q.shape, *call.key.shape, *call.value.shape):
        return "math"
    if q.device.type == "cpu":
        return "flash for CPU" if width == of_values else "math"
    if q.device.type != "cuda":
        return "math"
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_square = q.shape[2] == call.key.shape[2]
    if is_half and width == of_values <= 256 and width % 8 == 0 and (is_square or not call.is_causal):
        masked = call.attn_mask is not None
        capability = torch.cuda.get_device_capability(q.device) if torch.cuda.is_available() else (8, 0)  # of a dry run
        first = capability in CUDNN_FIRST and width <= 128 and (not call.is_causal if masked else q.shape[2] > 1)
        if first and cudnn_is_wanted() and cudnn_agrees(str(q.device), q.dtype, masked):
            return "cuDNN"
        if capability >= (8, 0) and not masked:
            return "flash"
    rows_fit = all(n * q.element_size() % 16 == 0 for n in (width, of_values))
    return "efficient" if rows_fit and (is_half or q.dtype == torch.float32) else "math"


def _cpu(c: Call) -> tuple[Tensor, Tensor]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        c.query, c.key, c.value, 0.0, c.is_causal, attn_mask=c.attn_mask, scale=c.scale
    )
    return out, logsumexp.to(torch.promote_types(c.query.dtype, torch.float32))  # of float64 torch 2.12's fake kernel says float32


def _cpu_backward(c: Call, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, c.query, c.key, c.value, out, logsumexp, 0.0, c.is_causal, attn_mask=c.attn_mask, scale=c.scale
    )


def _flash(c: Call) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(c.query, c.key, c.value, 0.0, c.is_causal, False, scale=c.scale)[:2]


def _flash_backward(c: Call, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    state, offset = (c.query.new_zeros(size, dtype=torch.uint64) for size in ((2,), ()))  # of dropout, which there is none of
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, c.query, c.key, c.value, out, logsumexp, None, None, c.query.shape[2], c.key.shape[2], 0.0, c.is_causal, state, offset,
        scale=c.scale,
    )  # fmt: skip


CUDNN_FIRST = ((9, 0), (10, 0))  # compute capabilities where torch prefers cuDNN (sdp_utils.cpp, check_prefer_cudnn_attention)


def cudnn_is_wanted() -> bool:
    """By torch's own switches, and a version from which torch prefers it."""
    is_new = (torch.backends.cudnn.version() or 0) >= 90900
    return is_new and torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()


@cache
def cudnn_agrees(device: str, dtype: torch.dtype, masked: bool) -> bool:
    """Whether cuDNN's kernel gives what flash, or with a mask the efficient one, gives on this device, forward and backward, of four heads
    that share two: else that one runs, and a warning says so once."""
    other = "efficient" if masked else "flash"
    with disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        q, k, v, grad = (torch.randn(2, h, 128, 64, generator=generator).to(device, dtype) for h in (4, 2, 2, 4))
        mask = q.new_full((2, 1, 128, 128), -math.inf).triu(1) if masked else None
        call = Call(q, k, v, mask, not masked, None)
        try:
            two = [KERNELS_OF[name] for name in (other, "cuDNN")]
            results = [(*(out := forward(call)), *backward(call, grad, *out)) for forward, backward in two]
            worst = max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in zip(*results, strict=True))
        except RuntimeError as error:
            warnings.warn(f"attention runs by the {other} kernel: cuDNN's fails here ({str(error).splitlines()[0]})", stacklevel=2)
            return False
    if not worst < 0.03:
        warnings.warn(f"attention runs by the {other} kernel: cuDNN's is {worst:.0%} off here", stacklevel=2)
    return worst < 0.03


def _full_mask(c: Call) -> Tensor | None:
    if c.attn_mask is None:
        return None
    return _dense(c.attn_mask.expand(*c.attn_mask.shape[:-1], c.key.shape[2])).expand(*c.query.shape[:3], -1)


def _cudnn(c: Call) -> tuple[Tensor, Tensor]:
    outputs = aten._scaled_dot_product_cudnn_attention(c.query, c.key, c.value, _full_mask(c), True, 0.0, c.is_causal, False, scale=c.scale)
    out, logsumexp = outputs[:2]
    return out, logsumexp.reshape(out.shape[:3])


def _cudnn_backward(c: Call, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    state, offset = (c.query.new_zeros((), dtype=torch.int64) for _ in range(2))  # of dropout, which there is none of
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, c.query, c.key, c.value, out, logsumexp.unsqueeze(-1), state, offset, _full_mask(c), None, None, c.query.shape[2],
        c.key.shape[2], 0.0, c.is_causal, scale=c.scale,
    )  # fmt: skip


def _by_groups(c: Call) -> Call | None:
    """The call with the queries of a group as rows of one head, for which no key or value is repeated: of few queries, a decode's say,
    whose mask is smaller than what is repeated otherwise. None for other calls."""
    (b, h, t, d), groups, mask = c.query.shape, c.groups, c.attn_mask
    if groups == 1 or t > d or c.is_causal:
        return None
    if mask is not None:
        heads = h // groups if mask.shape[HEADS] == h else 1
        mask = mask.expand(-1, heads * groups, t, -1).reshape(mask.shape[0], heads, groups * t, mask.shape[-1])
    return replace(c, query=c.query.reshape(b, h // groups, groups * t, d), attn_mask=mask)


def _efficient(c: Call) -> tuple[Tensor, Tensor]:
    if (one := _by_groups(c)) is not None:
        out, logsumexp = _efficient(one)
        return out.reshape(*c.query.shape[:3], -1), logsumexp.reshape(c.query.shape[:3])
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        c.query, *_repeated(c), _aligned_mask(c), True, 0.0, c.is_causal, scale=c.scale
    )
    return out, logsumexp[..., : c.query.shape[2]]


def _efficient_backward(c: Call, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    if (one := _by_groups(c)) is not None:
        rows = one.query.shape[:3]
        grad_q, *grads = _efficient_backward(one, grad_out.reshape(*rows, -1), out.reshape(*rows, -1), logsumexp.reshape(rows))
        return grad_q.reshape(c.query.shape), *grads
    padded = F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32)).contiguous()
    state, offset = (c.query.new_zeros((), dtype=torch.int64) for _ in range(2))  # of dropout, which there is none of
    grad_q, *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, c.query, *_repeated(c), _aligned_mask(c), out, padded, state, offset, 0.0, [True, True, True, False], c.is_causal,
        scale=c.scale,
    )  # fmt: skip
    return grad_q, *(g if c.groups == 1 else g.unflatten(HEADS, (-1, c.groups)).sum(HEADS + 1) for g in grads)


def _repeated(c: Call) -> tuple[Tensor, ...]:
    return tuple(x if c.groups == 1 else x.repeat_interleave(c.groups, HEADS) for x in (c.key, c.value))


def _aligned_mask(c: Call) -> Tensor | None:
    """The mask for all scores, with strides that are multiples of 8 elements."""
    if c.attn_mask is None:
        return None
    keys = c.key.shape[2]
    mask = c.attn_mask.expand(*c.attn_mask.shape[:-1], keys)
    mask = F.pad(mask, (0, -keys % 8)).contiguous()[..., :keys]
    return mask.expand(*c.query.shape[:3], keys)


def math_attention(c: Call) -> tuple[Tensor, Tensor]:
    scores = _scores(c)
    logsumexp = scores.logsumexp(-1)
    p = _with_factors(_probabilities(scores, logsumexp), c)
    out = _of_groups(p, c) @ wide(c.value)
    return out.reshape(*c.query.shape[:3], -1).to(c.value.dtype), logsumexp


def math_attention_backward(c: Call, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    grad = wide(grad_out)
    p = _probabilities(_scores(c), logsumexp)
    grad_p = _with_factors((_of_groups(grad, c) @ wide(c.value).mT).reshape(p.shape), c)
    grad_scores = _of_groups(p * (grad_p - (grad * wide(out)).sum(-1, keepdim=True)) * _scale(c), c)
    grad_q = (grad_scores @ wide(c.key)).reshape(c.query.shape)
    grad_k = grad_scores.mT @ _of_groups(wide(c.query), c)
    grad_v = _of_groups(_with_factors(p, c), c).mT @ _of_groups(grad, c)
    return tuple(g.to(c.query.dtype) for g in (grad_q, grad_k, grad_v))


def _with_factors(p: Tensor, c: Call) -> Tensor:
    return p if c.factors is None else p * c.factors


def _scale(c: Call) -> float:
    return 1 / math.sqrt(c.query.shape[-1]) if c.scale is None else c.scale


def _of_groups(x: Tensor, c: Call) -> Tensor:
    """[B, H, T, n] with the queries of all heads of a group one after the other: [B, G, H / G * T, n]."""
    return x.reshape(x.shape[0], c.key.shape[HEADS], c.groups * x.shape[2], x.shape[3])


def _scores(c: Call) -> Tensor:
    """[B, H, T, S], scaled, masked, with -inf where a query must not attend."""
    q = c.query
    scores = (_of_groups(wide(q) * _scale(c), c) @ wide(c.key).mT).reshape(*q.shape[:3], c.key.shape[2])
    if c.attn_mask is not None:
        scores = scores + c.attn_mask
    if c.is_causal:
        t, s = (torch.arange(n, device=q.device) for n in scores.shape[2:])
        scores = scores.masked_fill(s > t.unsqueeze(-1), -math.inf)
    return scores


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """0 for a query that may not attend to any key."""
    total = logsumexp.unsqueeze(-1)
    return (scores - total.masked_fill(total == -math.inf, 0.0)).exp()


KERNELS_OF: dict[str, tuple[Callable[[Call], tuple[Tensor, Tensor]], Backward]] = {
    "flash for CPU": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "cuDNN": (_cudnn, _cudnn_backward),
    "efficient": (_efficient, _efficient_backward),
    "math": (math_attention, math_attention_backward),
}

# the captured operators, where a user runs a captured graph
for _device in ("CPU", "CUDA"):
    torch.library.impl("autoshard::attention", _device, attention)
    torch.library.impl("autoshard::attention_backward", _device, attention_backward)
FUNCTIONS: dict[str, Callable[..., Any]] = {str(ATTENTION): attention, str(BACKWARD): attention_backward}


def key_heads_needed(rank: Rank, a: Arguments, *, of_queries: Axes, of_keys: Axes, heads: int, key_heads: int) -> Tensor:
    """The key-value heads of this rank's query heads, counted from its first.

    heads, key_heads: of the global tensors; of_queries, of_keys: the axes that shard them.
    """
    group, count = heads // key_heads, a["query"].shape[HEADS]
    first, even = rank.start(of_queries, heads), count * math.prod(rank.mesh.shape[axis] for axis in of_queries) == heads
    if even and group % count == 0:  # all of its queries share one
        needed = (first // group).reshape(1)
    elif even and count % group == 0:
        needed = first // group + torch.arange(count // group, device=first.device)
    else:
        needed = (first + torch.arange(count, device=first.device)) // group
    return needed - rank.start(of_keys, key_heads)


@local
def plain(rank: Rank, a: Arguments) -> Any:
    return attention_backward(**a) if "grad_out" in a else attention(**a)


def shared_heads(rank: Rank, a: Arguments, *, inside: Kernel, **heads: Any) -> RankGenerator:
    """What `inside` computes with the key-value heads that the rank's query heads need. heads: those of `key_heads_needed`."""
    needed = key_heads_needed(rank, a, **heads)
    results = yield from inside(rank, {**a, **{name: a[name].index_select(HEADS, needed) for name in ("key", "value")}})
    if "grad_out" not in a:
        return results
    grad_q, *grads = results
    return grad_q, *(aten.index_put.default(torch.zeros_like(a[n]), [None, needed], g, True) for n, g in zip(("key", "value"), grads))


def _attention(sharded: ShardedOp) -> Kernel | None:
    of_queries, of_keys = sharded.axes_of("query", HEADS), sharded.axes_of("key", HEADS)
    if of_queries == of_keys:
        return None
    heads, key_heads = sharded.shape("query")[HEADS], sharded.shape("key")[HEADS]
    if heads == key_heads or of_queries[: len(of_keys)] != of_keys:
        raise sharded.refuse("the key-value heads of a rank are not those of its query heads")
    return partial(shared_heads, inside=plain, of_queries=of_queries, of_keys=of_keys, heads=heads, key_heads=key_heads)


KERNELS = {str(ATTENTION): _attention, str(BACKWARD): _attention}

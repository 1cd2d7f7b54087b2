"""The operators that programs have beside ATen's: `autoshard::attention` and so on, the same on every device. `lower.kernels` runs them.

    attention           out[b, h, t] = sum_s P[t, s] v[b, g, s]
                        P = softmax over s of (scale q[b, h, t] . k[b, g, s] + attn_mask[b, h, t, s])
                        logsumexp[b, h, t] = ln sum_s exp(the same)       g = h // (heads of q / heads of k): grouped queries
    dropout_attention   out[b, h, t] = sum_s P[t, s] D[b, h, t, s] v[b, g, s]
                        D = kept / (1 - dropout_p), each kept with probability 1 - dropout_p
    ctc_loss            losses[n] = - ln sum over alignments a of targets[n] of
                        the product over t < input_lengths[n] of exp(log_probs[t, n, a_t])
    chunked_loss        the cross entropy of x @ weight, in chunks of tokens; `graph.chunked_loss` puts it in place of matmul and loss
    reorder             a sequence in head-tail order, or back in the natural one; `graph.order` inserts it

Attention: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E]; is_causal: s <= t only; scale: 1 / sqrt(D) where None. kept [B, H, T, S] is a
result, since the backward reads it; the probabilities are not kept. CTC: log_probs [T, N, C], targets [N, S] (padded) or [sum of the
lengths], lengths [N]; log_alpha [N, T, 2 S + 1] is torch's, 0 where there is no such time or place: no shape depends on the lengths, where
torch's own is as wide as the longest target. Chunked loss: x [T, H], weight [H, V], target [T] -> loss and total weight (scalars),
logsumexp [T]; and the gradients of x and of the transposed weight, [T, H] and [V, H]. reduction: 1 mean, 2 sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.torch_private import OpOverload


def define(name: str, schema: str, fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> OpOverload:
    """The operator `autoshard::name`; fake: its results without values."""
    torch.library.define(f"autoshard::{name}", schema, tags=tags)
    torch.library.register_fake(f"autoshard::{name}", fake)
    return getattr(torch.ops.autoshard, name).default


def differentiate(forward: OpOverload, backward: OpOverload) -> None:
    """Makes `backward` the derivative of the first result of `forward`, by the names in their schemas: its first argument is the gradient
    of that result, the others are arguments and results of `forward`; its result `grad_x` is the gradient of argument x."""
    arguments, results = ([item.name for item in items] for items in (forward._schema.arguments, forward._schema.returns))
    read = [argument.name for argument in backward._schema.arguments[1:]]
    gradients = [result.name for result in backward._schema.returns]

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        known = dict(zip((*arguments, *results), (*inputs, *outputs), strict=True))
        ctx.others = {name: known[name] for name in read if not isinstance(known[name], Tensor)}
        ctx.save_for_backward(*(known[name] for name in read if name not in ctx.others))
        ctx.mark_non_differentiable(*outputs[1:])

    def gradients_of(ctx: Any, grad: Tensor, *_: Any) -> tuple:
        tensors = iter(ctx.saved_tensors)
        computed = backward(grad, *[ctx.others[name] if name in ctx.others else next(tensors) for name in read])
        by_name = dict(zip(gradients, computed if isinstance(computed, tuple) else (computed,), strict=True))
        return tuple(by_name.get(f"grad_{name}") for name in arguments)

    torch.library.register_autograd(forward, gradients_of, setup_context=save)


# -- attention ---------------------------------------------------------------------------------------------------------------------

QKV = "Tensor query, Tensor key, Tensor value"
ATTENDED = "Tensor out, Tensor logsumexp"
OF_QKV = "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
OPTIONS = "Tensor? attn_mask=None, bool is_causal=False, float? scale=None"
ORDERED = f"{OPTIONS}, int head_tail=0"  # a model's own attention is in the natural order


def exact(x: Tensor) -> torch.dtype:
    """In which sums of its elements are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def heads_inside(x: Tensor, width: int) -> Tensor:
    """An empty tensor of x's shape but for its last dim, whose heads are next to their features in memory, as kernels leave them."""
    b, h, t, _ = x.shape
    return x.new_empty((b, t, h, width)).transpose(1, 2)


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return heads_inside(query, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=exact(query))


def _attended_with_dropout(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    kept = query.new_empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool)
    return *_attended(query, key, value), kept


def _of_qkv(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(heads_inside(x, x.shape[-1]) for x in (query, key, value))


ATTENTION = define("attention", f"({QKV}, {ORDERED}) -> ({ATTENDED})", _attended)
BACKWARD = define("attention_backward", f"(Tensor grad_out, {QKV}, {ATTENDED}, {ORDERED}) -> {OF_QKV}", _of_qkv)
differentiate(ATTENTION, BACKWARD)
KEPT, WITH_DROPOUT = f"{ATTENDED}, Tensor kept", f"float dropout_p, {OPTIONS}"
SEEDED = (torch.Tag.nondeterministic_seeded,)
DROPOUT = define("dropout_attention", f"({QKV}, {WITH_DROPOUT}) -> ({KEPT})", _attended_with_dropout, SEEDED)
DROPOUT_BACKWARD = define("dropout_attention_backward", f"(Tensor grad_out, {QKV}, {KEPT}, {WITH_DROPOUT}) -> {OF_QKV}", _of_qkv)
differentiate(DROPOUT, DROPOUT_BACKWARD)


# -- RMS norm, in a graph torch's own operator, which a trace on a CPU would decompose -------------------------------------------------

NORMED = "Tensor input, int[] normalized_shape"
RMS_NORM = define(
    "rms_norm", f"({NORMED}, Tensor? weight, float? eps) -> (Tensor out, Tensor rstd)",
    lambda x, shape, *_: (x.new_empty(x.shape), x.new_empty((*x.shape[: -len(shape)], *(1,) * len(shape)), dtype=exact(x))),
)  # fmt: skip
RMS_NORM_BACKWARD = define(
    "rms_norm_backward", f"(Tensor grad_out, {NORMED}, Tensor rstd, Tensor? weight, bool[2] output_mask) -> (Tensor, Tensor)",
    lambda grad, x, shape, rstd, weight, mask: (x.new_empty(x.shape), x.new_empty(shape)),
)  # fmt: skip
OF_TORCH = {
    RMS_NORM: torch.ops.aten._fused_rms_norm.default,
    RMS_NORM_BACKWARD: torch.ops.aten._fused_rms_norm_backward.default,
}  # fmt: skip


def _keep_normed(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])


def _of_normed(ctx: Any, grad: Tensor, _: Any) -> tuple:
    x, rstd, weight = ctx.saved_tensors
    mask = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
    of_x, of_weight = RMS_NORM_BACKWARD(grad, x, ctx.shape, rstd, weight, mask)
    return of_x if mask[0] else None, None, of_weight if mask[1] else None, None


torch.library.register_autograd(RMS_NORM, _of_normed, setup_context=_keep_normed)


# -- losses ------------------------------------------------------------------------------------------------------------------------

PROBS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
LOSSES, BLANK = "Tensor losses, Tensor log_alpha", "int blank=0, bool zero_infinity=False"


def _ctc_losses(log_probs: Tensor, targets: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
    times, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, times, 2 * targets.shape[-1] + 1))


def _of_log_probs(grad: Tensor, log_probs: Tensor, *_: Any, **options: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


CTC = define("ctc_loss", f"({PROBS}, {BLANK}) -> ({LOSSES})", _ctc_losses)
CTC_BACKWARD = define("ctc_loss_backward", f"(Tensor grad, {PROBS}, {LOSSES}, {BLANK}) -> (Tensor grad_log_probs)", _of_log_probs)
differentiate(CTC, CTC_BACKWARD)

OPERANDS, SETTINGS = "Tensor x, Tensor weight, Tensor target", "int ignore_index, int reduction, int rows"
STATISTICS = "Tensor total_weight, Tensor logsumexp"


def _chunked_loss(x: Tensor, weight: Tensor, target: Tensor, *_: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((), dtype=dtype), x.new_empty((), dtype=dtype), x.new_empty(target.shape, dtype=dtype)


def _of_operands(grad: Tensor, x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape[::-1])


LOSS = define("chunked_loss", f"({OPERANDS}, {SETTINGS}) -> (Tensor loss, {STATISTICS})", _chunked_loss)
LOSS_BACKWARD = define(
    "chunked_loss_backward", f"(Tensor grad, {OPERANDS}, {STATISTICS}, {SETTINGS}) -> (Tensor grad_x, Tensor grad_weight)", _of_operands
)


# -- the order of a sequence -------------------------------------------------------------------------------------------------------


def reorder(x: Tensor, dim: int, head_tail: int, back: bool) -> Tensor:
    """x with the tokens on `dim` in head-tail order of so many parts; back: from that order to the natural one."""
    if back:
        chunks = x.unflatten(dim, (head_tail, 2, -1))
        return torch.cat([chunks.select(dim + 1, 0), chunks.select(dim + 1, 1).flip(dim)], dim).flatten(dim, dim + 1)
    chunks = x.unflatten(dim, (2, head_tail, -1))
    return torch.stack([chunks.select(dim, 0), chunks.select(dim, 1).flip(dim)], dim + 1).flatten(dim, dim + 2)


torch.library.define("autoshard::reorder", "(Tensor x, int dim, int head_tail, bool back) -> Tensor")
torch.library.impl("autoshard::reorder", "CompositeImplicitAutograd", reorder)
REORDER = torch.ops.autoshard.reorder.default

"""What torch does otherwise while a model is captured. One thread at a time enters these contexts.

    F.scaled_dot_product_attention   `autoshard::attention`, or with dropout `autoshard::dropout_attention`; attention with a mask that is
                                     trained stays as torch decomposes it: matmuls and softmax
    F.rms_norm                       `aten._fused_rms_norm`, as torch runs it on a GPU; on a CPU it is six operators
    F.ctc_loss                       `autoshard::ctc_loss`
    flex_attention                   plain operators, of which each has its rules. torch's own (2.13) has no backward on the CPU, whose
                                     tensors stand for all devices in a capture, and is compiled when it is called
        without a score_mod          scaled dot product attention with the mask that the block mask stands for
        with one                     P = softmax over s of (score_mod(scale q . k) where the mask is, else -inf);  out = P v
    the gated delta rule             `autoshard::delta_rule`, where models of transformers compute it (`capture.delta_rule`)
    LSTM, GRU, RNN                   with dropout between their layers, which torch's own decomposition (2.14) leaves out
    F.multilabel_margin_loss         torch's decomposition (2.14) reads a target's row for a column where each row has other targets
    grouped_mm                       has a fake kernel for every type that torch multiplies: torch's own (2.13) knows bfloat16 only

mask[b, h, t, s] = mask_mod(b, h, t, s), or the block mask's blocks where it has no mask_mod.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention, noop_mask

from autoshard.capture.delta_rule import delta_rule_as_one_op
from autoshard.capture.operators import ATTENTION, CTC, DROPOUT, RMS_NORM
from autoshard.torch_private import DispatchKey, EffectType, OpOverload, TransformGetItemToIndex, over_places, register_effectful_op

aten = torch.ops.aten


@contextmanager
def replaced_operators(device: str = "CPU") -> Iterator[None]:
    """All of it. Kernels are replaced for CPU tensors: those of a capture are fake ones. device: "CUDA" for what is traced elsewhere."""
    checks = "aten::_linalg_check_errors"  # of cholesky, inv, solve: a captured program has no assertions
    one_op: dict[str, Callable] = {
        "scaled_dot_product_attention": _attention, "ctc_loss.IntList": _ctc_loss, "ctc_loss.Tensor": _ctc_loss, "rms_norm": _rms_norm,
    }  # fmt: skip
    with _kernels(one_op, f"Autograd{device}"), flex_as_attention(), delta_rule_as_one_op(), fake_grouped_mm(), mended():
        register_effectful_op(checks, None)
        try:
            yield
        finally:
            register_effectful_op(checks, EffectType.ORDERED)


@contextmanager
def _kernels(functions: Mapping[str, Callable], key: str) -> Iterator[None]:
    """Inside the block these functions are the kernels of ATen operators, also where torch's dispatcher in Python remembers others."""
    library = torch.library.Library("aten", "IMPL")
    names = [name.partition(".") for name in functions]
    operators = [getattr(getattr(aten, packet), overload or "default") for packet, _, overload in names]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Overriding a previously registered kernel")
        for name, function in functions.items():
            library.impl(name, function, key, allow_override=True)
    _forget(operators)
    try:
        yield
    finally:
        library._destroy()
        _forget(operators)


def _forget(operators: Iterable[OpOverload]) -> None:
    for operator in operators:
        operator._dispatch_cache.clear()


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    if not _is_one_op(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        decompose = aten.scaled_dot_product_attention.default.decompose
        return decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    if dropout_p:
        return DROPOUT(query, key, value, dropout_p, attn_mask, is_causal, scale)[0]
    return ATTENTION(query, key, value, attn_mask, is_causal, scale)[0]


def _is_one_op(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, grouped: bool
) -> bool:
    if dropout_p >= 1 or (attn_mask is not None and (attn_mask.requires_grad or is_causal or attn_mask.dim() > 4)):
        return False
    if not (query.dim() == key.dim() == value.dim() == 4 and query.is_floating_point() and 0 not in (*query.shape, *key.shape)):
        return False
    heads, groups = query.shape[1], key.shape[1]
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] and key.shape[:3] == value.shape[:3]
    return same and query.shape[0] == key.shape[0] and (heads == groups or (grouped and heads % groups == 0))


@contextmanager
def flex_as_attention() -> Iterator[None]:
    """Inside the block flex_attention is `attend`. Models hold the function itself, under names of their own and inside torch.compile, and
    it has no hook: its code is exchanged."""
    original = flex_attention.__code__
    flex_attention.__code__ = _flex_attention.__code__
    try:
        yield
    finally:
        flex_attention.__code__ = original


def _flex_attention(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, kernel_options=None, *,
    return_aux=None,
):  # fmt: skip
    from autoshard.capture.replaced import attend  # here: it has the globals of torch's module

    if return_lse or return_aux is not None:
        raise ValueError("flex_attention returns its logsumexp or maxima, which are not captured: leave out return_lse and return_aux")
    return attend(query, key, value, score_mod, block_mask, scale, enable_gqa)


def attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None, block_mask: BlockMask | None, scale: float | None, grouped: bool
) -> Tensor:
    """out [B, H, T, E] of q [B, H, T, D], k [B, G, S, D] and v [B, G, S, E]."""
    mask = None if block_mask is None else _mask(block_mask, query, key)
    if score_mod is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    if grouped:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    places = (torch.arange(n, device=query.device) for n in scores.shape)
    with TransformGetItemToIndex():  # slopes[h] in the function is an index, not the number at a place
        scores = over_places(score_mod, prefix=(0,))(scores, *places).to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value  # 0 where a query may not attend to any key


def _mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> Tensor:
    """[B or 1, H or 1, T, S], true where a query attends."""
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if block_mask.mask_mod is not noop_mask:
        return create_mask(block_mask.mask_mod, batch, heads, query.shape[2], key.shape[2], query.device)
    t, s = block_mask.BLOCK_SIZE
    blocks = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        blocks = blocks | _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    blocks = blocks.repeat_interleave(t, 2).repeat_interleave(s, 3)
    return blocks[..., : query.shape[2], : key.shape[2]]


def _blocks(number: Tensor, indices: Tensor) -> Tensor:
    """[B, H, T / t, S / s], true where a row of blocks names a block: its first `number` [B, H, T / t] of `indices` [B, H, T / t, S / s].

    What torch's to_dense computes, without writing into a tensor.
    """
    columns = torch.arange(indices.shape[-1], device=indices.device)
    named = indices.unsqueeze(-1) == columns
    return (named & (columns < number.unsqueeze(-1)).unsqueeze(-1)).any(-2)


def _rms_norm(x, normalized_shape, weight=None, eps=None):  # type: ignore[no-untyped-def]
    if not (x.is_floating_point() and x.numel() and (weight is None or weight.dtype == x.dtype)):
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    return RMS_NORM(x, normalized_shape, weight, eps)[0]


MEAN = 1  # of torch's reduction argument: 0 none, 1 mean, 2 sum


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=MEAN, zero_infinity=False):  # type: ignore[no-untyped-def]
    batched = log_probs.dim() == 3
    if not batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    lengths = [_as_tensor(given, targets).reshape(-1) for given in (input_lengths, target_lengths)]
    losses = CTC(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == MEAN:
        return (losses / lengths[1].clamp_min(1)).mean()
    return losses.sum() if reduction else losses if batched else losses.squeeze(0)


def _as_tensor(lengths: Tensor | Sequence[int], targets: Tensor) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths
    return torch.stack([targets.new_full((), length, dtype=torch.int64) for length in lengths])


@contextmanager
def mended() -> Iterator[None]:
    """Inside the block decompositions that are wrong in torch (2.14) are right."""
    stacks = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
    margin = aten.multilabel_margin_loss_forward.default
    mends = [*((op, partial(_with_dropout, op.py_kernels[AUTOGRAD])) for op in stacks), (margin, _multilabel_margin_loss)]
    replaced = [(op, key, op.py_kernels[key]) for op, _ in mends for key in (AUTOGRAD, COMPOSITE) if key in op.py_kernels]
    try:
        for op, kernel in mends:
            op.py_kernels.update({key: kernel for key in (AUTOGRAD, COMPOSITE) if key in op.py_kernels})
        _forget(op for op, _ in mends)
        yield
    finally:
        for op, key, kernel in replaced:
            op.py_kernels[key] = kernel
        _forget(op for op, _ in mends)


AUTOGRAD, COMPOSITE = DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd


def _with_dropout(  # type: ignore[no-untyped-def]
    stack, x, states, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
):
    """The layers of a recurrent stack (torch's decomposition of it) one by one, with dropout between them."""
    if not (train and dropout and num_layers > 1):
        return stack(x, states, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    directions, number, last = 1 + bidirectional, len(params) // num_layers, []
    x = x.transpose(0, 1) if batch_first else x
    for i in range(num_layers):
        x = torch.dropout(x, dropout, train) if i else x
        own = [state[i * directions : (i + 1) * directions] for state in (states if isinstance(states, (list, tuple)) else [states])]
        of_layer = own if isinstance(states, (list, tuple)) else own[0]
        x, *ends = stack(x, of_layer, params[i * number : (i + 1) * number], has_biases, 1, 0.0, train, bidirectional, False)
        last.append([end.reshape(-1, *end.shape[-2:]) for end in ends])  # torch 2.12 has a dim more in some
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(ends) for ends in zip(*last)))


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """sum over targets t, up to a row's first -1, and classes c that are none of max(0, 1 - x[t] + x[c]) / C; and which c are targets."""
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    is_given = (targets >= 0).cumprod(-1).bool()
    own = torch.where(is_given, targets, 0)
    is_target = ((own.unsqueeze(-1) == torch.arange(rows.shape[-1], device=x.device)) & is_given.unsqueeze(-1)).any(1)
    margins = (1 - rows.gather(-1, own).unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0)  # [row, target, class]
    losses = (margins * (is_given.unsqueeze(-1) & ~is_target.unsqueeze(1))).sum((1, 2)) / rows.shape[-1]
    loss = losses.mean() if reduction == MEAN else losses.sum() if reduction else losses.reshape(x.shape[:-1])
    return loss, is_target.to(x.dtype).reshape(x.shape)


@contextmanager
def fake_grouped_mm() -> Iterator[None]:
    """Inside the block fake grouped matmuls are of any float type.

    x (s, k), w (e, k, n), ends (e) -> (s, n)        x (k, s), y (s, n), ends (e) -> (e, k, n)
    x (e, s, k), y (k, n), ends (e) -> (s, n)        x (e, s, k), y (e, k, n)     -> (e, s, n)
    """
    kernels, key = aten._grouped_mm.default.py_kernels, DispatchKey.Meta  # which torch's dispatcher in Python calls, where that is on
    torchs = {key: kernels[key]} if key in kernels else {}
    with _kernels({"_grouped_mm": _grouped_mm}, "Meta"):
        kernels[key] = _grouped_mm
        try:
            yield
        finally:
            del kernels[key]
            kernels.update(torchs)


def _grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    rows, columns = self.shape[-2], mat2.shape[-1]
    if self.dim() != mat2.dim():
        shape: tuple[int, ...] = (rows if self.dim() == 2 else self.shape[1], columns)
    else:
        assert self.dim() == 3 or offs is not None
        shape = (self.shape[0] if offs is None else offs.shape[0], rows, columns)
    if bias is not None or not self.is_floating_point() or self.dtype != mat2.dtype or self.shape[-1] != mat2.shape[-2]:
        raise RuntimeError(f"grouped_mm of {tuple(self.shape)} {self.dtype} and {tuple(mat2.shape)} {mat2.dtype} is not supported")
    step = 16 // self.element_size()  # rows begin at multiples of 16 bytes, as in torch's own
    return self.new_empty((*shape[:-1], -(-columns // step) * step), dtype=out_dtype).narrow(-1, 0, columns)

"""torch's flex_attention while a model is captured: plain operators, of which each has its rules.

    without a score_mod    scaled dot product attention with the mask that the block mask stands for: one operator (`capture.attention`)
    with one               P = softmax over s of (score_mod(scale q . k) where the mask is, else -inf);  out = P v

mask[b, h, t, s] = mask_mod(b, h, t, s), or the block mask's blocks where it has no mask_mod. torch's own (2.13) has no backward on the
CPU, whose tensors stand for all devices in a capture, and is compiled when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention, noop_mask

from autoshard.torch_private import over_places


@contextmanager
def flex_as_attention() -> Iterator[None]:
    """Inside the block, which one thread enters at a time, flex_attention is `attend`. Models hold the function itself, under names of
    their own and inside torch.compile, and it has no hook: its code is exchanged."""
    original = flex_attention.__code__
    flex_attention.__code__ = _replacement.__code__
    try:
        yield
    finally:
        flex_attention.__code__ = original


def _replacement(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, kernel_options=None, *,
    return_aux=None,
):  # fmt: skip
    from autoshard.capture.flex_attention import attend  # here: it has the globals of torch's module

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
    blocks = block_mask.to_dense().bool().repeat_interleave(t, 2).repeat_interleave(s, 3)
    return blocks[..., : query.shape[2], : key.shape[2]]

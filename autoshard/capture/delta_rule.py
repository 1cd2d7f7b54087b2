"""The gated delta rule of linear attention (Yang, Kautz, Hatamizadeh, https://arxiv.org/abs/2412.06464) as one operator.

    S_t = e^g_t (I - b_t k_t k_t') S_t-1 + b_t k_t v_t'        out_t = S_t' q_t / sqrt(K)

q, k [B, T, G, K], v [B, T, H, V], g and b [B, T, H] -> out [B, T, H, V] and the last state [B, H, K, V]; H / G heads of v share one of q
and k, which have length 1 where `normalize`. Kimi's delta attention has a decay for each row of the state, g [B, T, H, K]: e^g is diagonal.
Chunks of C tokens, with c_i = g_1 + .. + g_i inside of one (`delta_rule`):

    A_ij = b_i k_i . k_j e^(c_i - c_j), j < i        U = (I + A)^-1 (b v)        W = (I + A)^-1 (b e^c k)
    N = U - W S          out_i = e^c_i q_i S + sum_j<=i q_i . k_j e^(c_i - c_j) N_j          S <- e^c_C S + sum_j e^(c_C - c_j) k_j' N_j

What transformers (5.19) writes in a loop over the rows of (I + A)^-1 and one over the chunks is thousands of ops in a graph.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.capture.operators import define, differentiate, exact
from autoshard.graph import DELTA_CHUNK as CHUNK

NAMES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")  # in modules of transformers
EPSILON = 1e-6  # of a length of q or k
READ = "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor? initial, bool normalize"
GRADIENTS = ", ".join(f"Tensor grad_{name}" for name in ("query", "key", "value", "decay", "beta"))


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = value.shape
    return value.new_empty(value.shape), value.new_empty((batch, heads, key.shape[-1], width), dtype=exact(query))


def _fake_backward(grad_out: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in operands[:5])


DELTA_RULE = define("delta_rule", f"({READ}) -> (Tensor out, Tensor state)", _fake)
DELTA_RULE_BACKWARD = define("delta_rule_backward", f"(Tensor grad_out, {READ}) -> ({GRADIENTS})", _fake_backward)
differentiate(DELTA_RULE, DELTA_RULE_BACKWARD)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, initial: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """out, as wide as value, and the last state, which is computed in float32 at least. By plain operators, on any device."""
    tokens, groups = key.shape[1], value.shape[2] // key.shape[2]
    q, k, v, g, b = (x.transpose(1, 2).to(exact(query)) for x in (query, key, value, decay, beta))
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k))
    q, k = ((x.repeat_interleave(groups, 1) if groups > 1 else x) for x in (q * q.shape[-1] ** -0.5, k))
    rest = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    g, b = (F.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, CHUNK)) for x in (g if g.dim() == 4 else g.unsqueeze(-1), b.unsqueeze(-1)))
    c = g.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    kept = (c.unsqueeze(-2) - c.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()  # [.., i, j, 1 or K]
    scaled, through = k * b, c.exp()
    sides = torch.cat([v * b, scaled * through], -1)
    solved = torch.linalg.solve_triangular(_scores(scaled, k, kept), sides, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, from_state, to_state = _scores(q, k, kept), q * through, (k * (c[..., -1:, :] - c).exp()).mT
    state = v.new_zeros((*v.shape[:2], k.shape[-1], v.shape[-1])) if initial is None else initial.to(v.dtype)
    out = []
    for i in range(v.shape[2]):
        new = u[:, :, i] - w[:, :, i] @ state
        out.append(from_state[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * through[:, :, i, -1:].mT + to_state[:, :, i] @ new
    return torch.cat(out, 2)[:, :, :tokens].transpose(1, 2).to(value.dtype).contiguous(), state


def _scores(q: Tensor, k: Tensor, kept: Tensor) -> Tensor:
    """sum over rows r of q_ir k_jr kept_ijr."""
    return q @ k.mT * kept[..., 0] if kept.shape[-1] == 1 else torch.einsum("...ir,...jr,...ijr->...ij", q, k, kept)


@contextmanager
def delta_rule_as_one_op() -> Iterator[None]:
    """Inside the block the functions by which models of transformers compute the rule are the operator: their code is exchanged, as layers
    hold the functions themselves."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.")]
    functions = [getattr(module, name, None) for module in modules for name in NAMES]
    plain = {id(f): f for f in (getattr(f, "__wrapped__", f) for f in functions) if f is not None}
    codes = [(f, f.__code__) for f in plain.values() if _arguments(f) == _arguments(_chunk_gated_delta_rule)]
    try:
        for function, _ in codes:
            function.__code__ = _chunk_gated_delta_rule.__code__
        yield
    finally:
        for function, code in codes:
            function.__code__ = code


def _arguments(function: Any) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _chunk_gated_delta_rule(  # type: ignore[no-untyped-def]
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs
):
    from autoshard.capture.delta_rule import attend_by_delta_rule  # here: it has the globals of another module

    out, state = attend_by_delta_rule(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, output_final_state)
    return out, state if output_final_state else None


def attend_by_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, initial: Tensor | None, normalize: bool, reads_state: bool
) -> tuple[Tensor, Tensor]:
    """The operator, or where gradients go through states, which it has none of, plain operators."""
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, decay, beta))
    if (reads_state and is_trained) or (initial is not None and initial.requires_grad):
        return delta_rule(query, key, value, decay, beta, initial, normalize)
    return DELTA_RULE(query, key, value, decay, beta, initial, normalize)

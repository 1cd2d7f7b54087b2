"""The gated delta rule (`capture.delta_rule`): kernels of flash-linear-attention on CUDA where it is installed, else plain operators.

The backward runs the forward again, for autograd to differentiate.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from autoshard.capture import delta_rule as by_operators
from autoshard.lower.kernels.sharded_op import autograd


@cache
def _of_library() -> dict[int, Callable[..., tuple[Tensor, Tensor]]]:
    """Kernels by the dims of the decay: one for each head, or for each row of its state."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
    except ImportError:
        warnings.warn("linear attention runs by plain operators, slowly: pip install flash-linear-attention", stacklevel=2)
        return {}
    return {3: chunk_gated_delta_rule, 4: chunk_kda}


def delta_rule(query, key, value, decay, beta, initial, normalize) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """out and the last state; arguments as in `capture.delta_rule`."""
    library = _of_library().get(decay.dim()) if query.is_cuda else None
    if library is None:
        return by_operators(query, key, value, decay, beta, initial, normalize)
    dense = (x.contiguous() for x in (query, key, value, decay, beta))
    return library(*dense, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=normalize)


def delta_rule_backward(grad_out, query, key, value, decay, beta, initial, normalize) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """The gradients of query, key, value, decay and beta."""
    with autograd():
        query, key, value, decay, beta = operands = [x.detach().requires_grad_() for x in (query, key, value, decay, beta)]
        out, _ = delta_rule(query, key, value, decay, beta, initial, normalize)
        gradients = torch.autograd.grad(out, operands, grad_out)
    return tuple(x.contiguous() for x in gradients)


for _device in ("CPU", "CUDA"):
    torch.library.impl("autoshard::delta_rule", _device, delta_rule)
    torch.library.impl("autoshard::delta_rule_backward", _device, delta_rule_backward)

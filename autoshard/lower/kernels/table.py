"""The table of kernels: which ops have a local program that is not the op itself on local tensors, and for which layouts.

A row of KERNELS looks at the op's layouts (ShardedOp) and returns its kernel, or None where the plain op is right; every op that draws
random numbers has one. A kernel is a generator (collectives.py) that computes the local outputs; its arguments come by the names of the
op's schema, with local tensors.

Ops whose kernel depends on the device, as torch 2.13 has them (`autoshard doctor MODEL --device cuda` looks them all up):

    attention                          one op, kernels by device, dtype, mask and head dim: attention.py;
                                       over a sharded sequence: attention_over_sequence.py
    layer norm, group norm, RMS norm   one op everywhere, on dense tensors: norms.py
    batch norm, log_sigmoid            one op everywhere; what a device's kernel leaves out is filled in: run.py
    bags of embeddings                 the same; their backward finds the bag of each index itself where the forward left it out
    gated delta rule                   flash-linear-attention's on CUDA where it is installed, else plain ops: delta_rule.py
    grouped matmul                     float32, float16, bfloat16 on CPU and CUDA; rows are padded to 16 bytes: experts.py
    recurrent layers                   an LSTM is captured as mkldnn_rnn_layer, and is torch.lstm on other devices: recurrent.py; a GRU
                                       and an RNN are plain ops everywhere
    mkldnn_*, _cudnn_*, miopen_*       the library's device only: captures have none but the LSTM's
    random ops                         drawn by the device's own generator, as torch draws them on one device: random.py; dropout inside
                                       attention, which then is matmuls and softmax: random.py
"""

from collections.abc import Callable
from typing import Any

from autoshard.capture import REORDER, reorder
from autoshard.graph import Op
from autoshard.layout import Layout
from autoshard.lower.kernels import (  # noqa: F401  (delta_rule, offload: their operators)
    attention,
    attention_over_sequence,
    chunked_loss,
    delta_rule,
    expert_parallel,
    experts,
    lookups,
    losses,
    norms,
    offload,
    random,
    recurrent,
    strides,
    sums,
)
from autoshard.lower.kernels.sharded_op import Kernel, ShardedOp
from autoshard.lower.literals import by_name, overload
from autoshard.mesh import Mesh

MODULES = (
    attention, attention_over_sequence, chunked_loss, expert_parallel, experts, lookups, losses, norms, random, recurrent, strides, sums,
)  # fmt: skip
KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    target: choose for module in MODULES for target, choose in getattr(module, "KERNELS", {}).items()
}
# Functions that run in place of an operator: they choose the kernel for the device, or arrange what a kernel needs.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    target: function for module in MODULES for target, function in getattr(module, "FUNCTIONS", {}).items()
} | {str(REORDER): reorder}


def function_of(target: str) -> Callable[..., Any]:
    return FUNCTIONS[target] if target in FUNCTIONS else overload(target)


def kernel_for(
    op: Op, shapes: tuple[tuple[int, ...], ...], inputs: tuple[Layout, ...], outputs: tuple[Layout | None, ...], mesh: Mesh
) -> Kernel | None:
    """The local program of an op with these layouts; None when it is the op itself. ValueError when there is none.

    shapes: global shapes of the inputs.
    """
    choose = KERNELS.get(op.target, random.kernel_of)
    return choose(ShardedOp(op, by_name(op), shapes, inputs, outputs, mesh))

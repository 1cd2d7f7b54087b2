"""Ops that draw random numbers, by how many they draw. The capture marks them with the kind RANDOM, and the order in which they draw."""

from autoshard.graph.records import Op, Tensor

RANDOM = "random"  # the kind of an op
ORDER = "order"  # a literal beside an operator's own: the dims of what is drawn, from the slowest to the fastest in memory; else row-major

FACTORIES = frozenset({"aten.rand.default", "aten.randn.default", "aten.randint.default", "aten.randint.low", "aten.normal.float_float"})
SHAPED = frozenset({  # they read the shape of their first input, and no value of it
    "aten.rand_like.default", "aten.randn_like.default", "aten.randint_like.default", "aten.randint_like.low_dtype",
    "aten.randint_like.Tensor", "aten.bernoulli.p", "aten.bernoulli.Tensor", "aten.normal_functional.default", "aten.uniform.default",
    "aten.exponential.default", "aten.cauchy.default", "aten.log_normal.default", "aten.geometric.default", "aten.random.default",
    "aten.random.from", "aten.random.to",
})  # fmt: skip
FROM_VALUES = frozenset({  # the values of their inputs are parameters of each element's distribution
    "aten.bernoulli.default", "aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor",
    "aten.native_dropout.default",
})  # fmt: skip
AS_VALUES_ASK = frozenset({  # how often they draw depends on the values
    "aten.rrelu_with_noise_functional.default", "aten.poisson.default", "aten._standard_gamma.default", "aten.binomial.default",
})  # fmt: skip
DROPOUT_ATTENTION = "autoshard.dropout_attention.default"
IN_FULL = 1 << 24  # elements that every rank draws, at most; 64 MB of float32 while the op runs
PER_ELEMENT = FACTORIES | SHAPED | FROM_VALUES | AS_VALUES_ASK


def is_random(op: Op) -> bool:
    return op.kind == RANDOM


def drawn_by(op: Op) -> Tensor:
    """The tensor whose elements a random op draws."""
    drawn = op.outputs[2] if op.target == DROPOUT_ATTENTION else op.output
    assert drawn is not None
    return drawn


def is_drawn_in_full(op: Op) -> bool:
    """Whether each rank draws all of the tensor to keep its shard of it. Otherwise the shard is drawn alone (`lower.kernels.random`)."""
    return (op.target in PER_ELEMENT - AS_VALUES_ASK or op.target == DROPOUT_ATTENTION) and drawn_by(op).numel <= IN_FULL

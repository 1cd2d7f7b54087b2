"""Masks of numbers alone are known in a capture: attention that is causal, or sees all, has none, and any other keeps its own."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.capture import capture, known_masks

T = 12


def places():
    return torch.arange(T)[:, None], torch.arange(T)[None, :]


def windowed(x):
    t, s = places()
    return (s <= t) & (t - s < 4)


def packed(x, each=6):
    t, s = places()
    return (s <= t) & (t // each == s // each)


MASKS = {  # what a mask says, and how models write it
    "tril": ("causal", lambda x: torch.ones(T, T, dtype=torch.bool).tril()),
    "triu of -inf": ("causal", lambda x: torch.full((T, T), -math.inf).triu(1)),
    "triu of the least float": ("causal", lambda x: torch.full((T, T), torch.finfo(torch.float32).min).triu(1)),
    "s <= t": ("causal", lambda x: operator.le(*reversed(places()))),
    "t >= s": ("causal", lambda x: operator.ge(*places())),
    "s < t + 1, by batch": ("causal", lambda x: (places()[1] < places()[0] + 1).expand(len(x), 1, T, T)),
    "one packed sequence": ("causal", lambda x: packed(x, T)[None, None]),
    "zeros where s <= t": ("causal", lambda x: torch.where(places()[1] <= places()[0], torch.zeros(T, T), torch.full((T, T), -math.inf))),
    "filled where s > t": ("causal", lambda x: torch.zeros(T, T).masked_fill(~(places()[1] <= places()[0]), -math.inf)),
    "ones": ("all", lambda x: torch.ones(len(x), 1, T, T, dtype=torch.bool)),
    "t >= 0": ("all", lambda x: (places()[0] >= 0)[None, None].expand(len(x), -1, T, T)),
    "zeros": ("all", lambda x: torch.zeros(T, T)),
    "a window": ("else", windowed),
    "packed sequences": ("else", packed),
    "one more": ("else", lambda x: places()[1] <= places()[0] + 1),
    "one less": ("else", lambda x: (places()[1] < places()[0]) | (places()[0] == 0)),
    "slopes": ("else", lambda x: -0.1 * places()[1].float().expand(T, T)),
    "of a broadcast dim": ("else", lambda x: torch.ones(1, T).expand(T, T).cumsum(0) > 3),
    "the inputs'": ("else", lambda x: (x.sum(-1) > 0)[:, None, None, :].expand(-1, -1, T, -1)),
    "drawn": ("else", lambda x: torch.rand(T, T) > -1),
}


class Attends(nn.Module):
    def __init__(self, mask, dropout=0.0):
        super().__init__()
        self.qkv, self.mask, self.dropout = nn.Linear(8, 24), mask, dropout

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask(x), self.dropout).sum()


def found(mask, training=True, dropout=0.0):
    """Of a captured attention, and of its backward: whether it has a mask, and whether it is causal."""
    ops = capture(Attends(mask, dropout), (torch.zeros(2, T, 8),), training=training).ops
    kinds = []
    for op in ops:
        if "attention" in op.target:
            schema = getattr(torch.ops.autoshard, op.target.split(".")[1]).default._schema
            said = dict(zip([argument.name for argument in schema.arguments], op.literals[0], strict=False))
            kinds.append("else" if said["attn_mask"] is not None else "causal" if said["is_causal"] else "all")
    assert len(kinds) == 1 + training and len(set(kinds)) == 1
    return kinds[0]


SETTINGS = [(True, 0.0), (True, 0.2), (False, 0.0)]
SLOW = {(name, *one) for k, name in enumerate(MASKS) if k % 3 for one in SETTINGS[1:]}  # what a mask says is found alike in all


@pytest.mark.parametrize(("name", "training", "dropout"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for name in MASKS for one in SETTINGS for case in [(name, *one)]
])  # fmt: skip
def test_a_mask_is_known_where_no_input_is_in_it(name, training, dropout):
    said, mask = MASKS[name]
    assert found(mask, training, dropout) == said


COMPARED = st.tuples(st.sampled_from([operator.le, operator.lt, operator.ge, operator.gt, operator.eq]), st.booleans(),
                     st.integers(-2, 2), st.sampled_from([-1, 0, 1, 2]), st.sampled_from([-1, 0, 1, 2]),
                     st.sampled_from([torch.int64, torch.uint8, torch.float32]))  # fmt: skip


def check_comparisons(parts) -> None:
    def mask(x):
        allowed = None
        for compare, swapped, offset, of_t, of_s, dtype in parts:
            t, s = places()
            one, other = (s * of_s, t * of_t + offset) if swapped else (t * of_t + offset, s * of_s)
            compared = compare(one.to(dtype), other.to(dtype))
            allowed = compared if allowed is None else allowed & compared
        return allowed

    said, now = found(mask, training=False), mask(None)
    if said != "else":
        assert bool((now == (torch.ones(T, T, dtype=torch.bool).tril() if said == "causal" else True)).all())


@settings(max_examples=6)
@given(st.lists(COMPARED, min_size=1, max_size=3))
def test_comparisons_of_rows_and_columns_are_never_mistaken(parts):
    check_comparisons(parts)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(COMPARED, min_size=1, max_size=3))
def test_many_comparisons_of_rows_and_columns_are_never_mistaken(parts):
    check_comparisons(parts)


def test_masks_are_known_whatever_the_default_device():
    with torch.device("meta"):
        assert found(MASKS["triu of -inf"][1], training=False) == "causal"


@pytest.mark.parametrize("use_cache", [True, False])  # without a cache it looks for packed sequences, too
@pytest.mark.parametrize("tokens", [pytest.param(40, marks=pytest.mark.slow), 100_000])
def test_a_model_of_transformers_has_no_mask_however_long_the_sequence(use_cache, tokens):
    """Masks of 100,000 tokens would have 20 GB."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8, max_position_embeddings=200_000,
        use_cache=use_cache,
    )  # fmt: skip
    with torch.device("meta"):
        ids, module = torch.zeros(2, tokens, dtype=torch.long), transformers.LlamaForCausalLM(config)
    for training in (False, True):
        ops = capture(module, {"input_ids": ids, **({"labels": ids} if training else {})}, training=training).ops
        assert [op.literals[0][3:5] for op in ops if op.target == "autoshard.attention.default"] == [(None, True)]
        assert not any(out is not None and out.shape[-2:] == (tokens, tokens) for op in ops for out in op.outputs)


def test_the_mask_of_every_layer_is_looked_at_once(monkeypatch):
    looked: list = []
    monkeypatch.setattr(known_masks, "_said_by", lambda nodes: looked.append(nodes) or said_by(nodes))
    capture(nn.Sequential(*[Squared(windowed) for _ in range(3)], Attends(windowed)), (torch.zeros(2, T, 8),), training=True)
    assert len(looked) == 1


class Squared(Attends):
    def forward(self, x):
        return x * super().forward(x)


said_by = known_masks._said_by

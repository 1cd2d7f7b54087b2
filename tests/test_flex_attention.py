"""flex_attention is captured as plain attention: it computes what torch's own does, sharded over batch and heads, and trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import autoshard
from autoshard.capture import capture, capture_fx
from autoshard.capture.replaced import attend, flex_as_attention
from autoshard.layout import text
from autoshard.strategies import candidates
from tests.helpers import fast_mesh
from tests.helpers_models import losses_of, parallel, right_plan
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused

B, H, T, D = 4, 4, 16, 8
g = torch.Generator().manual_seed(0)
LENGTHS, DOCUMENTS, SLOPES = (
    torch.tensor([16, 5, 9, 1]),
    torch.arange(T).div(5, rounding_mode="floor").repeat(B, 1),
    torch.rand(H, generator=g),
)


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 5)


def padded(b, h, i, j):
    return j < LENGTHS[b]


def documents(b, h, i, j):
    return (DOCUMENTS[b, i] == DOCUMENTS[b][j]) & (i >= j)


def by_head(b, h, i, j):
    return (h % 2 == 0) | (i >= j)


def alibi(score, b, h, i, j):
    return score + SLOPES[h] * (j - i)


def softcap(score, b, h, i, j):
    return 10 * torch.tanh(score / 10)


def blocks_of(mask, batch=None, heads=None):
    return create_block_mask(mask, batch, heads, T, T, device="cpu", BLOCK_SIZE=4)


def blocks_alone():
    """The first two blocks of keys for each block of queries, without a function."""
    number, indices = torch.full((1, 1, 4), 2, dtype=torch.int32), torch.arange(4, dtype=torch.int32).repeat(1, 1, 4, 1)
    return BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=4)


def empty_rows(b, h, i, j):
    return i < j


CASES = {
    "plain": (None, None),
    "causal": (lambda: blocks_of(causal), None),
    "window": (lambda: blocks_of(window), None),
    "padded": (lambda: blocks_of(padded, B), None),
    "documents": (lambda: blocks_of(documents, B), None),
    "by head": (lambda: blocks_of(by_head, None, H), None),
    "rows without a key": (lambda: blocks_of(empty_rows), None),
    "blocks alone": (blocks_alone, None),
    "alibi": (None, alibi),
    "softcap, causal": (lambda: blocks_of(causal), softcap),
    "alibi, rows without a key": (lambda: blocks_of(empty_rows), alibi),
}


class Flex(nn.Module):
    """inside: the block mask is made in the forward."""

    def __init__(self, name, groups=H, inside=False):
        super().__init__()
        torch.manual_seed(0)
        mask, self.score = CASES[name]
        self.q, self.kv = nn.Linear(H * D, H * D), nn.Linear(H * D, 2 * groups * D)
        self.make, self.mask = mask if inside else None, mask() if mask and not inside else None
        self.groups = groups

    def forward(self, x):
        q = self.q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k, v = (part.unflatten(-1, (self.groups, D)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        mask = self.make() if self.make else self.mask
        y = flex_attention(q, k, v, self.score, mask, enable_gqa=self.groups != H)
        return y.pow(2).mean() if self.training else y


X = (torch.randn(B, T, H * D, generator=g),)


@pytest.mark.parametrize("groups", [H, 2])
@pytest.mark.parametrize("name", [name for name in CASES if name != "blocks alone"])
def test_it_computes_what_torchs_own_does(name, groups):
    mask, score = CASES[name]
    q, (k, v) = torch.randn(B, H, T, D, generator=g), (torch.randn(B, groups, T, D, generator=g) for _ in range(2))
    mask = mask and mask()
    with torch.compiler.set_stance("force_eager"):
        expected = flex_attention(q, k, v, score, mask, scale=0.3, enable_gqa=groups != H)
    torch.testing.assert_close(attend(q, k, v, score, mask, 0.3, groups != H), expected, atol=1e-5, rtol=1e-5)


def test_blocks_without_a_function_are_the_mask():
    """torch's kernels leave out other blocks; its reference without a kernel ignores them."""
    q = torch.randn(B, H, T, D, generator=g)
    mask = (torch.arange(T) < 8).expand(T, T)
    torch.testing.assert_close(attend(q, q, q, None, blocks_alone(), None, False), F.scaled_dot_product_attention(q, q, q, mask))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window", {}),
        ("softcap, causal", {}),
        pytest.param("causal", {"inside": True}, marks=pytest.mark.slow),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in CASES if name not in ("window", "softcap, causal")),
        *(pytest.param(name, {"groups": 2}, marks=pytest.mark.slow) for name in ("causal", "softcap, causal", "padded")),
    ],
)
def test_it_is_planned_and_right_in_random_layouts(name, options, training):
    model = Flex(name, **options).train(training)
    assert not right_plan(model, X, fast_mesh((2, 2)), training=training, random=2, fault=True).replicated_ops


def test_a_block_mask_is_attention_with_a_mask_that_is_sharded_with_batch_and_heads():
    graph = capture(Flex("by head").eval(), X, training=False)
    (i,) = [i for i, op in enumerate(graph.ops) if op.target == "autoshard.attention.default"]
    assert graph.tensor(graph.ops[i].inputs[3]).shape == (1, H, T, T)
    layouts = {tuple(map(text, c.inputs)) for c in candidates(graph, fast_mesh((2, 2))).of[i]}
    assert ("S(0),S(1)", "S(0),S(1)", "S(0),S(1)", "R,S(1)") in layouts  # queries, keys, values and mask


def trained(rank, model, solution=None):
    module = parallel(model, solution)
    return losses_of(module, torch.optim.SGD(module.parameters(), 0.5), [X] * 3)


def test_ranks_train_as_one_process():
    model = Flex("window", groups=2).train()
    solution = autoshard.plan(model, X, fast_mesh((2,)), training=True, baselines=False, objective="serial")
    with flex_as_attention():  # torch's own has no backward on the CPU
        expected = trained(0, Flex("window", groups=2).train())
    assert expected[2] < expected[0]
    for losses in results(2, trained, model, solution):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_what_is_not_captured_is_refused_and_torchs_own_comes_back():
    class Returning(Flex):
        def forward(self, x):
            q = x.unflatten(-1, (H, D)).transpose(1, 2)
            return flex_attention(q, q, q, return_lse=True)[1]

    code = flex_attention.__code__
    assert_refused("which are not captured: leave out return_lse and return_aux", capture, Returning("plain"), X, training=False)
    assert flex_attention.__code__ is code
    with torch.no_grad(), pytest.raises(ValueError, match="the program calls flex_attention.*give the module itself"):
        capture_fx(torch.export.export(Flex("plain").eval().requires_grad_(False), X))

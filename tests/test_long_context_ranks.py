"""Plans that shard the sequence on real gloo ranks: losses as in one process, blocks of keys sent as planned."""

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture import capture
from autoshard.lower.unsharded import materialized
from models import llama
from tests.helpers_models import full, losses_of, parallel
from tests.helpers_ranks import results
from tests.test_long_context import every_sequence_is_long, scheme, scheme_of  # noqa: F401 - a fixture

STEPS = 3
c10d = torch.ops._c10d_functional


def build():
    return materialized(llama.tiny(batch=1, layers=1)[0], 0)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 128, (1, 16), generator=generator) for _ in range(2))


class Sent(TorchDispatchMode):
    """Counts the messages of rings: all_to_all whose input goes to one rank."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is c10d.all_to_all_single.default and sum(args[2]) == 1:
            self.count["permute"] += 1
        elif func is c10d.all_to_all_single.default:
            self.count["all_to_all"] += 1
        return func(*args, **(kwargs or {}))


def train(rank, solution):
    module, losses = parallel(build(), solution), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    with Sent() as sent:
        for step in range(STEPS):
            sent.count.clear()  # of the first step, in which the module is traced, too
            losses += losses_of(module, optimizer, [tokens(step)])
    return losses, dict(sent.count)


@pytest.mark.parametrize(
    ("mode", "shape", "head_tail", "messages"),
    [
        ("ring", (2,), True, 1 + 3),  # forward: a block; backward: a block, and gradients twice
        pytest.param("ring", (4,), True, 3 + 7, marks=pytest.mark.slow),
        pytest.param("ring", (4,), False, 3 + 7, marks=pytest.mark.slow),
        # the inner ring runs in both steps of the outer one; outer messages 1 and 3
        pytest.param("ring", (2, 2), True, 1 + 2 + 3 + 2 * 3, marks=pytest.mark.slow),
        pytest.param("gather", (2, 2), True, 0, marks=pytest.mark.slow),
        pytest.param("ulysses", (4,), True, 0, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_process_does(mode, shape, head_tail, messages):
    solution = scheme("llama", mode, shape, head_tail)
    world = torch.Size(shape).numel()
    expected, _ = results(1, train, None)[0]
    for losses, sent in results(world, train, solution):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert min(messages, 1) <= sent.get("permute", 0) <= messages  # small ones are joined to buckets
        assert sent.get("all_to_all") or mode != "ulysses"


# -- every way to shard a sequence x order x layers x mask x grouped heads x mesh --------------------------------------------------------


class Layers(nn.Module):
    """Attention with residuals, several times over, and a mean loss."""

    def __init__(self, layers, causal, key_heads, width=16, heads=4):
        super().__init__()
        self.causal, self.split = causal, (width, width // heads * key_heads, width // heads * key_heads)
        self.embed, self.heads = nn.Embedding(32, width), heads
        self.qkv = nn.ModuleList(nn.Linear(width, sum(self.split)) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = (y.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for y in qkv(x).split(self.split, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])
            x = x + out(y.transpose(1, 2).flatten(2)).tanh()
        logits = x @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layers_of(layers, causal, key_heads):
    torch.manual_seed(layers)
    return Layers(layers, causal, key_heads).double()


@cache
def graph_of(*of):
    return capture(layers_of(*of), tuple(torch.zeros(1, 16, dtype=torch.int64) for _ in range(2)), training=True)


def stepped(module):
    """The loss in inference, the loss and the gradients of a step in training."""
    inputs = tuple(torch.randint(0, 32, (1, 16), generator=torch.Generator().manual_seed(k)) for k in range(2))
    with torch.no_grad():
        values = [full(module(*inputs))]
    loss = module(*inputs)
    loss.backward()
    return [*values, full(loss.detach()), *(full(p.grad) for p in module.parameters())]


def errors_of_all(rank, cases):
    """The largest difference from one process of each case, or its error, on one rank."""
    found = []
    for of, solution in cases:
        expected = stepped(layers_of(*of))
        sharded = stepped(parallel(layers_of(*of), solution))
        found.append(max(float((a - b).abs().max()) for a, b in zip(sharded, expected, strict=True)))
    return found


MODES, LAYERS, SHAPES = ("ring", "gather", "ulysses"), (1, 2, 3, 4), ((2,), (4,), (2, 2))
ORDERS = [(False, False), (True, False), (True, True)]  # causal, in head-tail order (which only causal attention has)
SLOW = [(shape, [(*case, key_heads) for key_heads in (4, 2)]) for shape, *case in product(SHAPES, MODES, ORDERS, LAYERS)]


@pytest.mark.parametrize(
    ("shape", "cases"), [((2,), [("ring", (True, False), 2, 2)]), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_every_sharded_sequence_computes_what_one_process_does(shape, cases):
    plans = []
    for mode, (causal, head_tail), layers, key_heads in cases:
        of = layers, causal, key_heads
        plans.append((of, scheme_of(graph_of(*of), mode, shape, head_tail)))
        assert any("S(2)" in p.inputs[0] or mode == "ulysses" for name, p in plans[-1][1].layouts.items() if name.startswith("attention"))
    for errors in results(torch.Size(shape).numel(), errors_of_all, plans):
        assert len(errors) == len(cases) and max(errors) < 1e-12, dict(zip(cases, errors))

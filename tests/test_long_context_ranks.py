"""Plans that shard the sequence on real gloo ranks: losses as in one process, blocks of keys sent as planned."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.lower.unsharded import materialized
from models import llama
from tests.helpers_ranks import results
from tests.test_long_context import every_sequence_is_long, scheme  # noqa: F401 - a fixture

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


def train(rank, solution, shape):
    module = build()
    if solution is not None:
        module = autoshard.parallelize(module, solution, init_device_mesh("cpu", shape))
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False), []
    with Sent() as sent:
        for step in range(STEPS):
            sent.count.clear()  # of the first step, in which the module is traced, too
            loss = module(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(pytree.tree_map(float, loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
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
    expected, _ = results(1, train, None, ())[0]
    for losses, sent in results(world, train, solution, shape):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert min(messages, 1) <= sent.get("permute", 0) <= messages  # small ones are joined to buckets
        assert sent.get("all_to_all") or mode != "ulysses"

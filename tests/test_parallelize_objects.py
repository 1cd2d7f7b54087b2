"""Objects that hold tensors (caches) and inputs that a forward writes into, on real ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture.nested_tensors import filled, listed, state_of, tensors_of
from tests.helpers import fast_mesh
from tests.helpers_ranks import results


class Cache:
    """A tensor that is written in place, and a number that the program depends on."""

    def __init__(self):
        self.rows, self.scale = [torch.zeros(4, 6, 8)], 1.0


class Decode(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cache):
        cache.rows[0][:, 2:3] = self.linear(x) * cache.scale
        return cache.rows[0].sum(1)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, total):
        total.add_(self.linear(x))
        return total.relu()


def cached():
    torch.manual_seed(0)
    return Decode(), (torch.randn(4, 1, 8), Cache())


def planned(model, inputs, pins):
    return autoshard.plan(model, inputs, fast_mesh((2,)), training=False, baselines=False, pins=pins)


def steps(module, cache):
    """Two calls that write into one cache; before the second its number changes."""
    made = []
    for k in range(2):
        with torch.no_grad():
            y = module(torch.full((4, 1, 8), k + 1.0), cache)
        made += [getattr(y, "full_tensor", lambda y=y: y)().clone(), cache.rows[0].clone()]
        cache.scale = 2.0
    return made


def used(rank, model, inputs, solution):
    return steps(autoshard.parallelize(model, solution, init_device_mesh("cpu", (2,))), inputs[1])


@pytest.mark.parametrize("pin", ["S(0)", "S(2)", "R"])
def test_a_cache_is_an_input_and_holds_what_was_written(pin):
    model, inputs = cached()
    expected = steps(copy.deepcopy(model), copy.deepcopy(inputs[1]))
    for made in results(2, used, model, inputs, planned(model, inputs, {"input_1": pin})):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(made, expected, strict=True))


def written(rank, model, solution, totals):
    module = autoshard.parallelize(model, solution, init_device_mesh("cpu", (2,)))
    x = torch.ones(4, 8)
    sharded = module.shard_inputs((x, totals.clone()))  # DTensors
    with torch.no_grad():
        module(x, totals)
        module(*sharded)
    return totals, sharded[1].full_tensor()


@pytest.mark.parametrize("pin", ["S(0)", "S(1)", "R"])
def test_an_input_that_the_forward_writes_into_is_written_on_every_rank(pin):
    model, totals = Writing(), torch.zeros(4, 8)
    expected = model.linear(torch.ones(4, 8)).detach()
    for plain, sharded in results(2, written, model, planned(model, (torch.ones(4, 8), totals), {"input_1": pin}), totals):
        assert torch.allclose(plain, expected, atol=1e-6) and torch.allclose(sharded, expected, atol=1e-6)


def test_what_an_object_holds_beside_tensors_is_part_of_the_kind_of_a_call():
    one, other = Cache(), Cache()
    other.rows[0] += 1
    assert state_of((one,)) == state_of((other,)) != ()
    other.scale = 2.0
    assert state_of((one,)) != state_of((other,))
    assert state_of((torch.ones(2), 3, "x")) == ()


def test_inputs_are_filled_with_what_lists_hold():
    inputs = {"x": torch.ones(2), "cache": Cache(), "flag": True}
    lists = listed(inputs)
    new = {"x": torch.zeros(2), "cache": [torch.ones(4, 6, 8)], "flag": True}
    made = filled(inputs, new)
    assert lists["cache"][0] is inputs["cache"].rows[0]
    assert made["x"] is new["x"] and made["cache"].rows[0] is new["cache"][0] and made["cache"] is not inputs["cache"]
    assert [t.sum() for t in tensors_of(inputs["cache"])] == [0]

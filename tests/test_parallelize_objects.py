"""What a forward reads beside parameters, buffers and plain inputs, on real ranks: objects that hold tensors (caches), inputs that it
writes into, other tensors; and models whose parts are in different modes."""

import copy

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import capture
from autoshard.capture.nested_tensors import filled, listed, state_of, tensors_of
from tests.helpers import fast_mesh
from tests.helpers_models import Model, full, gradients_of, parallel, right_plan, said
from tests.helpers_ranks import results


class Cache:
    """A tensor that is written in place, and a number that the program depends on."""

    def __init__(self):
        self.rows, self.scale = [torch.zeros(4, 6, 8)], 1.0


def decode(m, x, cache):
    cache.rows[0][:, 2:3] = m.linear(x) * cache.scale
    return cache.rows[0].sum(1)


def writing(m, x, total):
    total.add_(m.linear(x))
    return total.relu()


def cached():
    torch.manual_seed(0)
    return Model(decode, linear=nn.Linear(8, 8)), (torch.randn(4, 1, 8), Cache())


def planned(model, inputs, pins):
    return autoshard.plan(model, inputs, fast_mesh((2,)), training=False, baselines=False, objective="serial", pins=pins)


def steps(module, cache):
    """Two calls that write into one cache; before the second its number changes."""
    made = []
    for k in range(2):
        with torch.no_grad():
            y = module(torch.full((4, 1, 8), k + 1.0), cache)
        made += [full(y).clone(), cache.rows[0].clone()]
        cache.scale = 2.0
    return made


def used(rank, solutions):
    model, inputs = cached()
    return [steps(parallel(model, solution), copy.deepcopy(inputs[1])) for solution in solutions]


def test_a_cache_is_an_input_and_holds_what_was_written():
    model, inputs = cached()
    expected = steps(copy.deepcopy(model), copy.deepcopy(inputs[1]))
    for made in results(2, used, [planned(model, inputs, {"input_1": pin}) for pin in ("S(0)", "S(2)")]):
        assert all(torch.allclose(a, b, atol=1e-6) for one in made for a, b in zip(one, expected, strict=True))


def written(rank, model, solutions):
    x, made = torch.ones(4, 8), []
    for solution in solutions:
        module, totals = parallel(model, solution), torch.zeros(4, 8)
        sharded = module.shard_inputs((x, totals.clone()))  # DTensors
        with torch.no_grad():
            module(x, totals)
            module(*sharded)
        made += [totals, sharded[1].full_tensor()]
    return made


def test_an_input_that_the_forward_writes_into_is_written_on_every_rank():
    model, inputs = Model(writing, linear=nn.Linear(8, 8)), (torch.ones(4, 8), torch.zeros(4, 8))
    expected = model.linear(inputs[0]).detach()
    for made in results(2, written, model, [planned(model, inputs, {"input_1": pin}) for pin in ("S(0)", "S(1)", "R")]):
        assert all(torch.allclose(x, expected, atol=1e-6) for x in made)


def test_what_an_object_holds_beside_tensors_is_part_of_the_kind_of_a_call():
    one, other = Cache(), Cache()
    other.rows[0] += 1
    assert state_of((one,)) == state_of((other,)) != ()
    other.scale = 2.0
    assert state_of((one,)) != state_of((other,))
    assert state_of((torch.ones(2), 3, "x")) == ()
    long = [torch.zeros(2000).numpy() for _ in range(3)]
    long[1][1000] = 1.0  # which its repr leaves out
    assert state_of((long[0],)) == state_of((long[2],)) != state_of((long[1],))


def test_inputs_are_filled_with_what_lists_hold():
    inputs = {"x": torch.ones(2), "cache": Cache(), "flag": True}
    lists = listed(inputs)
    new = {"x": torch.zeros(2), "cache": [torch.ones(4, 6, 8)], "flag": True}
    made = filled(inputs, new)
    assert lists["cache"][0] is inputs["cache"].rows[0]
    assert made["x"] is new["x"] and made["cache"].rows[0] is new["cache"][0] and made["cache"] is not inputs["cache"]
    assert [t.sum() for t in tensors_of(inputs["cache"])] == [0]


# -- tensors beside parameters, buffers and inputs; parts in different modes ---------------------------------------------------------

SHARED = torch.arange(8.0)


def literal(m):
    return torch.tensor([1.0, 2.0] * 4)


def attribute(m):
    return m.attribute


def in_a_list(m):
    return m.listed[0]


def of_the_module(m):
    return SHARED + m.attribute * SHARED


KINDS = (literal, attribute, in_a_list, of_the_module)


def build(scale):
    torch.manual_seed(0)
    return of(lambda m, x: (m.linear(x) * scale(m)).square().sum(-1).mean(-1)), (torch.randn(4, 6, 8),)


def of(forward):
    model = Model(forward, linear=nn.Linear(8, 8), listed=[torch.arange(8.0) ** 2])
    model.attribute = torch.arange(8.0) - 3
    return model


def gradients(module, inputs, training):
    with torch.set_grad_enabled(training):
        y = module(*inputs)
    if training:
        y.sum().backward()
    return {"y": full(y).detach(), **gradients_of(module)}


def differentiated(rank, model, inputs, solution, training):
    return gradients(parallel(model, solution), inputs, training)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_that_is_no_buffer_is_read_on_every_rank(kind, training):
    model, inputs = build(kind)
    asked = {"training": training, "baselines": False, "objective": "serial"}
    solution = autoshard.plan(model, inputs, fast_mesh((2,)), pins={"linear.weight": "S(0)"}, **asked)
    found = results(2, differentiated, model, inputs, solution, training)
    expected = results(1, lambda rank: gradients(copy.deepcopy(model), inputs, training))[0]
    for made in found:
        assert made.keys() == expected.keys()
        assert all(torch.allclose(made[name], x, rtol=1e-5, atol=1e-6) for name, x in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_in_verify_too_and_is_one_tensor_of_the_program(kind):
    model, inputs = build(kind)
    graph = capture(model, inputs, training=True)
    read = [op.name for i, op in enumerate(graph.ops) if op.kind == "buffer" and (i, 0) in graph.users]
    assert len(read) == (2 if kind is of_the_module else 1)
    right_plan(model, inputs, fast_mesh((2,)), training=True, random=1, fault=True)


def counting(m, x):
    m.attribute.add_(1)
    return (m.linear(x) + m.attribute).square().mean()


@pytest.mark.parametrize("training", [False, True])
def test_one_that_the_forward_writes_into_is_refused(training):
    with pytest.raises(ValueError, match=r"writes into .*attribute.* no buffer .*register_buffer"):
        capture(of(counting), (torch.randn(4, 6, 8),), training=training)


def frozen():
    """As in fine-tuning: the model trains, its batch norm does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 4 * 4, 4)).train()
    model[1].eval()
    model[2].eval()
    return model, (torch.randn(4, 3, 6, 6),)


def test_parts_keep_the_modes_that_they_were_planned_in():
    model, inputs = frozen()
    solution = autoshard.plan(model, inputs, fast_mesh((2,)), training=True, baselines=False, objective="serial")
    found = results(2, differentiated, model, inputs, solution, True)
    expected = results(1, lambda rank: gradients(copy.deepcopy(model), inputs, True))[0]
    assert all(torch.allclose(made[name], x, rtol=1e-4, atol=1e-5) for made in found for name, x in expected.items())


def evaluated_in_parts(rank, model, x, solution):
    """What the module gives in eval mode, with its norm and dropouts alone in eval mode, and with one dropout left in training mode."""
    module = parallel(model, solution)
    whole = full(module.eval()(x)).detach()
    module.train()
    for k in (1, 2, 3):
        module[k].eval()
    parts = full(module(x)).detach()
    module.eval()[3].train()
    return whole, parts, said(module, x)


def test_dropout_is_left_out_where_a_call_leaves_all_of_it_out():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Dropout(0.5), nn.Linear(8, 2))
    model[1].eval()
    x = torch.randn(8, 4)
    solution = autoshard.plan(model, (x,), fast_mesh((1,)), training=True, baselines=False, objective="serial")
    ((whole, parts, refused),) = results(1, evaluated_in_parts, model, x, solution)
    assert torch.allclose(whole, model.eval()(x)) and torch.equal(whole, parts)
    assert "its eval mode is not its training mode without dropout" in refused  # it dropped nothing

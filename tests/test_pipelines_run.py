"""Pipelines on gloo ranks train as the model does in one process: losses, norms of gradients, parameters, checkpoints."""

import copy
import math
import os
import time
from functools import reduce

import pytest
import torch
from helpers_pipelines import apart, as_pipeline, batch_of, dropping, in_one_process, model_of, planned, sharing, train, whole
from helpers_ranks import results, run_ranks
from torch import nn

import autoshard
from autoshard.api.running import captured_pipeline
from autoshard.runtime.pipeline_verify import DrawsOfStages
from tests.helpers_models import Model, said

LOSSES = 1e-5  # relative


def _train(rank, model, inputs, plan, steps, schedule=None):
    sharded, optimizer = as_pipeline(model, inputs, plan, schedule)
    rows = train(sharded, optimizer, inputs, range(steps))
    return rows, whole(sharded), sharded.evaluate(*batch_of(0, inputs)).item()


def _check(name, plan, layers, steps, schedule=None):
    """Four ranks against one process."""
    model, inputs = model_of(name, layers)
    expected, parameters = in_one_process(model, inputs, steps, plan.microbatches)
    found = results(4, _train, model, inputs, plan, steps, schedule)
    assert max(apart(expected, rows) for rows, *_ in found) <= LOSSES
    assert {name for _, held, _ in found for name in held} == set(parameters)
    for _, held, _ in found:
        for key, x in held.items():
            torch.testing.assert_close(x, parameters[key], rtol=1e-4, atol=1e-5)
    assert len({loss for *_, loss in found}) == 1
    return found


def test_two_stages_of_two_devices_train_as_one_process_does():
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    found = _check("gpt2", plan, 2, 3)
    tied = [held["wte.weight"] for _, held, _ in found]
    assert len(plan.stages) == 2 and all(torch.equal(tied[0], x) for x in tied)  # both stages hold the table, and their copies stay equal


def _gradients(rank):
    model, inputs, plan = sharing()
    sharded, _ = as_pipeline(model, inputs, plan)
    assert "input_0 requires a gradient, and a pipeline has none" in said(sharded.step, inputs[0].clone().requires_grad_(), inputs[1])
    loss, norms = sharded.step(*inputs), [sharded.clip_grad_norm_(math.inf, kind).item() for kind in (2.0, math.inf)]
    return loss, {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}, norms


def test_stages_share_layers_and_the_loss_alone_is_differentiated():
    model, inputs, _ = sharing()
    loss = model(*inputs)["loss"]
    expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    held, every = results(2, _gradients), torch.cat([gradient.flatten() for gradient in expected.values()])
    assert {name for _, gradients, _ in held for name in gradients} == set(expected)
    for found, gradients, norms in held:
        assert norms == pytest.approx([every.norm().item(), every.abs().max().item()], rel=1e-12)
        torch.testing.assert_close((found, gradients), (loss.detach(), {name: expected[name] for name in gradients}))


def _refused(rank, model, inputs, plan):
    messages = []
    for given, example in ((plan, inputs), (plan, None)):
        try:
            as_pipeline(model, example, given)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_pipeline_for_other_devices_is_refused_in_a_sentence():
    model, inputs = model_of("gpt2", 2)
    plan = autoshard.plan(model, inputs, autoshard.Cluster.of(1, 1), microbatches=(2,), schedules=("1f1b",), grid=False)
    for messages in results(2, _refused, model, inputs, plan):
        assert "2 ranks run, but the pipeline is for 1 devices" in messages[0]
        assert "give example_inputs" in messages[1]


def _train_all(rank, model, inputs, plan, steps, schedules):
    return [_train(rank, model, inputs, plan, steps, schedule) for schedule in schedules]


LINES = (("1f1b", ("gpipe", "1f1b", "zb_h1")), ("interleaved_1f1b", (None, "InterleavedZeroBubble")))


@pytest.mark.slow
@pytest.mark.parametrize("planned_for, schedules", LINES)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_twenty_steps_of_every_schedule(name, stages, planned_for, schedules):
    chunks = 2 if planned_for == "interleaved_1f1b" else 1
    plan = planned(name, chunks * stages, stages=stages, schedule=planned_for)
    assert plan.num_groups == stages and len(plan.stages) == chunks * stages
    model, inputs = model_of(name, chunks * stages)
    expected, parameters = in_one_process(model, inputs, 20, plan.microbatches)
    for of_rank in results(4, _train_all, model, inputs, plan, 20, schedules):
        for rows, held, _ in of_rank:
            assert apart(expected, rows) <= LOSSES
            for key, x in held.items():
                torch.testing.assert_close(x, parameters[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_schedule_from_a_file(tmp_path):
    two = planned("gpt2", 2, stages=2, microbatches=2)
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n")
    _check("gpt2", two, 2, 3, str(tmp_path / "own.csv"))


def _save(rank, model, inputs, plan, path):
    sharded, optimizer = as_pipeline(model, inputs, plan)
    first = train(sharded, optimizer, inputs, range(3))
    autoshard.save_checkpoint(path, sharded, optimizer, extra={"step": 3})
    return first + train(sharded, optimizer, inputs, range(3, 6))


def _resume(rank, model, inputs, plan, path):
    sharded, optimizer = as_pipeline(model, inputs, plan)
    begin = autoshard.load_checkpoint(path, sharded, optimizer)["step"]
    return train(sharded, optimizer, inputs, range(begin, 6))


def _resume_without(rank, model, inputs, solution, path):
    device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    sharded = autoshard.parallelize(model, solution, device_mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-3, eps=1e-6)
    autoshard.load_checkpoint(path, sharded, optimizer)
    rows = []
    for step in range(3, 6):
        loss = sharded(*batch_of(step, inputs))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.full_tensor().item()))
    return rows


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_cut_and_without_one(tmp_path):
    model, inputs = model_of("gpt2", 4)
    path = str(tmp_path / "run")
    curve = results(4, _save, model, inputs, planned("gpt2", 4, stages=2), path)[0]
    again = results(4, _resume, model, inputs, planned("gpt2", 4, stages=4), path)[0]
    assert apart(curve[3:], again) <= LOSSES
    mesh = autoshard.Mesh.from_bandwidths((2, 2))
    solution = autoshard.plan(*model_of("gpt2", 4), mesh, training=True, optimizer="adamw")
    assert apart(curve[3:], results(4, _resume_without, model, inputs, solution, path)[0]) <= LOSSES


def _one_dies(rank, model, inputs, plan):
    sharded, optimizer = as_pipeline(model, inputs, plan)
    train(sharded, optimizer, inputs, range(1))
    if rank == 3:
        os._exit(1)
    began = time.monotonic()
    try:
        train(sharded, optimizer, inputs, range(1, 100))
    except autoshard.RankLost:
        return time.monotonic() - began
    return None


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others():
    model, inputs = model_of("gpt2", 2)
    waited = run_ranks(4, _one_dies, model, inputs, planned("gpt2", 2, stages=2, microbatches=2), dies=3)
    assert all(seconds is not None and seconds < 60 for seconds in waited[:3])  # the limit that is promised


def _train_dropping(rank):
    model, inputs, plan = dropping()
    torch.manual_seed(5 + rank)
    device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    sharded = autoshard.parallelize(model, plan, device_mesh, example_inputs=inputs)
    optimizer, losses = torch.optim.SGD(sharded.parameters(), lr=0.1), []
    for _ in range(3):
        losses.append(sharded.step(*inputs).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_stages_draw_from_states_of_their_own_whatever_the_seeds_of_the_ranks():
    model, inputs, plan = dropping()
    model = copy.deepcopy(model)
    counts = [sum(op.kind == "random" for op in stage.graph.ops) for stage in captured_pipeline(model, inputs, plan).plan.stages]
    draws, optimizer, expected = DrawsOfStages(counts, 5), torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = 0.0
        for part in zip(*(x.chunk(plan.microbatches) for x in inputs)):
            with draws:
                one = model(*part) / plan.microbatches
            one.backward()
            loss += one.item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss)
    for losses in results(4, _train_dropping):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_unequal_stages_train_as_one_process_does():
    plan = planned("gpt2", 3, stages=3, microbatches=2)
    assert sorted(len(stage.devices) for stage in plan.stages) == [1, 1, 2]
    _check("gpt2", plan, 3, 2)


def partly_frozen():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))})
    model["layers"][:3].requires_grad_(False)
    return Model(lambda m, x, y: nn.functional.mse_loss(reduce(lambda x, layer: x + layer(x), m.parts["layers"], x), y), parts=model)


def _train_partly(rank, model, inputs, plan):
    sharded = autoshard.parallelize(model, plan, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), example_inputs=inputs)
    loss = sharded.step(*inputs)
    before = whole(sharded)
    assert sharded.evaluate(*inputs).item() == pytest.approx(loss.item())
    torch.testing.assert_close(whole(sharded), before)  # an evaluation is no step of the running means
    return loss, {name: p.grad.full_tensor() for name, p in sharded.named_parameters() if p.grad is not None}, before


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_stage_may_have_nothing_to_train(schedule):
    torch.manual_seed(0)
    model, inputs = partly_frozen(), (torch.randn(8, 8), torch.randn(8, 8))
    plan = autoshard.plan(model, inputs, autoshard.Cluster.of(2), microbatches=(2,), schedules=(schedule,), stages=2, grid=False)
    held = results(2, _train_partly, model, inputs, plan)
    losses = [model(*part) / 2 for part in zip(*(x.chunk(2) for x in inputs))]
    sum(losses).backward()
    expected, state = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model.state_dict()
    assert [len(gradients) for _, gradients, _ in held] == [0, len(expected)]
    for loss, gradients, kept in held:
        torch.testing.assert_close((loss, gradients), (sum(losses).detach(), {name: expected[name] for name in gradients}))
        torch.testing.assert_close(kept, {name: state[name] for name in kept})

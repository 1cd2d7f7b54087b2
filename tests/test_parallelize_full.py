"""The long form of test_parallelize.py: more models, random layouts, inductor, 30 steps. All of it is slow."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import autoshard
from autoshard.capture import capture
from autoshard.formulate import Training, formulate
from autoshard.lower.unsharded import materialized
from autoshard.planning.describe import layouts_of, results_of
from autoshard.planning.warm_starts import random_choice
from autoshard.strategies import candidates
from models import bert, gpt2, llama, moe
from tests.helpers import fast_mesh
from tests.helpers_models import gradients_of, parallel
from tests.helpers_ranks import results, trained_on
from tests.test_parallelize import TEXT, close

pytestmark = pytest.mark.slow
MODELS = {"gpt2": gpt2.tiny, "llama": llama.tiny, "bert": bert.tiny, "moe": moe.tiny}
STEPS, SAVED_AT = 30, 15


def values(name: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Inputs of a tiny model: bytes of a text and the next ones, or noise for the mixture of experts."""
    _, inputs = MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    if inputs[0].is_floating_point():
        return tuple(torch.randn(x.shape, generator=generator) for x in inputs)
    rows, length = inputs[0].shape
    begins = torch.randint(0, len(TEXT) - length - 1, (rows,), generator=generator)
    windows = torch.tensor([list(TEXT[b : b + length + 1]) for b in begins.tolist()]) % 64
    tokens, following = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    return (tokens, following) if len(inputs) == 2 else (tokens, tokens % 2, following)  # BERT's segments between them


@cache
def plans(name: str, shape: tuple[int, ...], training: bool = True) -> tuple:
    """Our plan and three random ones."""
    module, inputs = MODELS[name]()
    solution = autoshard.plan(module, inputs, fast_mesh(shape), training=training, baselines=False, objective="serial")
    graph = capture(module, inputs, training=training)
    formulated = formulate(graph, candidates(graph, solution.mesh), solution.mesh, training=Training())
    found = [solution]
    for seed in range(3):
        choice = random_choice(formulated, seed)
        layouts = layouts_of(formulated, choice)
        rows = {n: {**row, "layout": layouts[n].outputs[0]} for n, row in solution.parameters.items()}
        found.append(replace(solution, layouts=layouts, results=results_of(formulated, choice), parameters=rows))
    return tuple(found)


def gradients(rank: int, name: str, solutions: tuple) -> list[tuple[float, dict]]:
    """Loss and gradients under each plan; of the model itself without one."""
    found = []
    for solution in solutions:
        module = parallel(materialized(MODELS[name]()[0], 0), solution)
        loss = module(*values(name, 0))
        loss.backward()
        grads = gradients_of(module)
        found.append((loss.item(), grads if rank == 0 else {}))
    return found


@pytest.mark.parametrize("shape", [(2, 2), (4,)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_unsharded_ones_for_our_plan_and_random_layouts(name, shape):
    ((loss, expected),) = results(1, gradients, name, (None,))[0]
    noise = 1e-3 * max(float(g.abs().max()) for g in expected.values())  # gradients that are zero but for rounding
    for found, grads in results(4, gradients, name, plans(name, shape))[0]:
        assert found == pytest.approx(loss, rel=1e-5)
        for n, g in expected.items():
            assert float((grads[n] - g).abs().max()) <= 1e-5 * max(float(g.abs().max()), noise), n


def curve(rank: int, name: str, solution, folder: str | None, resume: bool, mode: str) -> list[float]:
    """Losses of 30 AdamW steps on text, saved half way; or from there on."""
    module = parallel(materialized(MODELS[name]()[0], 0), solution)
    run = torch.compile(module) if mode == "torch.compile" else module
    if mode == "compile":
        module.compile()
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3), []
    begin = autoshard.load_checkpoint(folder, module, optimizer)["step"] if resume else 0
    for step in range(begin, STEPS):
        if step == SAVED_AT and solution is not None and not resume:
            autoshard.save_checkpoint(folder, module, optimizer, extra={"step": step})
        losses.append(trained_on(values(name, step), run, optimizer))
    return losses


@pytest.mark.parametrize("mode", ["eager", "compile", "torch.compile"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_thirty_steps_on_2x2_and_from_the_middle_on_4x1_give_the_curve_of_one_process(tmp_path, name, mode):
    (expected,) = results(1, curve, name, None, None, False, "eager")
    assert expected[-1] < 0.9 * expected[0]
    folder = str(tmp_path / "saved")
    for losses in results(4, curve, name, plans(name, (2, 2))[0], folder, False, mode):
        assert close(losses, expected)
    for losses in results(4, curve, name, plans(name, (4, 1))[0], folder, True, mode):
        assert close(losses, expected[SAVED_AT:])

"""Plans with microbatches on real gloo ranks: losses as in one process, and the bytes that are sent and held as planned."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.api import autosharding_pass
from autoshard.capture import capture
from autoshard.cost import priced
from autoshard.layout import text
from autoshard.lower.fx_program import RankGraphs
from autoshard.lower.unsharded import materialized
from autoshard.runtime.microbatches import Microbatches, OpenStep, step_moves, with_sums
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.solution import Solution, replay
from autoshard.strategies import internal_collectives
from autoshard.torch_private import pytree
from models import gpt2, mlp
from tests.helpers_models import Held, Sent, full, gradients_of, losses_of, parallel
from tests.helpers_ranks import results

SHAPE, M, STEPS = (2, 2), 4, 20
SCHEMES = ("data_parallel", "zero1", "zero2", "zero3", "hsdp")
BUILDERS = {
    "mlp": lambda: mlp.tiny(batch=8),
    "wide": lambda: mlp.mlp(batch=128, width=512, hidden=2048),  # large enough for parameters and activations to matter
    "gpt2": lambda: gpt2.tiny(batch=4, vocab=64, layers=1),
}


@cache
def planned(name: str, scheme: str, shape: tuple[int, ...] = SHAPE) -> Solution:
    module, inputs = BUILDERS[name]()
    options = {"example_inputs": inputs, "training": True, "ilp_solution_file": None, "mesh_shape": shape}
    return autosharding_pass(module, algo=scheme, microbatches=M, **options)[1]["solution"]


def batch(name: str, step: int) -> tuple[torch.Tensor, ...]:
    """The examples of all microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(M * x.shape[0], *x.shape[1:]) for x in BUILDERS[name]()[1]]
    if name != "gpt2":
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(torch.randint(0, 64, shape, generator=generator) for shape in shapes)


def build(name: str) -> torch.nn.Module:
    return materialized(BUILDERS[name]()[0], 0)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)


def alone(rank: int, name: str, steps: int) -> list[float]:
    module = build(name)
    return losses_of(module, adamw(module), (batch(name, step) for step in range(steps)))


def step_of(module, optimizer, given) -> float:
    total = 0.0
    for inputs in module.microbatches(given):
        loss = module(*inputs) / M
        loss.backward()
        total += full(loss).item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(rank: int, name: str, solution, steps: int) -> tuple[list[float], float, float]:
    """Losses; bytes sent in a step; bytes held at most in a step, the least of three: gloo's threads release some buffers late."""
    module = parallel(build(name), solution)
    optimizer = adamw(module)
    losses = [step_of(module, optimizer, batch(name, step)) for step in range(steps)]
    with Sent(SHAPE[0]) as counted:
        step_of(module, optimizer, batch(name, 0))
    held = sum(p.to_local().numel() * p.element_size() for p in module.parameters())
    states = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, DTensor)]
    held += sum(s.to_local().numel() * s.element_size() for s in states)
    given = batch(name, 0)  # on each rank the examples of all microbatches: the plan counts its shard of one
    peaks = []
    for _ in range(3):
        with Held() as held_in_step:
            step_of(module, optimizer, given)
        peaks.append(held_in_step.peak)
    return losses, sum(counted.bytes.values()), held + min(peaks)


def planned_bytes(name: str, solution: Solution) -> float:
    """That a rank sends in a step of the plan."""
    module, inputs = BUILDERS[name]()
    formulated, choice = formulation_of_solution(replay(solution, capture(module, inputs, training=True)).checked(), solution)
    graph = formulated.graph
    routes = [(link.times, formulated.route(link, choice)) for link in formulated.tensor_edges]
    total = sum(times * step.bytes for times, route in routes for step in route.steps)
    for i, op in enumerate(graph.ops):
        inside = internal_collectives(op, graph.input_tensors(i), formulated.candidate(i, choice).inputs, formulated.mesh)
        total += M * sum(one.sent for one in priced(inside, formulated.mesh))
    return total


def test_losses_with_zero1_and_microbatches_are_those_of_one_process():
    expected = results(1, alone, "mlp", 2)[0]
    solution = planned("mlp", "zero1")
    for losses, sent, _ in results(4, train, "mlp", solution, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert sent == pytest.approx(planned_bytes("mlp", solution), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ("wide", "gpt2"))
def test_20_steps_lose_send_and_hold_as_planned(name, scheme):
    """On 4 ranks, 4 microbatches a step. The peak is measured where a plan holds many times the half megabyte that overlap may add."""
    expected, solution = results(1, alone, name, STEPS)[0], planned(name, scheme)
    ranks = results(4, train, name, solution, STEPS)
    assert ranks[0][0] == pytest.approx(expected, rel=1e-4)
    assert ranks[0][1] == pytest.approx(planned_bytes(name, solution), rel=0.05)
    if name == "wide":
        assert max(held for *_, held in ranks) == pytest.approx(solution.peak_bytes, rel=0.10)


def _misused(rank: int, solution) -> list[str]:
    """What each misuse of the loop says; whether a call outside of it is a step of its own."""
    module = parallel(build("mlp"), solution)
    optimizer, said = adamw(module), []

    def changes():
        for inputs in module.microbatches(batch("mlp", 0)):
            module(*inputs).backward()
            with torch.no_grad():
                for p in module.parameters():
                    p.to_local().add_(1.0)

    def updates():
        for inputs in module.microbatches(batch("mlp", 0)):
            module(*inputs).backward()
            with torch.no_grad():
                [p.mul_(0.9) for p in module.parameters()]  # the shard's own version stays

    def steps():
        for p in module.parameters():
            p.grad = p.detach().clone()
        for inputs in module.microbatches(batch("mlp", 0)):
            module(*inputs).backward()
            torch.optim.SGD(module.parameters(), lr=0.1, foreach=True).step()  # both versions stay

    def forgets():
        for k, inputs in enumerate(module.microbatches(batch("mlp", 0))):
            if k < M - 1:
                module(*inputs).backward()

    def splits():
        module.microbatches(tuple(x[:-1] for x in batch("mlp", 0)))

    for misuse in (changes, updates, steps, forgets, splits):
        try:
            misuse()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    one = module.shard_inputs(tuple(x[:8] for x in batch("mlp", 1)))
    optimizer.zero_grad()
    module(*one).backward()
    once = {name: grad.clone() for name, grad in gradients_of(module).items()}
    module(*one).backward()
    said.append(str(all(torch.allclose(grad, 2 * once[name]) for name, grad in gradients_of(module).items())))
    with torch.no_grad():
        said.append(str(len(list(module.microbatches(batch("mlp", 0)))) == len(module.microbatches(batch("mlp", 0))) == M))
    return said


def test_misuse_of_the_loop_is_said_and_a_call_outside_of_it_is_a_step():
    for said in results(2, _misused, planned("mlp", "zero2", (2,))):
        changed, updated, stepped, forgot, split, adds, counts = said
        assert all("was changed between two microbatches of a step" in one for one in (changed, updated, stepped))
        assert "the last microbatch had no backward()" in forgot
        assert "expected plain tensors of 4 times the planned first dim" in split
        assert (adds, counts) == ("True", "True")


def test_the_last_microbatch_of_a_step_is_known():
    assert [OpenStep(3, k).is_last for k in range(3)] == [False, False, True] and OpenStep().is_last


def test_a_step_fetches_once_adds_up_and_reduces_once_at_its_end():
    moves = SimpleNamespace(
        fetches={"w": "fetch"}, sums={"w": (2,), "v": (3,)}, reductions={"w": "reduce w", "v": "reduce v"},
        where=SimpleNamespace(zeros=torch.zeros), run=lambda move, x: ran.append(move) or x + 1,
    )  # fmt: skip
    ran, step, w, v = [], OpenStep(2), torch.ones(2, requires_grad=True), torch.ones(3)
    assert step.parameter(moves, "v", v) is v and not ran
    kept = step.parameter(moves, "w", w)
    assert kept.tolist() == [2.0, 2.0] and not kept.requires_grad and step.parameter(moves, "w", w) is kept and ran == ["fetch"]
    for _ in range(2):
        for total in step.summed(moves, ("v", "w")):
            total += 1
    reduced = step.reduced(moves, {"w": torch.float64, "v": torch.float32}.__getitem__)
    assert ran == ["fetch", "reduce w", "reduce v"] and step.complete and not step.kept and not step.sums
    assert {name: (x.tolist(), x.dtype) for name, x in reduced.items()} == {
        "w": ([3.0, 3.0], torch.float64), "v": ([3.0] * 3, torch.float32),
    }  # fmt: skip
    step.parameter(moves, "w", w)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="w was changed between two microbatches of a step"):
        step.parameter(moves, "w", w)


def test_a_loop_over_microbatches_opens_a_step_and_ends_it():
    opened = []
    loop = Microbatches(3, lambda k: (k, opened[-1].index), opened.append)
    assert len(loop) == 3 and list(loop) == [(0, 0), (1, 1), (2, 2)] and opened[1] is None and opened[0].number == 3
    for complete in (True, False):
        for _ in (iterator := iter(loop)):
            last = opened[-1]
            last.sums["w"], last.complete = torch.zeros(1), complete
            if last.is_last and not complete:
                with pytest.raises(RuntimeError, match="the last microbatch had no backward"):
                    next(iterator)
                break
        assert opened[-1] is None


@pytest.mark.parametrize("scheme", ["zero1", "zero2"])
def test_moves_of_a_step_lead_from_parameters_to_copies_and_from_sums_to_gradients(scheme):
    solution = planned("mlp", scheme)
    moves = step_moves(solution, replay(solution, capture(*BUILDERS["mlp"](), training=True)).checked(), None)
    layouts = {name: placed.outputs[0] for name, placed in solution.layouts.items()}
    wanted = [
        {n: (layouts[n], layouts[f"{n}.kept"]) for n in solution.parameters if layouts[n] != layouts[f"{n}.kept"]},
        {n: (layouts[f"{n}.accumulated"], solution.results[f"gradient:{n}"]) for n in solution.parameters},
    ]
    for of, ends in zip((moves.fetches, moves.reductions), wanted):
        assert {n: (text(m.source.layout), text(m.target.layout)) for n, m in of.items()} == ends
    assert wanted[0] and [a != b for a, b in wanted[1].values()] == [scheme == "zero1"] * len(solution.parameters)
    assert {n: text(slot.layout) for n, slot in moves.sums.items()} == {n: source for n, (source, _) in wanted[1].items()}
    assert all(m.target.name == f"{n}.kept" and m.source.name == n for n, m in moves.fetches.items())
    assert all(m.target.name == f"gradient:{n}" and m.source.name == f"{n}.accumulated" for n, m in moves.reductions.items())


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_backward_pass_adds_gradients_of_parameters_to_sums(dtype):
    x, g = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    backward = make_fx(lambda x, g: ([x * g, x, g + 1, x - g],), tracing_mode="fake")(x, g)
    backward.graph.output_node().args = (list(pytree.tree_leaves(backward.graph.output_node().args)),)
    names = tuple(f"gradient:{name}" for name in ("w", "input", "v", "u"))
    graphs = RankGraphs(backward, backward, ("w", "v", "u", "input"), (), ("g",), names, {}, frozenset("wvu"))
    assert with_sums(replace(graphs, backward=None), dtype).sums == ()
    added = with_sums(graphs, dtype)
    sums = [torch.full((2,), 10.0 * k, dtype=torch.float64 if dtype else torch.float32) for k in (1, 2, 3)]
    assert added.sums == ("w", "v", "u")
    assert [n.name for n in added.backward.graph.nodes if n.op == "placeholder"][2:] == ["sum_2", "sum_3", "sum_4"]
    assert [n.meta["val"].dtype for n in added.backward.graph.nodes if n.name.startswith("sum_")] == [sums[0].dtype] * 3
    results = added.backward(x, g, *sums)
    assert [result.tolist() for result in results] == [[13.0, 18.0], [1.0, 2.0], [24.0, 25.0], [28.0, 28.0]]
    assert results[0] is sums[0] and results[3] is sums[2]

"""Training loops as people write them: each runs on the plain model in one process and on its parallel module on gloo ranks, with the same
losses and the same parameters at the end. What a parallel module can't do is refused in a sentence."""

import copy
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autoshard
from autoshard.runtime.agreement import shared, use_gpu
from models import gpt2
from tests.helpers import fast_mesh
from tests.helpers_models import full, losses_of, parallel
from tests.helpers_ranks import results, run_ranks
from tests.test_examples import ROOT, ranks

pytestmark = pytest.mark.slow  # one run of four ranks; the quick one is in test_parallelize

ROWS, SEQ, WORDS = 8, 4, 30  # 30 words on 4 ranks: shards are uneven
PINS = {
    "embed.weight": "S(0),R", "norm.*": "R,R", "up.weight": "S(1),S(0)", "up.bias": "R,S(0)", "down.weight": "S(0),S(0)",
    "out.weight": "S(0),S(0)",
}  # fmt: skip
LINE = {"embed.weight": "S(0)", "norm.*": "R", "up.weight": "S(1)", "down.weight": "S(1)", "out.weight": "R"}


class Words(nn.Module):
    """Predicts the next word of each; its parameters have all kinds of placements on a mesh of 2x2, one of them uneven shards."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 16, bias=False), nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Words()


def frozen_build() -> nn.Module:
    model = build()
    model.embed.requires_grad_(False)
    return model


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, WORDS, (2, rows, SEQ), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


@cache
def planned(shape: tuple[int, ...], frozen: bool = False):
    pins = PINS if len(shape) == 2 else LINE
    asked = {"training": True, "baselines": False, "objective": "serial"}
    return autoshard.plan(frozen_build() if frozen else build(), batch(0), fast_mesh(shape), pins=pins, **asked)


def sized(module: nn.Module, given: tuple) -> tuple:
    """Inputs of another shape than the planned one."""
    return module.shard_inputs(given) if hasattr(module, "shard_inputs") else given


def steps(module: nn.Module, optimizer, *, begin: int = 0, end: int = 3) -> list[float]:
    return losses_of(module, optimizer, map(batch, range(begin, end)))


def each_step(module: nn.Module, optimizer, then: Callable, count: int = 3) -> list[float]:
    """The losses of so many steps, with what is done after each of them; it may give figures of its own."""
    figures = []
    for step in range(count):
        figures += steps(module, optimizer, begin=step, end=step + 1)
        figures += then(step, figures[-1]) or []
    return figures


# -- the loops ---------------------------------------------------------------------------------------------------------------------


def by_optimizer(module: nn.Module, *, of: type, **options) -> list[float]:
    return steps(module, of(module.parameters(), **options))


def accumulated(module: nn.Module) -> list[float]:
    """Two backward passes before each step."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), []
    for step in range(3):
        for part in range(2):
            loss = module(*batch(2 * step + part)) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [a + b for a, b in zip(losses[::2], losses[1::2])]


def big_batches(module: nn.Module) -> list[float]:
    """What `accumulated` computes, in batches of twice the planned size."""
    both = [zip(batch(2 * step), batch(2 * step + 1)) for step in range(3)]
    batches = [sized(module, tuple(torch.cat(pair) for pair in pairs)) for pairs in both]
    return losses_of(module, torch.optim.SGD(module.parameters(), lr=0.5), batches)


def clipped(module: nn.Module, *, value: bool = False, **options) -> list[float]:
    optimizer, figures = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9), []
    for step in range(3):
        loss = module(*batch(step))
        loss.backward()
        norm = clip_grad_value_(module.parameters(), 0.01) if value else clip_grad_norm_(module.parameters(), 0.1, **options)
        optimizer.step()
        optimizer.zero_grad()
        figures += [loss.item(), *([] if norm is None else [full(norm).item()])]  # float(norm) may be this rank's
    return figures


def by_groups(module: nn.Module, **options) -> list[float]:
    """No weight decay for norms and biases, another learning rate for the embedding."""
    named = dict(module.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if p.ndim > 1 and "embed" not in n]},
        {"params": [p for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if "embed" in n], "lr": 0.1},
    ]
    return steps(module, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5, **options))


def scheduled(module: nn.Module, *, kind: str) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-1)
    if kind == "warm-up and cosine":
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
        scheduler = lr_scheduler.SequentialLR(optimizer, parts, [2])
    elif kind == "one cycle":
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    else:
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return each_step(module, optimizer, lambda *_: scheduler.step()) + scheduler.get_last_lr()


def on_plateau(module: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    return each_step(module, optimizer, lambda step, loss: scheduler.step(loss)) + scheduler.get_last_lr()


def evaluated(module: nn.Module) -> list[float]:
    """Evaluation between the steps, with larger and smaller batches than were planned."""

    def evaluate(step: int, loss: float) -> list[float]:
        module.eval()
        with torch.no_grad() if step else torch.inference_mode():
            losses = [module(*batch(9)).item(), *(module(*sized(module, batch(9, rows))).item() for rows in (4, 12))]
        module.train()
        return losses

    return each_step(module, torch.optim.AdamW(module.parameters(), lr=1e-2), evaluate, 2)


def averaged(module: nn.Module) -> list[float]:
    """An exponential moving average beside the module, which is evaluated."""
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = each_step(module, torch.optim.SGD(module.parameters(), lr=0.5), lambda *_: average.update_parameters(module))
    with torch.no_grad():
        losses.append(average(*batch(9)).item())
        module.load_state_dict(average.module.state_dict())
        return [*losses, module(*batch(9)).item()]


def copied(module: nn.Module) -> list[float]:
    """A deep copy is trained, and the module takes its values over."""
    other = copy.deepcopy(module)
    losses = by_optimizer(other, of=torch.optim.SGD, lr=0.5)
    before = module(*batch(0)).item()
    module.load_state_dict(other.state_dict())
    return [*losses, before]


def frozen(module: nn.Module) -> list[float]:
    """A part is frozen for some steps."""
    module.embed.weight.requires_grad_(False)
    losses = by_optimizer(module, of=torch.optim.AdamW, lr=1e-2)
    assert module.embed.weight.grad is None
    module.embed.weight.requires_grad_(True)
    return losses + by_optimizer(module, of=torch.optim.AdamW, lr=1e-2)


def zeroed(module: nn.Module) -> list[float]:
    """Gradients are zeroed in place, of the module and of the optimizer."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), []
    for step in range(4):
        loss = module(*batch(step))
        loss.backward()
        optimizer.step()
        (optimizer if step % 2 else module).zero_grad(set_to_none=step == 2)
        losses.append(loss.item())
    return losses


def scaled(module: nn.Module) -> list[float]:
    """A gradient scaler that skips the step whose gradients are infinite, with clipping in between."""
    scaler, figures = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(3):
        loss = module(*batch(step)) * (float("inf") if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        figures += [scaler.get_scale()] + ([] if step == 1 else [loss.item()])
    return figures


def checked(module: nn.Module) -> list[float]:
    """Steps with a check of every gradient, its norm by hand, and hooks on parameters."""
    seen: list[float] = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad.norm()).item())) for p in module.parameters()]
    losses = by_optimizer(module, of=torch.optim.SGD, lr=0.5)
    module(*batch(3)).backward()
    for handle in handles:
        handle.remove()
    finite = all(bool(full(torch.isfinite(p.grad).all())) for p in module.parameters())
    square = sum(full((p.grad**2).sum()) for p in module.parameters())
    return [*losses, *sorted(seen), float(finite), square.sqrt().item()]


def with_closure(module: nn.Module) -> list[float]:
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(*batch(0))
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)]


def matrices_by_muon(module: nn.Module) -> list[float]:
    optimizer = torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=1e-2)
    losses = steps(module, optimizer)
    module.zero_grad()
    return losses


def by_grad(module: nn.Module) -> list[float]:
    """Gradients as values, and a forward that is computed again in the backward pass."""
    parameters = list(module.parameters())
    grads = torch.autograd.grad(module(*batch(0)), parameters)
    with torch.no_grad():
        for p, grad in zip(parameters, grads):
            p -= 0.5 * grad
    loss = torch.utils.checkpoint.checkpoint(module, *batch(1), use_reentrant=False)
    loss.backward()
    torch.optim.SGD(parameters, lr=0.5).step()
    return [loss.item()]


def state_by_dict(module: nn.Module) -> list[float]:
    """State of module, optimizer and scheduler through dicts; values of a plain model are loaded into the module."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    steps(module, optimizer, end=1)
    held = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    losses = steps(module, optimizer, begin=1, end=3)
    module.load_state_dict(held[0])
    optimizer.load_state_dict(held[1])
    losses += steps(module, optimizer, begin=1, end=3)
    module.load_state_dict(build(seed=1).state_dict())
    losses.append(module(*batch(0)).item())
    set_model_state_dict(module, build(seed=2).state_dict(), options=StateDictOptions(full_state_dict=True))
    losses.append(module(*batch(0)).item())
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    plain = build()
    plain.load_state_dict(whole)
    return [*losses, plain(*batch(0)).item()]


ADAMW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
LOOPS = {
    **{f"AdamW {name}": partial(by_optimizer, of=torch.optim.AdamW, lr=1e-2, **options) for name, options in ADAMW.items()},
    "groups": by_groups,
    "SGD": partial(by_optimizer, of=torch.optim.SGD, lr=0.5, momentum=0.9),
    "accumulation": accumulated,
    "big batches": big_batches,
    **{f"clip foreach={f}": partial(clipped, foreach=f, error_if_nonfinite=True) for f in (None, False, True)},
    "clip inf": partial(clipped, norm_type=float("inf")),
    "clip values": partial(clipped, value=True),
    "warm-up and cosine": partial(scheduled, kind="warm-up and cosine"),
    "plateau": on_plateau,
    "evaluation": evaluated,
    "moving average": averaged,
    "deep copy": copied,
    "frozen for a while": frozen,
    "zero_grad": zeroed,
    "gradient scaler": scaled,
    "checks and hooks": checked,
    "autograd.grad": by_grad,
    "state_dict": state_by_dict,
}
MORE = {
    **{f"groups, {name}": partial(by_groups, **options) for name, options in ADAMW.items()},
    **{f"SGD foreach={f}": partial(by_optimizer, of=torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=f, foreach=f) for f in (False, True)},
    **{of: partial(by_optimizer, of=getattr(torch.optim, of), lr=1e-2) for of in ("Adagrad", "RMSprop", "NAdam", "Adam", "Adamax", "ASGD")},
    "amsgrad": partial(by_optimizer, of=torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "Muon": matrices_by_muon,
    **{
        f"clip {norm_type} foreach={f}": partial(clipped, norm_type=norm_type, foreach=f)
        for norm_type, f in product((1.0, 3.0, float("inf")), (False, True))
    },
    **{kind: partial(scheduled, kind=kind) for kind in ("one cycle", "lambda")},
}


# -- on ranks ----------------------------------------------------------------------------------------------------------------------

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def outcome(loop, module: nn.Module) -> Outcome:
    try:
        figures = loop(module)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        error.add_note(f"in {loop}")
        raise
    return figures, values_of(module)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.detach()).clone() for name, p in module.named_parameters()}


def alone(rank: int, loops: dict) -> dict[str, Outcome]:
    return {name: outcome(loop, build()) for name, loop in loops.items()} | {"frozen": outcome(LOOPS["AdamW plain"], frozen_build())}


def each(module: nn.Module, loops: dict) -> dict[str, Outcome]:
    """All loops on one module, from the same values."""
    first, found = copy.deepcopy(module.state_dict()), {}
    for name, loop in loops.items():
        found[name] = outcome(loop, module)
        module.load_state_dict(first)
        module.zero_grad()
    return found


def more(rank: int) -> dict[str, Outcome]:
    return each(parallel(build(), planned((2, 2))), MORE)


def on_mesh(rank: int, folder: str) -> dict:
    shape = (2, 2)
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    module = autoshard.parallelize(build(), planned(shape), device_mesh)
    first = copy.deepcopy(module.state_dict())
    found = each(module, LOOPS)
    of_frozen = {}
    for plan in (planned(shape), planned(shape, True)):
        of_frozen[len(plan.results)] = outcome(LOOPS["AdamW plain"], autoshard.parallelize(frozen_build(), plan, device_mesh))
    found["saved"] = save(module, folder)
    module.load_state_dict(first)
    return {"loops": found, "frozen": list(of_frozen.values()), "refused": refused(module), "inf": infinite_on_one_rank(module, rank)}


def close(found: Outcome, expected: Outcome, noise: float = 1e-5) -> bool:
    """Whether losses agree, relatively, and parameters, absolutely, up to `noise`."""
    values = len(found[0]) == len(expected[0]) and all(abs(a - b) <= 2 * noise * max(abs(b), 1e-2) for a, b in zip(found[0], expected[0]))
    return values and all(torch.allclose(found[1][name], x, rtol=1e-4, atol=noise) for name, x in expected[1].items())


def save(module: nn.Module, folder: str) -> Outcome:
    """Saves while the next step runs, then goes on."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.5)
    losses = steps(module, optimizer, end=2)
    model, state = get_state_dict(module, optimizer)
    group = dist.new_group(backend="gloo")  # on the default group its thread would mix with the collectives of a mesh of one axis
    future = dcp.async_save({"model": model, "optimizer": state}, checkpoint_id=folder, process_group=group)
    losses += steps(module, optimizer, begin=2, end=4)
    future.result()
    return losses, values_of(module)


def saved_meanwhile(module: nn.Module, optimizer, folder: str) -> list[bool]:
    """Our checkpoints in the background, on a mesh whose only group is the default group: a second one replaces the first."""
    facts = []
    for begin in (4, 8):
        before = values_of(module)
        saving = autoshard.save_checkpoint(folder, module, optimizer, extra={"step": begin}, wait=False)
        steps(module, optimizer, begin=begin, end=begin + 4)
        facts.append(os.path.isdir(folder) == (begin == 8))  # the former one, or none yet
        saving.result(), saving.result()
        other = autoshard.parallelize(build(seed=6), planned((2,)), module.up.weight.device_mesh)
        facts.append(autoshard.load_checkpoint(folder, other, torch.optim.AdamW(other.parameters()))["step"] == begin)
        facts.append(all(torch.equal(x, before[name]) for name, x in values_of(other).items()))
    return facts


def resumed(rank: int, shape: tuple[int, ...], folder: str) -> tuple[Outcome, Outcome, list[bool]]:
    """Goes on from the checkpoint, on another mesh and with another plan; then the loop of LBFGS, which flattens shards to vectors: torch
    can do that where they are even, as here."""
    module = parallel(build(seed=5), planned(shape))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    model, state = get_state_dict(module, optimizer)
    loaded = {"model": model, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    found = outcome(partial(steps, optimizer=optimizer, begin=2, end=4), module)
    facts = saved_meanwhile(module, optimizer, f"{folder}-again")
    module.load_state_dict(build().state_dict())
    return found, outcome(with_closure, module), facts


def infinite_on_one_rank(module: nn.Module, rank: int) -> dict[str, float]:
    """The scale after a step in which one rank's shard of one gradient is infinite."""
    scales = {}
    for kind in (ShardedGradScaler, torch.amp.GradScaler):
        scaler, optimizer = kind("cpu", init_scale=1024.0), torch.optim.SGD(module.parameters(), lr=0.0)
        scaler.scale(module(*batch(0))).backward()
        if rank == 0:
            module.up.weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales[kind.__name__] = scaler.get_scale()
    return scales


def parallelized(build: Callable, frozen: bool, device_mesh) -> nn.Module:
    return autoshard.parallelize(build(), planned((2, 2), frozen), device_mesh)


def convert(module: nn.Module, device_mesh, dtype: torch.dtype) -> None:
    copy.deepcopy(module).to(dtype)(*batch(0))


def replace_parameter(module: nn.Module, device_mesh) -> None:
    other = copy.deepcopy(module)
    other.up.weight = nn.Parameter(torch.zeros(32, 16))
    other(*batch(0))


def call_within(module: nn.Module, device_mesh, context: Callable) -> None:
    with context():
        module(*batch(0)).backward()


def differentiate_twice(module: nn.Module, device_mesh) -> None:
    torch.autograd.grad(module(*batch(0)), list(module.parameters()), create_graph=True)


def unfreeze(module: nn.Module, device_mesh) -> None:
    other = parallelized(frozen_build, True, device_mesh)
    other(*batch(0)).backward()
    other.embed.weight.requires_grad_(True)
    other(*batch(0))


def step_once(module: nn.Module, device_mesh, of: type, **options) -> None:
    steps(module, of(module.parameters(), **options), end=1)


def call_with_rows(module: nn.Module, device_mesh, rows: int) -> None:
    module(*module.shard_inputs(batch(0, rows)))


OTHER_ROWS = "ValueError: this batch can't be sharded as planned: input_0 is ({rows}, 4) instead of (8, 4)"
REFUSED = {  # what a user may try, and how the sentence begins
    "bfloat16": (
        partial(convert, dtype=torch.bfloat16),
        "ValueError: embed.weight is torch.bfloat16, planned was float32; convert the model before it is planned",
    ),
    "float64": (partial(convert, dtype=torch.float64), "ValueError: embed.weight is torch.float64, planned was float32"),
    "replaced": (replace_parameter, "ValueError: up.weight is a plain tensor, the plan has S(1),S(0) for it"),
    "autocast": (
        partial(call_within, context=lambda: torch.autocast("cpu", torch.bfloat16)), "ValueError: the solution is of another model: "
    ),
    "anomaly": (
        partial(call_within, context=lambda: torch.autograd.detect_anomaly(check_nan=True)),
        "ValueError: torch.autograd.detect_anomaly can't check a parallel module",
    ),
    "second": (differentiate_twice, "RuntimeError: the plan has no second derivatives"),
    "unfrozen": (unfreeze, "ValueError: embed.weight requires a gradient and the plan has none for it"),
    "beyond": (
        lambda module, device_mesh: parallelized(build, True, device_mesh)(*batch(0)), "ValueError: the solution is of another model: "
    ),
    "fused SGD": (  # torch's own
        partial(step_once, of=torch.optim.SGD, lr=0.1, fused=True), "NotImplementedError: Operator aten._fused_sgd_.default"
    ),
    "Adafactor": (  # torch's own
        partial(step_once, of=torch.optim.Adafactor),
        "RuntimeError: aten.pow_.Scalar: in-place operations that require placement changes are not supported",
    ),
    "pickle": (lambda module, device_mesh: torch.save(module, os.devnull), "ValueError: a parallel module can't be pickled"),
    "shallow": (lambda module, device_mesh: copy.copy(module), "ValueError: a parallel module can't be pickled"),
    **{f"{rows} rows": (partial(call_with_rows, rows=rows), OTHER_ROWS.format(rows=rows)) for rows in (6, 5, 2)},
}  # fmt: skip


def refused(module: nn.Module) -> dict[str, str]:
    device_mesh, sentences = module.up.weight.device_mesh, {}
    for name, (attempt, _) in REFUSED.items():
        module.zero_grad()
        try:
            attempt(module, device_mesh)
            sentences[name] = "nothing"
        except (ValueError, RuntimeError, NotImplementedError) as error:
            sentences[name] = f"{type(error).__name__}: {error}"
    module.zero_grad()
    return sentences


@pytest.fixture(scope="module")
def expected() -> dict[str, Outcome]:
    # in a process of its own: a process that has run backward() can't be forked
    return results(1, alone, LOOPS | {"LBFGS": with_closure})[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("loops") / "saved")


@pytest.fixture(scope="module")
def ran(folder) -> list[dict]:
    planned((2, 2), True), planned((2, 2))  # before the ranks begin, which then share them
    return results(4, on_mesh, folder)


def test_the_plan_has_placements_of_all_kinds():
    layouts = {row["layout"] for row in planned((2, 2)).parameters.values()}
    assert {"R,R", "S(0),R", "R,S(0)", "S(0),S(0)", "S(1),S(0)"} <= layouts


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_on_four_ranks_is_that_of_one_process(name, expected, ran):
    for rank in ran:
        assert close(rank["loops"][name], expected[name]), (rank["loops"][name][0], expected[name][0])
    assert any(not torch.equal(x, dict(build().named_parameters())[n]) for n, x in expected[name][1].items())


def test_more_optimizers_norms_and_schedulers_do_as_in_one_process():
    (expected,) = results(1, alone, MORE)
    planned((2, 2))
    for found in results(4, more):
        assert [n for n in MORE if not close(found[n], expected[n], 1e-3 if n == "Muon" else 1e-5)] == []  # Muon computes in bfloat16


def test_a_loop_that_differs_is_seen(expected, ran):
    """The control: no two loops that compute different things are close."""
    found = ran[0]["loops"]
    others = ["AdamW plain", "groups", "SGD", "clip foreach=None", "clip inf", "warm-up and cosine", "zero_grad"]
    assert not any(close(found[a], expected[b]) for a, b in product(others, others) if a != b)


def test_accumulated_gradients_are_those_of_the_big_batch(expected, ran):
    for found in (expected, *(rank["loops"] for rank in ran)):
        assert close(found["accumulation"], expected["big batches"])


def test_frozen_parameters_may_be_planned_or_frozen_afterwards(expected, ran):
    for rank in ran:
        assert len(rank["frozen"]) == 2  # two plans, with and without the gradient
        for found in rank["frozen"]:
            assert close(found, expected["frozen"])
            assert torch.equal(found[1]["embed.weight"], build().embed.weight)


def test_a_checkpoint_that_was_saved_meanwhile_is_loaded_on_another_mesh_with_the_optimizer(folder, ran, expected):
    losses, parameters = ran[0]["loops"]["saved"]
    planned((2,))
    for found, by_lbfgs, facts in results(2, resumed, (2,), folder):
        assert facts == [True] * 6
        assert close(found, (losses[2:], parameters)) and close(by_lbfgs, expected["LBFGS"], 1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_a_sentence_on_every_rank(name, ran):
    said = [rank["refused"][name] for rank in ran]
    assert said[0].startswith(REFUSED[name][1]) and set(said) == {said[0]}


def test_refusals_name_their_reason(ran):
    said = ran[0]["refused"]
    assert "under torch.autocast" in said["autocast"] and "embed.weight" in said["beyond"]
    assert all("pad or drop rows" in said[f"{rows} rows"] for rows in (6, 5, 2))


def test_a_gradient_that_is_infinite_on_one_rank_is_skipped_by_all_with_the_sharded_scaler_only(ran):
    assert {rank["inf"]["ShardedGradScaler"] for rank in ran} == {512.0}
    assert {rank["inf"]["GradScaler"] for rank in ran} == {512.0, 1024.0}  # torch reduces along the first gradient's axes only


# -- one rank per GPU --------------------------------------------------------------------------------------------------------------


def crowded(rank: int, gpus: int, own: bool) -> None:
    """As on a host with so many GPUs, without any: what torch says of its devices is replaced. own: every rank sees one GPU, its own."""
    torch.cuda.device_count = lambda: 1 if own else gpus
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: type("Properties", (), {"uuid": f"GPU-{rank if own else device}"})
    use_gpu()


def test_more_ranks_than_gpus_are_refused_on_every_rank():
    said = {str(error) for error in run_ranks(3, crowded, 2, False)}
    assert len(said) == 1 and "3 ranks run on " in (sentence := said.pop()) and "use 2 GPUs: ranks 0 and 2 have the same one" in sentence
    assert results(2, crowded, 2, False) == [None] * 2 and results(2, crowded, 2, True) == [None] * 2


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_two_ranks_on_one_gpu_are_found_whatever_the_host(gpus, ranks, hosts):
    used = [(f"host{h}", f"GPU-{rank % gpus}") for h in range(hosts) for rank in range(ranks)]
    assert (shared(used) is None) == (ranks <= gpus)


# -- the example -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # torchrun, three times
@pytest.mark.parametrize("adamw", ["foreach", "fused"])
def test_the_example_prints_the_same_losses_on_any_mesh(tmp_path, adamw):
    module, inputs = gpt2.tiny(vocab=256, layers=1)
    said = []
    for shape in ((1,), (2,)):
        plan, n = tmp_path / f"{shape}.json", shape[0]
        solution = autoshard.plan(module, inputs, fast_mesh(shape), training=True, baselines=False)
        replace(solution, assumptions={**solution.assumptions, "set": {"vocab": 256, "layers": 1}}).save(plan)
        options = ["--steps", 4, "--accumulate", 2, "--clip", 1, "--evaluate", 2, "--adamw", adamw, "--save", tmp_path / f"run{n}"]
        done = ranks(n, "train_loop", plan, ROOT / "LICENSE", *options)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append([float(x) for x in re.findall(r"(?:loss|norm|average) ([\d.]+)", done.stdout)])
        assert (tmp_path / f"run{n}" / ".metadata").exists() and not (tmp_path / f".run{n}.partial").exists()
    assert len(said[0]) == 4 * 2 + 2 * 2 and said[1] == pytest.approx(said[0], rel=1e-4)


# -- inductor ----------------------------------------------------------------------------------------------------------------------


def compiled_loops(rank: int, shape: tuple[int, ...] | None) -> list[Outcome]:
    found = []
    for how in ("function", "method", "optimizer"):
        module = parallel(build(), shape and planned(shape))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        call = module
        if how == "function":
            call = torch.compile(module)
        elif how == "method":
            module.compile()
        else:
            optimizer.step = torch.compile(optimizer.step)
        losses = steps(call, optimizer)
        found.append((losses, values_of(module)))
    return found


@pytest.mark.slow  # inductor calls a C++ compiler
def test_compiled_modules_and_optimizers_train_as_one_process():
    (expected,) = results(1, compiled_loops, None)
    for found in results(2, compiled_loops, (2,)):
        assert all(close(a, b) for a, b in zip(found, expected, strict=True))
    assert dist.is_initialized() is False

"""One module of several programs on gloo ranks: outputs and gradients, switches, checkpoints, shapes, part of the devices."""

import copy
import warnings
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import autoshard
from autoshard import Program
from autoshard.layout import all_layouts
from autoshard.lower.collectives import CollectiveCall
from autoshard.lower.unsharded import materialized
from autoshard.routes import DeviceSet, Transfers
from autoshard.runtime.distribute import Where
from autoshard.runtime.parameter_copies import Mover, Sent
from autoshard.runtime.programs import RunningProgram
from models import llama, mlp
from tests.helpers import fast_mesh
from tests.helpers_models import Model, full
from tests.helpers_ranks import results, run_ranks

BATCH, ROOM = 4, 8
SWITCHES = 10


def meta(*shape):
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def build():
    return materialized(llama.tiny(layers=1)[0], 0)


def tokens(rows, length, seed=0):
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


@cache
def planned(shape, devices=None, pinned=()):
    """Training, and decoding with a cache: on the devices, with layouts of its own for some parameters."""
    module, batch = llama.tiny(layers=1)
    decoder = llama.with_cache(module, BATCH, ROOM)
    generate = Program(decoder, (meta(BATCH, 1), meta(1)), weight=50, devices=devices, options={"pins": dict(pinned)})
    return autoshard.plan({"train": Program(module, batch, training=True), "generate": generate}, fast_mesh(shape))


def modules(plan):
    model = build()
    decoder = llama.with_cache(model, BATCH, ROOM)
    parallel = autoshard.parallelize({"train": model, "generate": decoder}, plan, init_device_mesh("cpu", plan.mesh.shape))
    return model, decoder, parallel


PINS = (("*.down_proj.weight", "S(1)"), ("*.q_proj.weight", "S(0)"))


def decoded(module, prompt):
    return [module(prompt[:, k : k + 1], torch.tensor([k])) for k in range(3)]


def trains_and_generates(rank, plan, folder):
    model, decoder, parallel = modules(plan)
    ours, alone = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, model))
    x, y, apart, state = tokens(8, 16), tokens(8, 16, 1), [], None
    for _ in range(2):
        losses = [m(x, y) for m in (parallel, model)]
        for loss, optimizer in zip(losses, (ours, alone)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        apart.append(abs(losses[0].item() - losses[1].item()))
        before = copy.deepcopy({k: full(v["exp_avg"]) for k, v in enumerate(ours.state.values())})
        for buffer in decoder.buffers():
            buffer.zero_()
        with torch.no_grad(), parallel.switched("generate"):
            for a, b in zip(decoded(parallel, x[:BATCH]), decoded(decoder, x[:BATCH]), strict=True):
                apart.append(0.0 if a is None else float((full(a) - b).abs().max()))
        after = {k: full(v["exp_avg"]) for k, v in enumerate(ours.state.values())}
        state = all(torch.equal(before[k], after[k]) for k in before)
    with torch.no_grad():
        stale = parallel.program("generate")(x[:BATCH, :1], torch.tensor([0]))
        autoshard.save_checkpoint(folder, parallel, ours)
        for p in parallel.parameters():
            p._local_tensor.zero_()
        autoshard.load_checkpoint(folder, parallel, ours)
        loaded = parallel.program("generate")(x[:BATCH, :1], torch.tensor([0]))
    same = stale is None or torch.equal(full(stale), full(loaded))
    return max(apart), state, same, len(plan.copies)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, (1, 2)])
def test_training_and_decoding_say_what_one_process_says(devices, tmp_path):
    plan = planned((4,), devices, PINS)
    assert plan.copies
    for apart, state, same, _ in results(4, trains_and_generates, plan, str(tmp_path / "saved")):
        assert apart < 1e-4 and state and same


def test_the_cache_is_a_state_of_decoding_and_sharded():
    plan = planned((4,), None, PINS)
    caches = [placed.outputs[0] for name, placed in plan["generate"].layouts.items() if name.endswith((".keys", ".values"))]
    assert len(caches) == 2 and all(layout in ("S(0)", "S(1)") for layout in caches)  # the batch, or heads
    assert not any(name.endswith(".keys") for name in plan["train"].layouts)
    assert plan["generate"].peak["parts"]["inputs"] >= 2 * BATCH * 4 * ROOM * 8 * 4 / 4  # batch, heads, room, head width, bytes, devices


def tied_modules():
    embed, head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32, bias=False)
    head.weight = embed.weight
    train = Model(lambda m, x, y: cross_entropy(m.head(m.embed(x)).flatten(0, 1), y.flatten()), embed=embed, head=head)
    return train, Model(lambda m, x: m.head(m.embed(x) * m.scale), embed=embed, head=head, scale=torch.linspace(0.5, 2, 16))


def trains_and_scales(rank, plan):
    torch.manual_seed(0)
    train, decoder = tied_modules()
    parallel = autoshard.parallelize({"train": train, "generate": decoder}, plan, init_device_mesh("cpu", plan.mesh.shape))
    x, y, apart = tokens(8, 6) % 32, tokens(8, 6, 1) % 32, []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*was set on a parallel module")
        apart.append(parallel(x, y) - train(x, y))
    for _ in range(2):
        with torch.no_grad(), parallel.switched("generate"):
            apart.append(full(parallel(x[:4])) - decoder(x[:4]))
    return max(float(one.detach().abs().max()) for one in apart)


def test_a_program_shares_a_tied_parameter_and_has_constants_of_its_own():
    train, decoder = tied_modules()
    generate = Program(decoder, (meta(4, 6),), weight=500, options={"pins": {"embed.weight": "S(1)"}})
    training = Program(train, (meta(8, 6), meta(8, 6)), training=True, options={"pins": {"embed.weight": "S(0)"}})
    plan = autoshard.plan({"train": training, "generate": generate}, fast_mesh((2,)))
    assert [copy["parameter"] for copy in plan.copies] == ["embed.weight"]
    assert max(results(2, trains_and_scales, plan)) < 1e-5


# -- switches -------------------------------------------------------------------------------------------------------------------------


def switched_often(rank, plan):
    _, _, parallel = modules(plan)
    family = parallel.__dict__["_programs"].families["generate"]
    home = {name: full(p).clone() for name, p in parallel.named_parameters()}
    equal, sent = True, parallel.bytes_sent
    for _ in range(SWITCHES):
        with parallel.switched("generate"):
            equal &= all(torch.equal(full(copy), home[name]) for name, copy in family.copies.copies.items())
        equal &= all(torch.equal(full(p), home[name]) for name, p in parallel.named_parameters())
    return equal, parallel.bytes_sent - sent, len(family.copies.copies)


@pytest.mark.parametrize(("collective", "sent"), [("all_gather", 3.0), ("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_to_all", 0.75)])
def test_bytes_that_a_rank_of_four_sends_are_counted(collective, sent):
    def program():
        return (yield CollectiveCall(collective, 1, torch.zeros(8)))

    counted = Sent()
    assert counted.drive(SimpleNamespace(sizes=(2, 4), answer=lambda call: call.tensor), program()).shape == (8,)
    assert counted.bytes == sent * 32


def gathered_bytes(plan):
    """What the ranks send together to gather every copied parameter on all of them: each receives what it lacks."""
    total = 0.0
    for row in plan.copies:
        own = plan["train"].parameters[row["parameter"]]
        size = 4 * torch.Size(own["shape"]).numel()
        total += plan.mesh.num_devices * (size - own["local_bytes"])
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "devices"), [((2, 2), (0, 1)), ((2, 8), (0, 1, 2, 3))])
def test_a_switch_moves_what_was_predicted_and_no_bit_changes(shape, devices):
    module, batch = llama.tiny(layers=1, batch=16)
    decoder = llama.with_cache(module, BATCH, ROOM)
    pins = {"*_proj.weight": ",".join(["S(0)"] * len(shape))}
    programs = {
        "train": Program(module, batch, training=True, options={"pins": pins}),
        "generate": Program(decoder, (meta(BATCH, 1), meta(1)), weight=50, devices=devices, options={"pins": {"*_proj.weight": "S(0)"}}),
    }
    plan = autoshard.plan(programs, fast_mesh(shape))
    made = results(plan.mesh.num_devices, switched_often, plan)
    assert all(equal for equal, _, _ in made)
    sent, predicted = sum(sent for _, sent, _ in made), SWITCHES * sum(row["bytes"] for row in plan.copied("generate"))
    print(f"{sent:.0f} bytes sent in {SWITCHES} switches, predicted {predicted:.0f}, gathered {SWITCHES * gathered_bytes(plan):.0f}")
    assert predicted > 0 and abs(sent - predicted) <= 0.05 * predicted
    assert SWITCHES * gathered_bytes(plan) >= 3 * sent
    assert {bool(copies) for _, _, copies in made} == {True, False}  # ranks outside hold none


def moves_every_layout(rank, devices):
    """(source, target, whether the shard is right, bytes sent) of every transfer between layouts without Partial."""
    mesh, part = fast_mesh((2, 2)), fast_mesh((2,))
    device_mesh = init_device_mesh("cpu", (2, 2))
    where, every, made = Where.on(mesh, device_mesh), DeviceSet(mesh, (0, 1, 2, 3)), []
    target = every if devices is None else DeviceSet(part, devices)
    own = where if devices is None else Where.among(part, devices, "cpu", torch.distributed.new_group(list(devices)))
    transfers, full = Transfers(mesh, every, target), torch.arange(48.0).reshape(4, 12)
    for a, b in product(all_layouts((4, 12), mesh), all_layouts((4, 12), target.mesh)):
        sent = Sent()
        held, wanted = ([full[tuple(slice(*one) for one in box)] for box in of.boxes((4, 12), x)] for of, x in ((every, a), (target, b)))
        moved = Mover(every, target, transfers, own, sent).of(full, a, b)(held[rank].contiguous())
        expected = wanted[target.numbers.index(rank)] if rank in target.numbers else None
        made.append((a, b, moved is expected if expected is None else torch.equal(moved, expected), sent.bytes))
    return made


@pytest.mark.parametrize("devices", [None, (1, 2)])
def test_a_copy_is_its_shard_of_the_original_and_a_route_sends_what_it_is_priced_with(devices):
    made = results(4, moves_every_layout, devices)
    assert all(right for of_rank in made for *_, right, _ in of_rank)
    mesh, part = fast_mesh((2, 2)), fast_mesh((2,))
    every = DeviceSet(mesh, (0, 1, 2, 3))
    transfers = Transfers(mesh, every, every if devices is None else DeviceSet(part, devices))
    for (a, b, _, sent), *others in zip(*made, strict=True):
        total = sent + sum(one[3] for one in others)
        if devices is None:
            assert total == 4 * sum(step.bytes for step in transfers.routes.route((4, 12), 4, a, b).steps)
        else:
            assert total == transfers.transfer((4, 12), 4, a, b).bytes


def a_planted_fault(rank, plan):
    _, _, parallel = modules(plan)
    family = parallel.__dict__["_programs"].families["generate"]
    home = {name: full(p).clone() for name, p in parallel.named_parameters()}
    with parallel.switched("generate"):
        name, shard = next(iter(family.copies.copies.items()))
        shard._local_tensor.add_(1e-6)
        return torch.equal(full(shard), home[name])


def test_a_copy_that_differs_is_seen():
    assert not any(results(4, a_planted_fault, planned((4,), None, PINS)))


def pair():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    return {"train": Model(lambda m, x: m.layer(x).pow(2).mean(), layer=layer), "serve": Model(lambda m, x: m.layer(x), layer=layer)}


STEPS = {
    "for loop": lambda of: torch.optim.AdamW(of, lr=0.1, foreach=False).step,
    "foreach": lambda of: torch.optim.AdamW(of, lr=0.1, foreach=True).step,
    "fused": lambda of: torch.optim.AdamW(of, lr=0.1, fused=True).step,
    "compiled": lambda of: torch.compile(torch.optim.SGD(of, lr=0.1, foreach=True).step, backend="eager"),
    "in place": lambda of: torch.no_grad()(lambda: [p.add_(p.grad) for p in of]),
}


def follows(rank, plan):
    """By kind of step how far what is served after a step is from one process, and whether a copy that is not old is made again."""
    apart, again = {}, {}
    for kind, step_of in STEPS.items():
        alone, model, x = pair(), autoshard.parallelize(pair(), plan, init_device_mesh("cpu", (2,))), torch.ones(8, 8)
        steps, serve = [step_of(list(m.parameters())) for m in (model, alone["train"])], model.program("serve")
        for _ in range(3):
            for m, step in zip((model, alone["train"]), steps, strict=True):
                m(x).backward()
                step()
                m.zero_grad()
            with torch.no_grad():
                apart[kind] = max(apart.get(kind, 0.0), (full(serve(x)) - alone["serve"](x)).abs().max().item())
        sent = model.bytes_sent
        serve(x)
        again[kind] = model.bytes_sent > sent
    return apart, again


def test_copies_follow_the_steps_of_any_optimizer():
    """Those of torch's foreach and fused kernels, which change no version of a DTensor or of its shard, too."""
    models, x = pair(), torch.ones(8, 8)
    serve = Program(models["serve"], (x,), options={"pins": {"layer.*": "R"}})
    plan = autoshard.plan({"train": Program(models["train"], (x,), training=True), "serve": serve}, fast_mesh((2,)))
    assert plan.copies
    for apart, again in results(2, follows, plan):
        assert max(apart.values()) < 1e-5 and not any(again.values()), (apart, again)


# -- shapes ---------------------------------------------------------------------------------------------------------------------------

LENGTHS = (4, 6, 8, 12, 16)


@cache
def planned_lengths(lengths=LENGTHS):
    module, _ = llama.tiny(layers=1)
    shapes = [((meta(8, n), meta(8, n)), 1 + k) for k, n in enumerate(lengths)]
    return autoshard.plan({"train": Program(module, shapes=shapes, training=True)}, fast_mesh((4,)))


def runs_lengths(rank, plan, lengths, others, pad):
    model = build()
    parallel = autoshard.parallelize(model, plan, init_device_mesh("cpu", (4,)), pad=pad)
    family, apart = parallel.__dict__["_programs"].families["train"], []
    for n in (*lengths, *lengths, *others):
        losses = []
        for m in (model, parallel):
            m.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(m(tokens(8, n), tokens(8, n, 1)))
            losses[-1].backward()
        apart.append(abs(losses[0].item() - losses[1].item()))
        gradients = {name: p.grad for name, p in model.named_parameters()}
        apart += [float((full(p.grad) - gradients[name]).abs().max()) for name, p in parallel.named_parameters()]
    captures = {name: len(m.__dict__["_runner"].calls) for name, m in family.shapes.items()}
    return max(apart), captures, parallel.notes


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS])
def test_every_planned_length_is_captured_once_and_says_what_one_process_says(lengths):
    plan = planned_lengths(lengths)
    layouts = [{name: row["layout"] for name, row in plan[shape].parameters.items()} for shape in plan]
    assert all(one == layouts[0] for one in layouts) and not plan.copies
    for apart, captures, notes in results(4, runs_lengths, plan, lengths, (10,), None):
        assert apart < 1e-5
        assert sum(captures.values()) == len(lengths) + 1 and set(captures.values()) == {1, 2}  # the last length ran in a nearest plan
        assert len(notes) == 1 and "was not planned" in notes[0]


@pytest.mark.slow
def test_a_length_is_padded_to_the_next_planned_one():
    lengths = (8, 16)
    found = results(4, runs_lengths, planned_lengths(lengths), lengths, (10,), {"input_0": 0, "input_1": -100})
    for apart, captures, notes in found:
        assert apart < 1e-5 and set(captures.values()) == {1}
        assert len(notes) == 1 and "padded" in notes[0] and "38%" in notes[0]


def test_the_note_of_a_call_that_was_not_planned_says_what_padding_takes_and_comes_once():
    shapes, program = {"x": (8, 16), "y": (8,)}, SimpleNamespace(noted={}, plan={"16": SimpleNamespace(cost=2.0)})
    for actual, padded in (({"x": (8, 12), "y": (8,)}, True), ({"x": (8, 20), "y": (8,)}, False)):
        with pytest.warns(UserWarning):
            RunningProgram._note(program, "16", shapes, actual, padded)
        RunningProgram._note(program, "16", shapes, actual, padded)
    assert list(program.noted.values()) == [
        "x of (8, 12) is padded to the shape of 16: 24% of its elements, about 0.471 s of a call",  # 32 of 136
        "x of (8, 20) was not planned and runs in the layouts of 16, the nearest shape; plan it too, as one of shapes",
    ]


def without_a_value(rank, plan):
    parallel = autoshard.parallelize(build(), plan, init_device_mesh("cpu", (4,)), pad={"input_0": 0})
    parallel(tokens(8, 10), tokens(8, 10))


@pytest.mark.slow
def test_padding_needs_a_value_for_every_input():
    for error in run_ranks(4, without_a_value, planned_lengths((8, 16))):
        assert isinstance(error, ValueError) and "input_1" in str(error) and "with what" in str(error)


# -- refusals --------------------------------------------------------------------------------------------------------------------------


def refused(rank, plan):
    said = []
    for model in ({"train": build()}, materialized(mlp.tiny()[0], 0)):
        try:
            autoshard.parallelize(model, plan, init_device_mesh("cpu", (4,)))
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_models_that_the_plan_is_not_for_are_refused():
    first, second = results(4, refused, planned((4,), None, PINS))[0]
    assert "no model for program 'generate'" in first and "another model" in second

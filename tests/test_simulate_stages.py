"""Plans cut into the stages of a pipeline, and configurations of data x tensor x pipeline x microbatches."""

import json
import math
from dataclasses import replace

import pytest
import torch

from autoshard import load
from autoshard.api import Parallel, simulate, simulate_grid
from autoshard.capture import capture_deep
from autoshard.mesh import Axis, LinkCurve, Mesh
from autoshard.pipeline.grid import divided
from autoshard.pipeline.layers import layers_of
from autoshard.pipeline.microbatches import microbatch
from autoshard.pipeline.schedules import schedule_of
from autoshard.pipeline.stage_costs import StageCost, _holders, _placed, run_stages, stage_costs_of, weight_ops
from autoshard.report.timeline import trace_of_run
from models import gpt2, mlp
from tests.helpers import tiny_graph
from tests.helpers_command import record_of, refusal, run
from tests.helpers_refusals import refusals
from tests.test_simulate_timeline import check_trace

MODEL = "models/mlp.py:tiny"


def mesh_of(shape):
    return Mesh.from_bandwidths(shape, devices_per_node=math.prod(shape[1:]), intra_node_bandwidth=2e9, inter_node_bandwidth=1e9)


@pytest.fixture(scope="module")
def simulations():
    """GPT-2 with 4 layers: one microbatch on (D, H) = (2, 2), cut into 1, 2 and 4 stages."""
    model, inputs = gpt2.tiny(layers=4, batch=16)
    rows = [Parallel(2, 2, 1, 1), Parallel(2, 2, 1, 4), Parallel(2, 2, 2, 4), Parallel(2, 2, 4, 4)]
    return dict(zip(rows, simulate_grid(model, inputs, rows, mesh_of)))


def test_one_stage_and_one_microbatch_is_the_time_line(simulations):
    one = simulations[Parallel(2, 2, 1, 1)]
    assert one.run is None and one.seconds == one.timeline.seconds and one.peak_bytes == one.timeline.peak_bytes
    (part,) = stage_costs_of(one.timeline.program, [0] * len(one.timeline.program.graph.ops), 1, 1)
    # cut between the passes, nothing of the one hides communication of the other
    assert part.forward + part.backward + part.finish == pytest.approx(one.seconds, rel=0.05)
    assert part.forward + part.backward + part.finish >= one.seconds * (1 - 1e-9)
    assert part.send == part.send_back == part.tied_bytes == 0


def test_one_stage_and_one_microbatch_takes_what_a_plan_of_the_same_layouts_takes():
    model, inputs = mlp.mlp(width=64, hidden=256)
    (one,) = simulate_grid(model, inputs, [Parallel(data=4)], lambda sizes: Mesh.from_bandwidths(sizes, devices_per_node=4))
    assert one.seconds == simulate(model, inputs, one.solution).seconds < simulate(model, inputs, one.solution, join=False).seconds


def test_parts_without_communication_hold_every_kernel_once(simulations):
    """And of several microbatches, gradients are added up: of every element the gradient and the sum are read, the sum is written."""
    for one in simulations.values():
        if one.run is not None:
            kernels = math.fsum(task.seconds for task in one.timeline.tasks if task.kind in ("compute", "optimizer"))
            held = math.fsum(row["local_bytes"] for row in one.solution.parameters.values() if "tied_to" not in row)
            adding = 3 * held / one.mesh.device.memory_rate
            assert math.fsum(p.forward + p.backward + p.finish for p in one.silent) == pytest.approx(kernels + adding)


def test_fixed_bytes_of_all_parts_are_those_of_the_plan(simulations):
    one = simulations[Parallel(2, 2, 4, 4)]
    solution = one.solution
    held = {name: row["local_bytes"] for name, row in solution.parameters.items()}
    several = held["wte.weight"]  # the head is tied to the table: held by the first stage and by the last
    once = math.fsum(held.values()) - math.fsum(held[n] for n, row in solution.parameters.items() if "tied_to" in row)
    inputs = math.fsum(part.fixed_bytes for part in one.parts) - 4 * (once + several)  # parameter, gradient, two moments
    assert 0 <= inputs <= 1e4  # tokens, targets and buffers
    assert one.parts[0].tied_bytes == one.parts[-1].tied_bytes == several


def test_activations_crossing_a_cut_are_sent_there_and_back(simulations):
    one = simulations[Parallel(2, 2, 4, 4)]
    rows, width = 16 // 4 // 2 * 16, one.solution.parameters["wpe.weight"]["shape"][1]  # of a device: batch / K / D, sequence
    for part in one.parts[:-1]:
        assert part.send == rows * width * 4
    assert one.parts[-1].send == 0
    assert [part.send_back for part in one.parts] == [0, *[rows * width * 4] * 3]


def test_seconds_follow_from_parts_and_schedule(simulations):
    one = simulations[Parallel(2, 2, 2, 4)]
    axis = mesh_of((2, 2, 2)).axes[0]
    assert axis.shared_by == 4  # two pipelines beside each other, of two tensor parallel devices each
    again = run_stages(one.parts, schedule_of("1f1b", 2, 4), axis, chains=2)
    assert one.seconds == again.seconds < run_stages(one.parts, schedule_of("1f1b", 2, 4), axis).seconds
    assert one.seconds > run_stages(one.parts, schedule_of("1f1b", 2, 4)).seconds  # without transfers
    assert one.seconds - one.exposed_communication_seconds == run_stages(one.silent, one.run.schedule).seconds < one.seconds
    alone = simulations[Parallel(2, 2, 1, 1)]
    assert alone.exposed_communication_seconds == alone.timeline.exposed_communication_seconds
    assert one.bubble > 0 == alone.bubble


def test_stages_on_different_devices_and_links():
    """Unequal stages: the slow one sets the pace, the slow link delays what crosses it."""
    fast, slow = StageCost(1, 2, 1, 0, 5, 7, 0, send=1e9, send_back=1e9), StageCost(2, 4, 2, 0, 5, 7, 0, send=1e9, send_back=1e9)
    link = Axis("p", 2, 1e9, 0.0)
    even = run_stages([fast, slow], schedule_of("gpipe", 2, 10), None)
    assert even.seconds == pytest.approx(1 + 10 * 6 + 2)
    linked = run_stages([fast, slow], schedule_of("gpipe", 2, 10), [link, link])
    assert linked.seconds == pytest.approx(1 + 10 * (1 + 2) + 10 * 4 + 1 + 2)  # every activation is received before its forward
    crawling = Axis("p", 2, 1e8, 0.0)  # 10 s per activation
    assert run_stages([fast, slow], schedule_of("gpipe", 2, 10), [crawling, link]).seconds > 200


def test_weight_ops_are_the_matmuls_of_weight_gradients():
    graph, _ = capture_deep(*mlp.tiny(), training=True)
    found = weight_ops(graph)
    matmuls = [i for i, op in enumerate(graph.ops) if op.backward and op.target == "aten.mm.default"]
    # two blocks of two linears: four gradients of weights; the gradient of the input is not asked for, so three go on
    assert len([i for i in matmuls if i in found]) == 4 and len(matmuls) == 7


def test_placeholders_are_held_where_the_forward_pass_reads_them():
    graph = tiny_graph("mlp", True)
    forward = [i for i, op in enumerate(graph.ops) if not op.backward]
    of = [4 * i // len(forward) for i in forward]
    placeholders = [i for i in forward if graph.ops[i].is_placeholder]
    readers = {i: sorted({of[j] for j in forward if (i, 0) in graph.ops[j].inputs}) for i in placeholders}
    assert len(set(map(tuple, readers.values()))) > 2
    assert all(_holders(graph, of, i) == (readers[i] or [of[i]]) for i in placeholders)
    ops = (*graph.ops, replace(graph.ops[placeholders[0]], name="unread"))
    unread, n = replace(graph, ops=ops), len(graph.ops)
    assert _holders(unread, [*range(n + 1)], n) == [n] and _holders(unread, of, n) == of[-1:]
    parts = [-1 if op.is_placeholder else i % 5 for i, op in enumerate(ops)]
    read = [min((parts[j] for j, op in enumerate(ops) if (i, 0) in op.inputs), default=0) for i in range(n + 1)]
    assert _placed(unread, parts) == [first if part < 0 else part for first, part in zip(read, parts)]


def test_layers_are_divided_evenly():
    graph, _ = capture_deep(*mlp.tiny(layers=8), training=True)
    layers = layers_of(graph)
    part = divided(layers, 4)
    flops = [0.0] * 4
    for layer in range(layers.count):
        flops[part[layers.of.index(layer)]] += layers.flops[layer]
    assert sorted(set(part) - {-1}) == [0, 1, 2, 3]
    assert max(flops) < 1.5 * min(flops)


BATCH_OF_8 = gpt2.tiny(batch=8)[1]


def test_microbatches_cut_the_batch_alone():
    assert [tuple(x.shape) for x in microbatch(BATCH_OF_8, 4)] == [(2, 16), (2, 16)] and microbatch(BATCH_OF_8, 1) is BATCH_OF_8
    others = torch.tensor(8.0), torch.zeros(3, 8), 8
    assert microbatch((*BATCH_OF_8, *others), 2, 2)[2:] == others


test_what_does_not_divide_is_said = refusals(
    (lambda: divided(layers_of(capture_deep(*mlp.tiny(layers=8), training=True)[0]), 500), "expected at least 500, one per part"),
    (lambda: microbatch(BATCH_OF_8, 3), r"8 has no 3 equal microbatches; take one of 1, 2, 4, 8, or another batch"),
    (lambda: microbatch(BATCH_OF_8, 8, 2), r"8 has no 8 equal microbatches for 2 data-parallel ranks; take one of 1, 2, 4, or another"),
    (lambda: microbatch(BATCH_OF_8, 4, 3), r"8 has no 4 equal microbatches for 3 data-parallel ranks; take another batch"),
    (lambda: microbatch(BATCH_OF_8, 1, 3), r"8 has no equal parts for 3 data-parallel ranks; take another batch"),
)


def test_configurations_that_cannot_run_are_left_out_beside_others():
    model, inputs = gpt2.tiny(batch=8)
    rows, impossible = [Parallel(3), Parallel(2), Parallel(1, 3), Parallel(1, 1, 50, 2)], {}
    (only,) = simulate_grid(model, inputs, rows, mesh_of, impossible=impossible)
    assert only.parallel == rows[1] and set(impossible) == {rows[0], *rows[2:]}
    assert "no equal parts for 3 data-parallel ranks" in str(impossible[rows[0]]) and "tensor is 3" in str(impossible[rows[2]])
    assert "expected at least 50" in str(impossible[rows[3]])
    with pytest.raises(ValueError, match="3 data-parallel ranks"):
        simulate_grid(model, inputs, rows[:1], mesh_of, impossible={})
    with pytest.raises(ValueError, match="3 data-parallel ranks"):
        simulate_grid(model, inputs, rows[:2], mesh_of)


def test_the_trace_of_a_pipeline_is_what_perfetto_loads(simulations):
    one = simulations[Parallel(2, 2, 4, 4)]
    rows = check_trace(trace_of_run(one.run))
    assert len(rows) == 4 + 6  # four stages, three links there and back
    assert sum(len(events) for (_, thread), events in rows.items() if thread == 0) == len(one.run.spans)


def test_the_verb_answers_in_json_and_draws(tmp_path):
    trace, picture = tmp_path / "t.json", tmp_path / "p.png"
    words = [MODEL, "--set", "layers=4", "--data", "1,2", "--pipeline", "2", "--microbatches", "2,4", "--quiet"]
    record = record_of("simulate", *words, "--trace", str(trace), "--picture", str(picture))
    assert {"seconds", "peak_bytes", "stages", "schedule", "microbatches", "bubble", "exposed_communication_seconds"} < set(record)
    assert [(row["data"], row["pipeline"]) for row in record["configurations"]].count((2, 2)) == 2
    seconds = [row["seconds"] for row in record["configurations"]]
    assert seconds == sorted(seconds) and record["seconds"] == seconds[0] and len(seconds) == 4
    assert len(record["stages"]) == 2 and record["schedule"] == "1f1b"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    check_trace(json.loads(trace.read_text()))


def test_the_verb_takes_a_plan(tmp_path):
    plan, picture = str(tmp_path / "plan.json"), tmp_path / "p.svg"
    assert run("plan", MODEL, "--mesh", "2x2", "--train", "--no-baselines", "--quiet", "--out", plan)[0] == 0
    record = record_of("simulate", plan, "--trust", "--quiet", "--no-overlap", "--picture", str(picture))
    assert record["seconds"] == pytest.approx(record["cost_seconds"]) and record["peak_bytes"] == pytest.approx(record["plan_peak_bytes"])
    assert record["stages"][0]["mesh"] == [2, 2] and "<svg" in picture.read_text()[:500]
    code, out, _ = run("simulate", plan, "--trust", "--quiet")
    assert code == 0 and "per step" in out and "critical path" in out


NODES = dict(devices_per_node=2, intra_node_bandwidth=2e9, inter_node_bandwidth=1e9, device="cpu")
AT_THESE = ["--devices-per-node", "2", "--intra-node-bandwidth", "2GB/s", "--inter-node-bandwidth", "1GB/s", "--device", "cpu"]
LARGE = ["--set", "batch=4096"]


NOTHING_MEASURED = {
    "roofline": {"memory_bytes_per_second": 1e9, "launch_seconds": 1e-6, "ops": []},
    "measured": {"collectives": [], "device": []},
    "assumptions": {},
}


def write_cluster(path, mesh) -> str:
    path.write_text(json.dumps({"format": "autoshard.cluster/1", "complete": True, "mesh": mesh.to_dict(), **NOTHING_MEASURED}))
    return str(path)


def slower(mesh):
    """With a measured curve on its first axis: 5 ms for a collective of 1 MB."""
    curves = tuple(LinkCurve(c, (1e3, 1e6), (1e-3, 5e-3), 4e-9) for c in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
    return replace(mesh, axes=(replace(mesh.axes[0], curves=curves), *mesh.axes[1:]))


@pytest.fixture(scope="module")
def cut_batch(tmp_path_factory):
    """A plan that cuts the batch over 2x2, so that the gradients of small parameters are reduced, and its mesh."""
    path, mesh = tmp_path_factory.mktemp("plan") / "plan.json", Mesh.from_bandwidths((2, 2), **NODES)
    pins, others = ["--pin", "*.weight=R,R", "--pin", "*.bias=R,R", "--pin", "input_0=S(0),S(0)"], ["--objective", "serial", "--quiet"]
    assert run("plan", MODEL, *LARGE, "--mesh", "2x2", "--train", *AT_THESE, *pins, *others, "--out", str(path))[0] == 0
    return str(path), mesh


def answer(*arguments):
    """The record, and what is said beside it."""
    code, out, err = run("simulate", *arguments, "--json")
    assert code == 0, err
    return json.loads(out), "".join(line for line in err.splitlines(True) if not line.endswith("...\n"))  # what a slow machine waits for


def test_a_plan_under_measured_prices(tmp_path, cut_batch):
    plan, mesh = cut_batch
    own, _ = answer(plan, "--trust")
    same, _ = answer(plan, "--trust", "--cluster", write_cluster(tmp_path / "same.json", mesh))
    assert same.pop("cost_seconds") == pytest.approx(own.pop("cost_seconds")) and same == own
    slow = slower(mesh)
    record, _ = answer(plan, "--trust", "--cluster", write_cluster(tmp_path / "slow.json", slow))
    model, inputs = mlp.tiny(batch=4096)
    assert record["seconds"] == simulate(model, inputs, load(plan), mesh=slow).seconds > 2 * own["seconds"]
    serial, _ = answer(plan, "--trust", "--no-overlap", "--cluster", str(tmp_path / "slow.json"))
    assert serial["seconds"] == pytest.approx(serial["cost_seconds"]) and record["cost_seconds"] == serial["cost_seconds"]
    write_cluster(tmp_path / "other.json", Mesh.from_bandwidths((4,)))
    code, out, err = run("simulate", plan, "--trust", "--cluster", str(tmp_path / "other.json"))
    assert (code, out) == (2, "") and "planned for mesh 2x2, but this mesh is 4" in err.splitlines()[-1] and "Traceback" not in err


def test_no_join_reduces_gradients_one_by_one(cut_batch):
    plan, _ = cut_batch
    joined, apart = (answer(plan, "--trust", *flags)[0] for flags in ([], ["--no-join"]))
    model, inputs = mlp.tiny(batch=4096)
    assert apart["communication_seconds"] == simulate(model, inputs, load(plan), join=False).communication_seconds
    assert apart["communication_seconds"] > 1.2 * joined["communication_seconds"]  # eight reductions pay latency, not one
    assert apart["compute_seconds"] == joined["compute_seconds"]


def test_a_model_fills_a_measured_cluster(tmp_path):
    mesh = Mesh.from_bandwidths((2, 2), **NODES)
    cluster = write_cluster(tmp_path / "cluster.json", mesh)
    words = [MODEL, *LARGE, "--data", "1,2", "--tensor", "1,2", "--pipeline", "1,2", "--microbatches", "2"]
    record, said = answer(*words, "--cluster", cluster)
    assert said == f"3 of 8 combinations fill {cluster}, measured as 2x2; the others are left out\n"
    degrees = {(row["data"], row["tensor"], row["pipeline"]): row["seconds"] for row in record["configurations"]}
    assert set(degrees) == {(2, 2, 1), (2, 1, 2), (1, 2, 2)}
    nominal, said = answer(*words, *AT_THESE)
    assert said == "" and len(nominal["configurations"]) == 8
    free = {(row["data"], row["tensor"], row["pipeline"]): row["seconds"] for row in nominal["configurations"]}
    assert degrees == {key: seconds for key, seconds in free.items() if key in degrees}
    slow, _ = answer(*words, "--cluster", write_cluster(tmp_path / "slow.json", slower(mesh)))
    for row in slow["configurations"]:  # the slow axis is the pipeline's, or the data's where there are no stages
        assert row["seconds"] > 1.1 * degrees[row["data"], row["tensor"], row["pipeline"]]


GPT2 = "models/gpt2.py:tiny"
FILLED = ["--cluster", "FILE"]
NO_USE = [
    ([MODEL, *FILLED, "--data", "4"], "measured as 2x3; expected --pipeline, --data and --tensor of these sizes, in this order"),
    ([MODEL, *FILLED, "--data", "3", "--tensor", "2"], "was measured as 2x3; expected"),
    ([MODEL, *FILLED, "--devices-per-node", "2"], "--devices-per-node has no effect beside --cluster, where it was measured; leave it out"),
    ([MODEL, "--cluster", "nothing.json"], "there is no file nothing.json"),
    ([MODEL, "--no-join"], "--no-join has no effect on a model"),
]
BAD = [
    (["nothing.json"], "there is no file nothing.json"),
    ([GPT2, "--data", "two"], "--data is 'two'; expected whole numbers"),
    ([GPT2, "--microbatches", "3"], "a batch of 8 has no 3 equal microbatches"),
    ([GPT2, "--data", "3,5"], "a batch of 8 has no equal parts for 3 data-parallel ranks; take another batch"),
    ([GPT2, "--schedule", "1f2b"], "--schedule is '1f2b'"),
    ([GPT2, "--scheme", "best"], "scheme is 'best'; expected one of auto"),
    ([GPT2, "--pipeline", "99", "--microbatches", "2"], "expected at least 99"),
    ([GPT2, "--picture", "/nowhere/p.png"], "--picture /nowhere/p.png: there is no folder"),
    ([GPT2, "--picture", "time.line"], "expected one of .png, .svg, .pdf"),
    (["solutions/gpt2-small-2x4.json", "--data", "2"], "is a plan, whose mesh is known"),
    ([GPT2, "--data", "12", "--devices-per-node", "8"], "12 devices do not fill nodes of 8; give --devices-per-node a divisor of 12"),
]


@pytest.mark.parametrize(("words", "sentence"), [*NO_USE, *(([*words, "--quiet"], sentence) for words, sentence in BAD)])
def test_words_that_are_refused(tmp_path, words, sentence):
    cluster = write_cluster(tmp_path / "cluster.json", Mesh.from_bandwidths((2, 3)))
    assert sentence in refusal("simulate", *(cluster if word == "FILE" else word for word in words))

"""The whole search on tiny models: never slower than what it was compared with, within memory, the same through an executor."""

import csv
import io
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from rich.console import Console

from autoshard.cli import main
from autoshard.mesh import DEVICES_PER_NODE, Axis, Device, Mesh
from autoshard.pipeline.choices import place
from autoshard.pipeline.microbatches import microbatch
from autoshard.pipeline.pipelines import pipeline
from autoshard.pipeline.search import ROOM, Choices
from autoshard.pipeline.stage_division import SubMesh, Tiling
from autoshard.pipeline.submeshes import Cluster, Kind
from autoshard.planning.mesh_shapes import mesh_shapes
from autoshard.planning.options import Infeasible
from autoshard.report.pipeline import pipeline_report, plot_speed_up
from autoshard.solution import Pipeline
from autoshard.units import seconds
from models import mlp
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import assert_refused

SLOW = Device("slow", 1e9, 1e9, 1e9, 1e9, launch=1e-7)  # links are fast beside it, so that tiny models are cut


def model():
    return mlp.tiny(layers=4, batch=16)


@cache
def found() -> Pipeline:
    return pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(1, 4))


def test_the_best_is_never_slower_than_any_configuration():
    best = found()
    rows = [row for row in best.configurations if row["fits"]]
    assert best.seconds == rows[0]["seconds"] == min(row["seconds"] for row in rows)
    assert {row["way"] for row in rows} == {"planned", "equal", "grid"}
    assert best.bound <= best.seconds and rows[0]["exact"]
    grid = {(row["data"], row["tensor"], row["pipeline"]) for row in rows if row["way"] == "grid"}
    points = {(d, h, 4 // (d * h)) for d in (1, 2, 4) for h in (1, 2, 4) if 4 % (d * h) == 0}
    assert {(4, 1, 1), (2, 2, 1), (1, 4, 1)} <= grid <= points  # one stage is never left out
    told = best.to_dict(layouts=False)
    assert_stays("rooms/pipeline.json", {key: value for key, value in told.items() if key not in ("seconds_spent", "assumptions")})


def test_with_further_limits_nothing_is_left_out_and_the_best_is_the_same():
    every = pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(1, 4), budgets=(1e9,))
    grid = {(row["data"], row["tensor"], row["pipeline"]) for row in every.configurations if row["way"] == "grid"}
    assert grid == {(d, h, 4 // (d * h)) for d in (1, 2, 4) for h in (1, 2, 4) if 4 % (d * h) == 0}
    assert every.seconds == found().seconds and every.stages == found().stages


def test_stages_cover_the_model_and_no_device_serves_two():
    best = found()
    assert [s.first for s in best.stages] == [0, *(s.last for s in best.stages[:-1])]
    ranks = [rank for s in best.stages if s.group == best.stages.index(s) for rank in s.devices]
    assert len(ranks) == len(set(ranks)) and set(ranks) <= set(range(4))
    names = set(dict(model()[0].named_parameters()))
    assert {name for s in best.stages for name in s.parameters} == names


def test_an_executor_gives_the_same():
    with ThreadPoolExecutor(2) as executor:
        other = pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(1, 4), executor=executor)
    assert other.configurations == found().configurations and other.stages == found().stages


def test_a_limit_is_kept_and_without_room_it_says_what_would_do():
    peak = min(row["peak_bytes"] for row in found().configurations)
    tight = pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(4,), memory_limit=1.3 * peak, grid=False)
    assert tight.peak_bytes <= 1.3 * peak
    with pytest.raises(Infeasible, match=r"raise the memory limit to [1-9][\d.]* kB") as refused:
        pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(4,), memory_limit=peak / 20, recompute="never", grid=False)
    assert "allow recomputation" in str(refused.value)
    assert refused.value.smallest_limit is not None and refused.value.smallest_limit[0] > peak / 20


def test_with_a_number_of_stages_the_limit_is_named_that_these_need():
    peak = min(row["peak_bytes"] for row in found().configurations)
    asked = {"microbatches": (4,), "stages": 3, "grid": False}
    with pytest.raises(Infeasible, match="no pipeline of 3 stages fits in .*raise the memory limit to") as refused:
        pipeline(*model(), Cluster.of(4, device=SLOW), memory_limit=peak / 20, **asked)
    least = refused.value.smallest_limit[0]
    fitting = pipeline(*model(), Cluster.of(4, device=SLOW), memory_limit=1.001 * least, **asked)
    assert fitting.peak_bytes <= 1.001 * least and len(fitting.stages) == 3
    with pytest.raises(Infeasible, match="raise the memory limit to .* or more") as refused:  # of another schedule than the estimates'
        pipeline(*model(), Cluster.of(4, device=SLOW), memory_limit=peak / 20, schedules=("zb_h1",), **asked)
    assert refused.value.smallest_limit is None


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_as_many_stages_as_asked_for_use_all_devices(stages):
    best = pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(4,), schedules=("1f1b",), stages=stages, budgets=(1e12,))
    assert len(best.stages) == stages == best.budgets[0]["stages"]
    assert sorted(rank for stage in best.stages for rank in stage.devices) == [0, 1, 2, 3]
    assert best.exposed_communication >= 0


@pytest.mark.parametrize("stages", [1, 3])
def test_a_schedule_of_equal_groups_alone_is_refused_where_there_are_none(stages):
    sentence = rf"interleaved_1f1b has no pipeline of {stages} stages? on 4 devices: it divides the program, which has \d+ layers"
    with pytest.raises(Infeasible, match=sentence):
        pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(4,), schedules=("interleaved_1f1b",), stages=stages)


def test_unequal_nodes_are_used_by_speed():
    kinds = (Kind(1, 2, SLOW), Kind(1, 2, Device("fast", 4e9, 4e9, 4e9, 1e9, launch=1e-7)))
    best = pipeline(*model(), Cluster(kinds), microbatches=(4,), schedules=("1f1b",))
    work = {"slow": 0, "fast": 0}
    for stage in best.stages:
        work[stage.device] += stage.last - stage.first
    assert work["fast"] > work["slow"]


def test_a_batch_that_does_not_divide_is_refused():
    assert_refused("a batch of 16 has no 3 equal microbatches; take one of 1, 2, 4, 8, 16", microbatch, model()[1], 3)


def test_devices_that_fill_no_whole_nodes_are_refused():
    assert_refused("12 devices do not fill nodes of 8; give devices_per_node a divisor of 12, for example 4", Cluster.of, 12)


def test_stages_are_placed_on_nodes_with_room():
    cluster = Cluster.of(16)
    sizes = [SubMesh(0, 1, 4), SubMesh(0, 1, 8), SubMesh(0, 1, 4)]
    assert place(sizes, cluster) == [(8, 9, 10, 11), tuple(range(8)), (12, 13, 14, 15)]
    assert_refused("don't fit", place, [SubMesh(0, 1, 8)] * 3, cluster)


def test_the_verb_prints_one_object_and_writes_files(tmp_path, capsys):
    files = {name: str(tmp_path / f"p.{name}") for name in ("json", "csv", "png")}
    code = main(
        ["pipeline", "models/mlp.py:tiny", "--set", "layers=4", "--devices", "2", "--device", "cpu", "--microbatches", "2",
         "--workers", "1", "--schedules", "1f1b", "--json", "--out", files["json"], "--csv", files["csv"], "--plot", files["png"]]
    )  # fmt: skip
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    keys = ("seconds", "peak_bytes", "stages", "schedule", "microbatches", "bubble", "exposed_communication_seconds", "configurations")
    assert all(key in printed for key in keys)
    assert json.load(open(files["json"]))["cost"] == printed["seconds"]
    rows = list(csv.DictReader(open(files["csv"])))
    assert len(rows) == len(printed["configurations"]) and float(rows[0]["seconds"]) == printed["seconds"]
    assert open(files["png"], "rb").read(4) == b"\x89PNG"


def last_line(err: str) -> str:
    """The last line: progress is before it on a slow machine."""
    return err.splitlines()[-1]


def test_the_verb_says_no(capsys):
    words = ["pipeline", "models/mlp.py:tiny", "--devices", "2", "--microbatches", "2", "--workers", "1", "--no-grid"]
    assert main([*words, "--memory", "1kB"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and last_line(err).startswith("autoshard: no pipeline fits") and "raise the memory limit" in err
    assert main([*words, "--memory", "1kB", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"status": "infeasible", "message": last_line(err).removeprefix("autoshard: "), "configurations": []}
    assert main([*words[:2], "--set", "layers=1", "--devices", "16", "--stages", "16", *words[4:]]) == 1
    assert "stages is 16, but the program divides into" in last_line(capsys.readouterr()[1])
    assert main([*words, "--plot", "speed.gif"]) == 2
    assert "--plot speed.gif ends in .gif; expected one of .png, .svg, .pdf" in capsys.readouterr().err
    assert main(["pipeline", "models/mlp.py:tiny", "--devices", "2", "--nodes", "1x2"]) == 2
    assert "either --devices 16, or --nodes" in capsys.readouterr().err
    assert main(["pipeline", "models/mlp.py:tiny", "--devices", "2", "--schedules", "2f2b", "--workers", "1"]) == 2
    assert "expected one of" in capsys.readouterr().err


def scaled(limit: float) -> Pipeline:
    """Planned within `limit` bytes, in units of the least peak of all configurations."""
    least = min(row["peak_bytes"] for row in found().configurations)
    return pipeline(*model(), Cluster.of(4, device=SLOW), microbatches=(4,), schedules=("1f1b",), memory_limit=limit * least, grid=False)


def printed(record: Pipeline) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(pipeline_report(record))
    return console.export_text()


def said(record: Pipeline) -> str:
    return printed(record).partition("Fewer devices")[2]


def in_a_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("count", "unlisted"), [(12, None), (13, "and 1 more: --csv writes all")])
def test_configurations_that_are_not_shown_are_counted(count, unlisted):
    text = printed(replace(found(), configurations=found().configurations[:count]))
    assert len(found().configurations) >= count and (unlisted in text if unlisted else "more:" not in text)


def test_speed_up_is_over_the_fewest_devices():
    rows = found().speed_up
    assert [row["devices"] for row in rows] == [1, 2, 4]
    assert rows[0]["speed_up"] == pytest.approx(1.0) and all(math.isfinite(row["speed_up"]) for row in rows)
    assert "count as" not in said(found())


def test_speed_up_says_what_the_fewest_devices_that_fit_count_as():
    some = scaled(2.0)
    one, two, four = some.speed_up
    assert (one["seconds"], one["speed_up"], two["speed_up"]) == (None, None, 2.0)
    assert four["speed_up"] == pytest.approx(2 * two["seconds"] / four["seconds"])
    assert "does not fit" in said(some) and "2 devices, the fewest that fit, count as 2" in in_a_line(said(some))


def test_speed_up_is_empty_where_all_devices_are_the_fewest_that_fit(tmp_path):
    only = scaled(1.3)
    assert [(row["devices"], row["seconds"] is not None, row["speed_up"]) for row in only.speed_up] == [
        (1, False, None), (2, False, None), (4, True, None),
    ]  # fmt: skip
    *_, last = (line for line in said(only).splitlines() if "│" in line)
    assert [cell.strip() for cell in last.split("│")[1:-1]] == ["4", seconds(only.seconds), "-"] and "count as" not in said(only)
    assert [row["speed_up"] for row in only.to_dict()["speed_up"]] == [None, None, None]
    for name, record in (("only", only), ("kinds", replace(found(), speed_up=())), ("all", found())):
        plot_speed_up(record, tmp_path / f"{name}.svg")
        assert ("no fewer devices to compare with" in (tmp_path / f"{name}.svg").read_text()) == (name != "all")


def test_a_node_has_as_many_devices_as_with_mesh_auto():
    assert Cluster.of(2 * DEVICES_PER_NODE).kinds == (Kind(2, DEVICES_PER_NODE),)
    assert mesh_shapes(2 * DEVICES_PER_NODE) == mesh_shapes(2 * DEVICES_PER_NODE, DEVICES_PER_NODE)


def by_links(bandwidth, schedules=("1f1b", "interleaved_1f1b")):
    cluster = Cluster.of(4, device=SLOW, intra_node_bandwidth=bandwidth)
    return pipeline(*mlp.tiny(layers=8, batch=16), cluster, microbatches=(4,), schedules=schedules, stages=4, grid=False)


def test_interleaving_is_chosen_where_links_are_fast_and_not_where_they_are_slow():
    fast, slow = by_links(300e9), by_links(3e6)
    assert fast.schedule == "interleaved_1f1b" and len(fast.stages) == 8 and fast.num_groups == 4
    assert slow.schedule == "1f1b" and len(slow.stages) == 4  # an interleaved step sends twice as often


def test_the_halves_of_a_backward_pass_fill_the_bubble():
    both = by_links(300e9, ("1f1b", "zb_h1"))
    assert both.schedule == "zb_h1" and both.bubble < min(row["bubble"] for row in both.configurations if row["schedule"] == "1f1b")


def test_only_as_many_stages_as_are_asked_for():
    assert {row["pipeline"] for row in by_links(300e9).configurations} == {4}
    assert_refused("stages is 0; expected a whole number of 1 or more", pipeline, *model(), Cluster.of(4), stages=0)


def test_as_many_stages_as_asked_for_leave_no_device_idle(monkeypatch):
    """With links of so long a latency two stages on a device each are faster, and can't be run on these four devices."""
    axes = (Axis("a", 2, 1.2e7, 1e-5, shared_by=2, backend="gloo"), Axis("b", 2, 2.5e9, 2.3e-4, backend="gloo"))

    def devices() -> list[tuple[int, ...]]:
        cluster = Cluster((Kind(2, 2, measured=Mesh(axes, SLOW)),))
        small = mlp.mlp(batch=64, width=16, hidden=32, layers=4, loss=True)
        stages = pipeline(*small, cluster, microbatches=(16,), schedules=("1f1b",), stages=2, grid=False).stages
        return [stage.devices for stage in stages]

    assert devices() == [(0, 1), (2, 3)]
    search = sys.modules["autoshard.pipeline.pipelines"]._Search
    monkeypatch.setattr(search, "_in_use", lambda search, configurations: configurations)
    monkeypatch.setattr(Tiling, "full", -1)
    assert devices() == [(0,), (1,)]


SHAPES = {
    (1, 1): [(1,)], (1, 3): [(3,)], (1, 4): [(2, 2)], (1, 6): [(2, 3)], (1, 7): [(7,)], (1, 8): [(2, 4)], (1, 12): [(3, 4)],
    (2, 1): [(2,)], (2, 2): [(2, 2)], (2, 3): [(2, 3)], (2, 4): [(2, 4), (4, 2)], (4, 8): [(4, 8), (8, 4)],
}  # fmt: skip


@pytest.mark.parametrize("nodes, devices", SHAPES)
def test_a_submesh_is_tried_as_nodes_by_devices_and_with_halves_of_nodes(nodes, devices):
    cluster = Cluster((Kind(nodes, devices, intra_node_bandwidth=8e9, inter_node_bandwidth=1e9),))
    meshes = cluster.meshes(next(s for s in cluster.submeshes if s.size == nodes * devices))
    assert [mesh.shape for mesh in meshes] == SHAPES[nodes, devices]
    crosses = [[nodes > 1 and math.prod(mesh.shape[k:]) > devices for k in range(len(mesh.axes))] for mesh in meshes]
    assert [[axis.bandwidth <= 1e9 for axis in mesh.axes] for mesh in meshes] == crosses


def test_measured_links_replace_bandwidths():
    axes = (Axis("a", 2, 1e6, 1e-3, shared_by=2, backend="gloo"), Axis("b", 2, 1e8, 1e-4, backend="gloo"))
    measured = Mesh(axes, SLOW)
    kind = Kind(2, 2, measured=measured)
    assert kind.mesh((2,)).axes[0].bandwidth == 1e8 and [axis.bandwidth for axis in kind.mesh((2, 2)).axes] == [1e6, 1e8]
    u = next(s for s in Cluster((kind,)).submeshes if s.size == 2)
    cluster = Cluster((kind,))
    k = cluster.submeshes.index(u)
    assert cluster.transfer_seconds([1e6])[0, k, k] == pytest.approx(1e-3 + 0.5e6 / 0.5e6)  # half of it per device, over half of the link
    assert_refused("expected one of", Kind, 2, 4, measured=measured)


@pytest.mark.parametrize(("everything", "below"), [(False, 2.0), (True, math.inf)])
def test_the_best_so_far_is_the_fastest_that_fits_and_is_wanted(everything, below):
    choices = Choices((), lambda c: c.seconds != 1.0, everything)
    rows = [SimpleNamespace(seconds=s, fits=fits) for s, fits in ((3.0, True), (2.0, True), (1.0, True), (0.5, False))]
    for some in (rows, rows[:1]):
        choices.add(SimpleNamespace(table=SimpleNamespace(K=4)), "grid", some)
        assert choices.below == below
    assert choices.configurations == {(4, "grid"): rows[:1]}
    planners = [SimpleNamespace(bound=ROOM * 2.0 * x) for x in (0.99, 1.0)]
    assert [choices.is_beyond(one) for one in planners] == [False, not everything]

"""The examples run, and say what is true."""

import ast
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoshard.cli import main
from models import gpt2
from tests.helpers_ranks import results

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LINES = 60  # an example has fewer


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name, capsys, *arguments):
    """What the script prints when it is run."""
    argv = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = argv
    return capsys.readouterr().out


def ranks(number, name, *arguments):
    """What the script prints on so many real processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number), "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


# -- what all of them are ------------------------------------------------------------------------------------------------------------


def faults(path):
    """What an example lacks: few lines, how it is run, a line in the lists."""
    text = path.read_text()
    lines, said = len(text.splitlines()), ast.get_docstring(ast.parse(text)) or ""
    found = [f"{lines} lines; an example has fewer than {LINES}"] * (lines >= LINES)
    found += [f"the docstring does not say how to run examples/{path.name}"] * (f" examples/{path.name}" not in said)
    lists = [page for page in (ROOT / "README.md", ROOT / "docs" / "index.md") if f"examples/{path.name}" not in page.read_text()]
    return found + [f"{page.name} does not list it" for page in lists]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_can_be_found(path):
    assert faults(path) == []


def test_a_faulty_example_is_seen(tmp_path):
    (tmp_path / "long.py").write_text('"""Run me."""\n' + "pass\n" * (LINES - 1))
    assert len(faults(tmp_path / "long.py")) == 4


# -- one by one ----------------------------------------------------------------------------------------------------------------------


def test_the_pass_in_a_compiler_pipeline():
    example = load("compiler_pipeline")
    graph, info = example.pipeline(example.MLP(64), (torch.empty(512, 64),))
    held = example.local_bytes(graph)
    assert {"x", "up", "gelu", "down", "add"} <= set(held) and 0 <= info["gap"] < 0.1
    cut = [node.meta["autoshard"].num_shards for node in graph.graph.nodes if node.name == "x"]
    assert held["x"] == 512 * 64 * 4 // cut[0]


def test_an_exported_program_is_sharded_and_checked(capsys):
    said = script("exported_program", capsys)
    assert said.startswith("optimal: ") and said.splitlines()[-1] == "verified: True"
    rows = dict(re.findall(r"^ *(\S+) \(([\d, ]*)\)$", said, re.M))
    assert rows["linear"].split(", ")[-1] == "192" and len(rows) > 30


def test_a_deployed_plan_is_read_and_not_made_again(tmp_path, capsys):
    first = script("deploy_preloaded", capsys, tmp_path / "plan.json")
    assert (tmp_path / "plan.json").exists()
    again = script("deploy_preloaded", capsys, tmp_path / "plan.json")
    assert "planning took 0.00 s" in again and again.splitlines()[1:] == first.splitlines()[1:]
    assert "with a batch of 1: " in again and "leaves some ranks without any" in again


def test_a_launcher_lays_parameters_out_by_the_map(tmp_path):
    plan, sharding = str(tmp_path / "mlp.json"), str(tmp_path / "map.pkl")
    model = ["models/mlp.py:tiny", "--set", "loss=0", "--mesh", "2x2", "--memory", "30kB", "--no-baselines"]
    model += ["--objective", "serial", "--quiet"]
    assert main(["plan", f"{ROOT}/{model[0]}", *model[1:], "--out", plan]) == 0
    assert main(["export", plan, "--format", "sharding_map", "--out", sharding, "--quiet"]) == 0
    whole = 2 * (2 * 32 * 64 + 64 + 32) * 4  # two blocks: two weights, two biases, float32
    for got, expected, held in results(4, launched, sharding):
        assert torch.allclose(got, expected, atol=1e-5) and held < whole


def launched(rank, path):
    return load("launch_sharding_map").run(path)


def test_the_frontier_falls_and_its_points_are_proven(capsys, tmp_path):
    said = script("memory_frontier", capsys, tmp_path)
    rows = re.findall(r"([\d.]+) MB  ([\d.]+) ms, .* (optimal|proven|feasible), gap", said)
    assert len(rows) > 2 and rows[-1][2] == "optimal"
    points = json.loads((tmp_path / "frontier.json").read_text())["points"]
    assert all(a["seconds"] > b["seconds"] for a, b in zip(points, points[1:], strict=False))
    assert len(points) == len(rows) == len(list(tmp_path.glob("plan*.json")))


def test_explained_layouts_cost_what_a_pin_does(capsys, tmp_path):
    said = script("explain_layout", capsys, tmp_path / "report.html")  # asserts that explain and a pinned plan agree
    assert "layers.0.up.weight: S(1),S(0) -> S(1),R" in said
    assert all(float(times) >= 1 for times in re.findall(r": ([\d.]+) times as long", said))
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_a_simulated_step_hides_communication(capsys, tmp_path):
    said = script("simulate_step", capsys, tmp_path / "trace.json")
    alone, overlapped = map(float, re.search(r"one after the other ([\d.]+) ms, with overlap ([\d.]+)", said).groups())
    critical = [float(ms) for ms in re.findall(r"critical path: \w+ ([\d.]+) ms", said)]
    assert overlapped < alone and sum(critical) == pytest.approx(overlapped, abs=0.02 * len(critical))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_pipeline_stages_are_no_slower_than_the_grid(capsys, tmp_path):
    said = script("pipeline_stages", capsys, tmp_path / "schedule.png")
    best = float(re.match(r"([\d.]+) ms per step", said)[1])
    grid = [float(ms) for ms in re.findall(r"^([\d.]+) ms with data", said, re.M)]
    assert len(grid) == 3 and best <= min(grid)
    assert (tmp_path / "schedule.png").read_bytes()[:4] == b"\x89PNG"


def test_a_weight_is_brought_where_it_is_served(capsys):
    said = script("redistribute_weight", capsys)  # asserts that every rank ends with its part
    times = [int(us) for us in re.findall(r": (\d+) us, ", said)]
    assert len(times) == 2 and times[0] < times[1]


def test_links_are_calibrated_from_a_log(capsys):
    said = script("calibrate_links", capsys)
    assert float(re.search(r"([\d.]+)% off on sizes held out", said)[1]) < 10
    assert re.search(r"data sheet: ([\d.]+)", said)[1] != re.search(r"measured: ([\d.]+)", said)[1]


def test_embedding_tables_are_laid_out(capsys):
    said = script("embedding_tables", capsys)
    slowest, bound = map(float, re.search(r"takes ([\d.]+) ms, and in no plan less than ([\d.]+)", said).groups())
    loads = [float(ms) for ms in re.findall(r"^device \d: ([\d.]+) ms", said, re.M)]
    assert bound <= slowest == max(loads) and len(loads) == 8
    assert "with 1 GB per device: the tables do not fit" in said


def test_the_first_weights_of_gpt2_are_those_of_their_seed():
    module = gpt2.initialised(gpt2.tiny(vocab=256)[0])
    again, other = (dict(gpt2.initialised(gpt2.tiny(vocab=256)[0], seed).named_parameters()) for seed in (0, 1))
    for name, parameter in module.named_parameters():
        expected = (0.0, 0.02) if parameter.dim() > 1 else (float("ln" in name and name.endswith("weight")), 0.0)
        assert (parameter.mean().item(), parameter.std().item()) == pytest.approx(expected, abs=2e-3), name
        assert torch.equal(parameter, again[name]) and torch.equal(parameter, other[name]) == (parameter.dim() == 1)


@pytest.mark.slow  # three runs of four processes
def test_training_goes_on_another_mesh_as_if_it_had_not_stopped(tmp_path):
    plan = [f"{ROOT}/models/gpt2.py:tiny", "--set", "vocab=256", "--train", "--no-baselines", "--quiet"]
    for mesh in ("2x2", "4x1"):
        assert main(["plan", *plan, "--mesh", mesh, "--out", str(tmp_path / f"{mesh}.json")]) == 0
    text, run = ROOT / "LICENSE", tmp_path / "run"
    said = [
        ranks(4, "train_gpt2", tmp_path / "2x2.json", text, "--steps", 6).stdout,
        ranks(4, "train_gpt2", tmp_path / "2x2.json", text, "--steps", 3, "--checkpoint", run).stdout,
        ranks(4, "train_gpt2", tmp_path / "4x1.json", text, "--steps", 6, "--resume", run).stdout,
    ]
    whole, begun, resumed = ([float(loss) for loss in re.findall(r"loss ([\d.]+)", one)] for one in said)
    assert len(whole) == 6 and begun + resumed == pytest.approx(whole, rel=1e-4)
    refused = ranks(2, "train_gpt2", tmp_path / "2x2.json", text)
    assert refused.returncode != 0 and "error: 2 ranks run, but the plan is for 4 on a mesh of 2x2" in refused.stderr


@pytest.mark.slow
def test_a_served_llama_answers_as_the_whole_one(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **load("serve_llama").TINY)).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.tensor([[1, 7, 42]])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    done = ranks(2, "serve_llama", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.search(r"tokens \[(.*)\]", done.stdout)
    assert said and [int(token) for token in said[1].split(",")] == tokens[0].tolist()
    assert "s as exported" in done.stdout


@pytest.mark.slow  # three runs of four processes
def test_a_pipeline_goes_on_with_other_stages_as_if_it_had_not_stopped(tmp_path):
    plan = [f"{ROOT}/models/gpt2.py:tiny", "--set", "vocab=256", "--batch", "8", "--devices", "4", "--microbatches", "4"]
    for stages in ("2", "4"):
        options = ["--stages", stages, "--schedules", "1f1b", "--no-grid", "--workers", "1", "--quiet"]
        assert main(["pipeline", *plan, *options, "--set", "layers=4", "--out", str(tmp_path / f"{stages}.json")]) == 0
    text, run = ROOT / "LICENSE", tmp_path / "run"
    said = [
        ranks(4, "train_pipeline", tmp_path / "2.json", text, "--steps", 6).stdout,
        ranks(4, "train_pipeline", tmp_path / "2.json", text, "--steps", 3, "--checkpoint", run).stdout,
        ranks(4, "train_pipeline", tmp_path / "4.json", text, "--steps", 6, "--resume", run, "--schedule", "zb_h1").stdout,
    ]
    whole, begun, resumed = ([float(loss) for loss in re.findall(r"loss ([\d.]+)", one)] for one in said)
    assert len(whole) == 6 and begun + resumed == pytest.approx(whole, rel=1e-4)


# -- reinforcement learning on four ranks ------------------------------------------------------------------------------------------------


SCRIPT = str(ROOT / "examples" / "grpo_loop.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0", "--rdzv-backend", "c10d"]


def losses_of_grpo(*words):
    done = subprocess.run([sys.executable, *words, SCRIPT], capture_output=True, text=True, timeout=600, cwd=ROOT)
    said = [(float(r), float(x)) for r, x in re.findall(r"reward ([\d.]+), loss (-?[\d.]+)", done.stdout)]
    assert done.returncode == 0 and len(said) == 4, done.stderr[-2000:]
    return said


@pytest.mark.slow
def test_the_losses_are_those_of_one_process():
    alone, ranks = losses_of_grpo(), losses_of_grpo(*TORCHRUN, "--rdzv-endpoint", "localhost:0")
    assert [reward for reward, _ in alone] == [reward for reward, _ in ranks]
    assert all(abs(a - b) < 1e-5 for (_, a), (_, b) in zip(alone, ranks, strict=True)) and len({loss for _, loss in alone}) == 4

"""What a model or an option asks for and a plan does not do is said."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from autoshard import api
from autoshard.capture import capture_deep
from autoshard.cli.app import app
from autoshard.mesh import Mesh
from autoshard.report.planned import planned_report
from autoshard.report.terminal import as_text
from tests.helpers_models import Model

ROOT = Path(__file__).parent.parent
MESH = Mesh.from_bandwidths((2,))


def deep(layers, how):
    """Residual blocks, each in a checkpoint where one says how."""

    def forward(m, x):
        for layer in m.layers:
            x = layer(x) if how is None else checkpoint(layer, x, **how)
        return x.square().mean()

    with torch.device("meta"):
        blocks = [Model(lambda m, x: x + m.b(torch.relu(m.a(x))), a=nn.Linear(16, 32), b=nn.Linear(32, 16)) for _ in range(layers)]
    return Model(forward, layers=nn.ModuleList(blocks))


def plan(how, training=True, layers=2):
    return api.plan(deep(layers, how), (torch.empty(8, 16, device="meta"),), MESH, training=training, baselines=False, objective="serial")


@pytest.mark.parametrize("how", [{"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_a_checkpoint_in_the_forward_is_said_to_be_ignored(how):
    solution, plain = plan(how), plan(None)
    assert solution.ignored.startswith("torch.utils.checkpoint in the forward")
    assert "recompute=N" in solution.ignored
    assert "ignored torch.utils.checkpoint" in " ".join(as_text(planned_report(solution)).split())
    assert solution.peak_bytes == plain.peak_bytes  # nothing of it is in the plan
    assert plain.ignored is None and plan(how, training=False).ignored is None


def test_the_pass_says_it_too():
    options = {"training": True, "skip_forward": True, "ilp_solution_file": None}
    for how, key in (({"use_reentrant": False}, {"ignored"}), (None, set())):
        inputs = (torch.empty(8, 16, device="meta"),)
        _, info = api.autosharding_pass(deep(1, how), mesh_shape=(1, 2), example_inputs=inputs, **options)
        assert {"ignored"} & set(info["solution"].assumptions) == key


def test_a_model_captured_by_few_of_its_layers_says_it_too():
    _, depth = capture_deep(deep(30, {"use_reentrant": False}), (torch.empty(8, 16, device="meta"),), training=True)
    assert depth.tiled and depth.noted["ignored"] == depth.ignored != ""
    _, plain = capture_deep(deep(30, None), (torch.empty(8, 16, device="meta"),), training=True)
    assert plain.tiled and "ignored" not in plain.noted and asdict(plain)["ignored"] == ""


@pytest.mark.parametrize("verb", ["plan", "frontier"])
def test_the_help_says_that_master_weights_are_counted_only(verb):
    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
    words = " ".join(shown.replace("│", " ").split())
    assert "Count a float32 copy" in words and "Running a plan makes none." in words


@pytest.mark.parametrize("page", ["torch", "megatron", "nnscaler", "autoparallel"])
def test_the_pages_on_rivals_say_that_master_weights_are_counted(page):
    rows = [line for line in (ROOT / "docs" / "rivals" / f"{page}.md").read_text().splitlines() if "master_weights=True" in line]
    assert len(rows) == 1 and "master_weights=True` counts" in rows[0]

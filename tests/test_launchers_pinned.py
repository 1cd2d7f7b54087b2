"""The seconds beside the bound of `degrees` are those of a plan to which the row's scheme is pinned, solved with all layers and alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.api import degrees
from autoshard.capture import capture_deep
from autoshard.cli.launchers import model_builder
from autoshard.launch import Launch, Site
from autoshard.launch.best_degrees import mesh_of, recompute_of, scheme_of
from autoshard.launch.torchtitan import FLAVORS
from autoshard.planning.baselining import regret
from autoshard.planning.plan import baseline_only
from autoshard.planning.recomputing import with_recomputed_blocks
from models import llama
from tests.helpers_models import asked

ON_8 = Launch(8, 16, 16)
ROWS = {
    "data_parallel": replace(ON_8, data=8),
    "fsdp": replace(ON_8, data=8, shard=8, zero=3),
    "megatron": replace(ON_8, data=2, tensor=4, zero=0),
    "megatron_sp": replace(ON_8, data=2, tensor=4, zero=0, sequence_parallel=True),
    "megatron_fsdp": replace(ON_8, data=2, shard=2, zero=3, tensor=4, sequence_parallel=True),
}


def pinned(model, inputs, mesh, scheme, recompute):
    """The plan of a scheme alone, of the graph of all layers."""
    graph, _ = capture_deep(model, inputs, training=True)
    return baseline_only(with_recomputed_blocks(asked(graph, mesh, training=True, recompute=recompute)), scheme)


QUICK = [("megatron_fsdp", "none")]
CASES = [
    pytest.param(scheme, recompute, marks=[] if (scheme, recompute) in QUICK else pytest.mark.slow)
    for scheme in ROWS
    for recompute in ("none", "full")
]


@pytest.mark.parametrize(("scheme", "recompute"), CASES)
def test_a_row_costs_what_a_plan_with_its_scheme_pinned_does(scheme, recompute):
    launch = replace(ROWS[scheme], recompute=recompute)
    assert scheme_of(launch) == scheme
    mesh, asked = mesh_of(launch, Site(per_node=4)), recompute_of(launch)
    found = regret(*llama.tiny(), mesh, scheme, recompute=asked, gap=1.0)
    alone = pinned(*llama.tiny(), mesh, scheme, asked)
    assert alone.pinned_scheme == scheme and alone.status == "optimal"
    assert found.cost == pytest.approx(alone.cost, rel=1e-9) and found.peak_bytes == pytest.approx(alone.peak_bytes, rel=1e-9)


@pytest.mark.slow
def test_schemes_and_recomputation_change_the_seconds():
    """Equal seconds of two rows would make the test above blind to which of them is pinned."""
    mesh = mesh_of(ROWS["fsdp"], Site(per_node=4))
    rows = [("fsdp", 0), ("fsdp", "all"), ("megatron_fsdp", 0)]
    costs = [pinned(*llama.tiny(), mesh, scheme, asked).cost for scheme, asked in rows]
    assert len({f"{cost:.9e}" for cost in costs}) == len(rows)


@pytest.mark.slow  # plans of 8e9 and 70e9 parameters
@pytest.mark.parametrize(("flavor", "devices"), [("8B", 8), ("70B", 64)])
def test_the_best_row_of_a_large_model_costs_what_a_plan_says(flavor, devices):
    builder = model_builder(f"{Path(llama.__file__)}:llama3_{flavor.lower()}", {}, 8192)
    site = Site()
    answer = degrees(FLAVORS["llama3", flavor], Launch(devices, 8192, 512), site, model_of=builder)
    launch, record = answer.ranked.launch(answer.compared), answer.to_dict()["compared"]
    if flavor == "8B":
        assert answer.compared == 0  # the first row: FSDP
    alone = pinned(*builder(record["batch"]), mesh_of(launch, site), record["scheme"], record["recompute"])
    assert record["cost_seconds"] == pytest.approx(alone.cost, rel=1e-9) and answer.against.bound <= alone.cost

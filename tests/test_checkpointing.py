"""Recomputed blocks: the same numbers, fewer bytes, more seconds, and the choice between them."""

import pytest

from autoshard import Mesh
from autoshard.api import Infeasible, plan, verify
from autoshard.capture import capture
from autoshard.graph import checkpointed, forward_blocks
from autoshard.lower import run_global
from autoshard.lower.unsharded import run_unsharded
from models import bert, gpt2, llama

MESH = Mesh.from_bandwidths((2, 2), device="cpu")


@pytest.mark.parametrize("build", [gpt2.tiny, llama.tiny, bert.tiny], ids=["gpt2", "llama", "bert"])
@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_recomputing_changes_no_number(build, k):
    model, inputs = build(layers=3)
    graph = capture(model, inputs, training=True)
    assert len(forward_blocks(graph)) == 3
    values, _ = run_unsharded(model, inputs, graph, training=True, seed=0)
    plain, again = run_global(graph, values), run_global(checkpointed(graph, k), values)
    assert plain.keys() == again.keys()
    assert all((plain[key] == again[key]).all() for key in plain)


@pytest.mark.slow
def test_recomputed_plans_take_fewer_bytes_and_more_seconds_and_verify():
    model, inputs = gpt2.tiny(layers=4, seq=64, batch=16)
    plans = [plan(model, inputs, MESH, training=True, baselines=False, recompute=k) for k in (0, 2, "all")]
    assert plans[0].cost < plans[1].cost < plans[2].cost
    assert plans[0].peak_bytes > plans[1].peak_bytes > plans[2].peak_bytes
    small, small_inputs = gpt2.tiny(layers=4)
    assert verify(small, small_inputs, plans[2])["ok"]


@pytest.mark.slow
def test_auto_recomputes_only_what_the_limit_asks_for():
    model, inputs = gpt2.tiny(layers=4, seq=64, batch=16)
    free = plan(model, inputs, MESH, training=True, baselines=False)
    auto = plan(model, inputs, MESH, training=True, baselines=False, recompute="blocks")
    assert auto.recompute == 0 and auto.cost == free.cost
    with pytest.raises(Infeasible) as refused:
        plan(model, inputs, MESH, training=True, baselines=False, memory_limit=free.peak_bytes / 100)
    low, _ = refused.value.smallest_limit
    tight = plan(model, inputs, MESH, training=True, baselines=False, recompute="blocks", memory_limit=low * 0.98, gap=0.05, time_limit=60)
    assert tight.recompute > 0 and tight.peak_bytes <= low * 0.98


def test_a_wrong_number_of_blocks_is_one_sentence():
    model, inputs = gpt2.tiny()
    with pytest.raises(ValueError, match="expected a number of blocks, 'all', 'blocks' or 'auto'"):
        plan(model, inputs, MESH, training=True, recompute="some")

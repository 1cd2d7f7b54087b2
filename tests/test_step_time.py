"""Seconds of a step: beside torch's own schedules, unit by unit; and of more work."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

from autoshard.launch.block_time import Block
from autoshard.launch.launch_prices import Site, launch_seconds, prices_of
from autoshard.launch.launch_space import launches, structures
from autoshard.launch.legality import legal
from autoshard.launch.model_sizes import ModelSizes
from autoshard.launch.runs import LOOPED, V_SHAPED, Launch, TrainingRuns
from autoshard.launch.step_time import bubbles
from autoshard.launch.torchtitan import FLAVORS

KINDS = {_ComputationType.FORWARD: "F", _ComputationType.FULL_BACKWARD: "BW", _ComputationType.BACKWARD_INPUT: "B",
         _ComputationType.BACKWARD_WEIGHT: "W"}  # fmt: skip


def units_of(name, p, m, v):
    """Of each device, in order: kinds, stages and microbatches that it runs at once."""
    stages = [SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, stage_index=i, is_first=i == 0, is_last=False, submod=None,
                              has_backward=True, device="cpu", group=None) for i in range(v)]  # fmt: skip
    order = get_schedule_class(name)(stages, m, loss_fn=None).pipeline_order
    units = [[getattr(action, "sub_actions", None) or (action,) for action in order[rank] if action is not None] for rank in range(p)]
    return [[[(KINDS[one.computation_type], one.stage_index, one.microbatch_index) for one in some] for some in rank] for rank in units]


def seconds_of(name, p, m, v, times):
    """Of one pass, by running every unit as soon as what it reads is there; times of a device: F, B without W, W."""
    ready, clock, lists, last = {}, [0.0] * p, units_of(name, p, m, v), p * v - 1
    while any(lists):
        for rank, units in enumerate(lists):
            while units:
                needs = [("F", stage - 1, i) for kind, stage, i in units[0] if kind == "F" and stage]
                needs += [("B", stage + 1, i) if stage < last else ("F", stage, i) for kind, stage, i in units[0] if "B" in kind]
                if not all(need in ready for need in needs):
                    break
                took = sum(times[letter] / v for kind, *_ in units[0] for letter in kind)
                clock[rank] = max([clock[rank], *(ready[need] for need in needs)]) + took
                ready.update({(kind[0], stage, i): clock[rank] for kind, stage, i in units.pop(0)})
    return max(clock)


TIMES = ({"F": 1.0, "B": 1.0, "W": 1.0}, {"F": 1.3, "B": 1.4, "W": 1.0}, {"F": 1.0, "B": 1.0, "W": 0.7})


@pytest.mark.parametrize("name", [*LOOPED, *V_SHAPED])
def test_a_step_takes_as_long_as_torchs_list_of_units(name):
    within = {"InterleavedZeroBubble": (-1e-9, 0.14), "ZBVZeroBubble": (-0.04, 0.04), "DualPipeV": (-0.02, 0.02)}
    low, high = within.get(name, (-1e-9, 1e-9))
    for p, m in [(4, 1), (4, 3), (8, 1), (8, 2), (8, 7), (8, 8), (8, 16), (4, 32)]:
        for v in (2,) if name in V_SHAPED else (2, 4):
            if m < 2 * p and name == "DualPipeV":  # it refuses them
                continue
            columns = {"devices": p, "pipeline": p, "virtual": v, "global_batch": m, "data": 1, "microbatch": 1, "schedule": name}
            runs = TrainingRuns({key: np.array([value]) for key, value in columns.items()})
            for times in TIMES:
                one = Block({"matmul": times["W"], "elementwise": times["F"] - times["W"]}, {"matmul": times["B"] + times["W"]}, np.ones(1))
                work = sum(times.values())
                error = (m + (p - 1) * float(bubbles(runs, one)[0])) * work / seconds_of(name, p, m, v, times) - 1
                assert low < error < high, (name, p, m, v, times)


@pytest.mark.parametrize("launcher", ["torchtitan", "automodel", "megatron"])
def test_more_work_is_never_faster_though_more_hides_behind_it(launcher):
    """Parameters of experts and of the rest, and tokens on their way, hide behind the same kernels."""
    sizes, site = FLAVORS["qwen3", "235B-A22B"], Site(network=12e9)
    rows = TrainingRuns.joined(launches(structures(Launch(256, 4096, 1024), launcher), sizes, launcher))
    rows = rows[(rows.recompute == "none") & (rows.expert > 1)][::7]
    again = rows.with_columns(recompute=np.full(len(rows), "full"))
    both = legal(again, sizes, launcher)
    assert both.sum() > 100
    fast, slow = (prices_of(some[both], sizes, site, launcher).seconds for some in (rows, again))
    assert (slow >= fast).all()


@pytest.mark.parametrize("launcher, sizes, how", [
    ("automodel", FLAVORS["deepseek_v3", "16B"], {"data": 2, "shard": 2, "zero": 3, "recompute": "selective_op"}),
    ("megatron", FLAVORS["qwen3", "30B-A3B"], {"context": 2, "zero": 1, "expert_tensor": 8, "async_expert": True}),
])  # fmt: skip
def test_a_faster_link_is_never_slower_where_the_host_is_what_kernels_wait_for(launcher, sizes, how):
    """What hides behind collectives of tensor parallelism has less to hide behind; but the host's launches take as long as before."""
    run = TrainingRuns.of([Launch(16, 2048, 32, microbatch=4, tensor=8, sequence_parallel=True, expert=2, **how)])
    assert legal(run, sizes, launcher).all()
    seconds = [prices_of(run, sizes, Site(inside=inside), launcher).seconds.item() for inside in (3e11, 6e11, 3e12)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("launcher, how", [
    ("megatron", {"expert": 8}), ("megatron", {"expert": 8, "zero": 1}), ("torchtitan", {"zero": 3}),
])  # fmt: skip
def test_a_backward_hides_the_reduction_of_experts_gradients_for_as_long_as_it_takes(launcher, how):
    """Over the network go those of an eighth of the experts, at least once, beside half of the rest of the step; of FSDP in nodes, beside
    its transfers too."""
    sizes = ModelSizes(32, 4096, 14336, 32, 8, 32000, experts=8, active=2, expert_ffn=14336)
    runs = [TrainingRuns.of([Launch(n, 1024, n, data=n, shard=8 if how.get("zero") == 3 else n, **how)]) for n in (8, 64)]
    node, nodes = (launch_seconds(run, sizes, Site(), launcher) for run in runs)
    others = sum(seconds[0] for kind, seconds in nodes.items() if kind != "data parallel") + node["data parallel"][0]
    sent = 4 * sizes.expert_parameters / 8 / 50e9
    assert nodes["data parallel"][0] - node["data parallel"][0] > max(sent - others / 2, sent / 8)


def test_megatrons_shares_of_experts_gather_what_arrives():
    """Tokens go to the experts' nodes from the rank that has them, and to the other shares in a node (MoEAlltoAllTokenDispatcher)."""
    sizes = ModelSizes(56, 6144, 16384, 48, 8, 32768, experts=8, active=2, expert_ffn=16384)

    def sent(launcher: str, network: float = 50e9, **how) -> float:
        launch = Launch(128, 4096, 256, data=16, shard=16, zero=1, tensor=8, sequence_parallel=True, expert_tensor=8, **how)
        return launch_seconds(TrainingRuns.of([launch]), sizes, Site(network=network), launcher)["expert parallel"][0]

    assert sent("torchtitan") == 0 < sent("megatron") == sent("megatron", network=1e9)
    among = sent("megatron", expert=8) - sent("megatron")
    assert among == pytest.approx(sent("torchtitan", expert=8) / 8, rel=0.05)


def test_megatrons_virtual_stages_send_beside_their_work():
    """A fifth of a transfer that runs beside kernels is waited for; torch's stages wait for all of it."""

    def transfers(launcher, virtual):
        schedule = "Interleaved1F1B" if virtual > 1 else "1F1B"
        launch = Launch(32, 4096, 64, data=8, shard=8, zero=1, pipeline=4, virtual=virtual, schedule=schedule)
        return launch_seconds(TrainingRuns.of([launch]), FLAVORS["llama3", "8B"], Site(), launcher)["transfers"][0]

    assert transfers("megatron", 4) == pytest.approx(0.2 * 4 * transfers("megatron", 1), rel=1e-6)
    assert transfers("torchtitan", 4) == pytest.approx(4 * transfers("torchtitan", 1), rel=1e-6)


def test_automodels_norms_and_activations_are_one_kernel_each():
    """NeMo Automodel's Qwen3 30B-A3B makes 12,040 tokens/s on each of 8 H100 (docs/performance-summary.mdx)."""
    launch = Launch(8, 4096, 512, 4, data=8, shard=8, zero=2, expert=8, deepep=True, recompute="full", states16=True)
    run, sizes = TrainingRuns.of([launch]), FLAVORS["qwen3", "30B-A3B"]
    assert prices_of(run, sizes, Site(), "automodel").tokens_per_second[0] == pytest.approx(12040, rel=0.15)
    one, chains = (launch_seconds(run, sizes, Site(), launcher)["elementwise"][0] for launcher in ("automodel", "torchtitan"))
    assert one < chains / 2

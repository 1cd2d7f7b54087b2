"""Seconds, memory and figures derived from them of many launches of one model.

    tokens/s per device = global batch * seq / seconds / devices        MFU = FLOPs per token * tokens/s per device / peak

`step_time` and `peak_memory` know dense models: a mixture of experts computes as the dense model with the MLP that one token passes
through, and holds what is no routed expert. The rest is added here: all_to_all, what experts as measured take longer than that MLP, and the
states and transfers of their parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from autoshard.cost import ATTENTION_TILE, device_constants, experts_seconds, host_seconds, matmul_seconds, spread_of
from autoshard.devices import DEVICES

from .block_time import Block, Parts, RunConstants, block, of_each_kind
from .blocks_of_stages import Stages, stages
from .model_sizes import ModelSizes
from .peak_memory import USABLE, Kinds, Memory, chance_to_fit, in_flight, memory_of, state_bytes
from .runs import PRECISIONS, TrainingRuns, by_value, distinct
from .step_time import beside_block, gradient_seconds, left_of_backward, optimizer_bytes, stage_parameters, step_parts, transfers_of_fsdp

STACKS = {"megatron": "megatron_core", "deepspeed": "accelerate"}  # others have their own
HOST_MEMORY = 40e9  # bytes/s of a host's memory for each of its devices: 300 GB/s and more of 8
LIKELY = 0.5  # the chance from which on a launch fits
SHARE = 0.8  # of measured runs that an interval holds
# what limits kinds of seconds; others limit themselves
LIMITED = {"matmul": "compute", "attention": "compute", "elementwise": "memory bandwidth", "optimizer": "memory bandwidth"}
Only = Mapping[str, Iterable]  # values that columns of `TrainingRuns.degrees` may have
OF_MEMORY = ("structure", "expert", "expert_tensor", "gather8", "microbatch", "recompute")  # columns of a space that bytes depend on
OF_MODEL = ("layers", "width", "heads", "kv_heads", "head_dim", "vocab", "tied", "gated", "qk_norm")


@dataclass(frozen=True)
class Site:
    """Where it runs: a kind of device with constants of its own (`cost/devices`), and the network of its nodes."""

    device: str = "h100"
    per_node: int = 8
    memory: float = 80e9  # bytes of a device
    network: float = 50e9  # bytes/s of one device's adapter
    inside: float | None = None  # bytes/s of one device to the others of its node; None: as its constants have it
    memory_bias: float = 1.0  # measured / predicted bytes of own runs

    @property
    def usable(self) -> float:
        """Bytes up to which an answer is given without a warning."""
        return USABLE * self.memory

    @property
    def peak(self) -> float:
        """FLOP/s of 16-bit matmuls, from the data sheet."""
        return float(np.ravel(device_constants([self.device]).peak16)[0])

    @property
    def mfu_of(self) -> dict[str, Any]:
        """Of which peak an MFU is, whatever dtype matmuls run in."""
        return {"dtype": "16 bit", "flops": self.peak}


class LaunchPrices(NamedTuple):
    """One entry per launch."""

    seconds: np.ndarray  # of a step
    bytes: np.ndarray  # of the fullest device, contexts among them
    tokens_per_second: np.ndarray  # of one device
    mfu: np.ndarray
    chance: np.ndarray  # to fit
    fits: np.ndarray  # more likely than not

    @property
    def expected(self) -> np.ndarray:
        """Tokens/s of one device times the chance to fit."""
        return self.tokens_per_second * self.chance


def priced_runs(launches: TrainingRuns, sizes: ModelSizes, site: Site) -> TrainingRuns:
    """The launches with all columns that seconds and bytes are computed from, of the dense model of a token's width; those of the model
    that they have are kept."""
    numbers = {name: by_value(lambda c: c.astype(float), column) for name, column in launches.values.items() if column.dtype.kind in "biu"}
    fixed = {name: getattr(sizes, name) for name in OF_MODEL}
    fixed |= {"layers": sizes.layers + sizes.mtp, "predictions": 1 + sizes.mtp, "ffn": sizes.active_ffn, "held_ffn": sizes.held_ffn}
    fixed |= {"positions": sizes.learned_positions, "per_node": site.per_node, "network": site.network}
    sharing = np.where(launches.zero > 0, launches.shard * launches.context, 1.0)
    of_model = {name: float(value) for name, value in fixed.items() if name not in numbers}
    scores = by_value(lambda seq: sizes.scores(seq, ATTENTION_TILE), launches.seq)
    recomputed, stages = launches.recomputed, launches.pipeline * launches.virtual
    again = np.where(recomputed > 0, np.minimum(recomputed * stages / fixed["layers"], 1.0), 1.0)
    return launches.with_columns(**{"computed_scores": scores, "again": again, **numbers}, **of_model, sharing=sharing)


def prices_of(launches: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str, *, fitted: bool = True) -> LaunchPrices:
    """Of launches, which should be legal. launcher: or a stack of cost/devices. ValueError for a device without constants, for float32."""
    return priced_launches(launches, sizes, site, launcher, fitted, {}, False)[1]  # type: ignore[index]


def priced_launches(
    launches: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str, fitted: bool, only: Only, fitting: bool
) -> tuple[TrainingRuns, LaunchPrices] | None:  # fmt: skip
    """Launches, and `prices_of` them; None where there are none. fitting: without those that don't fit, or the first where none does."""
    for name, values in only.items():
        launches = launches[np.isin(launches.degrees()[name], list(values))]
    if not len(launches):
        return None
    columns = [launches.values[name] for name in OF_MEMORY] if "structure" in launches.values else [np.arange(len(launches))]
    firsts, of = distinct(columns)
    bytes = launch_memory(launches[firsts], sizes, site, launcher, fitted=fitted).device[of]
    chance = chance_to_fit(bytes, site.memory, [STACKS.get(launcher, launcher)])
    if fitting:
        rows = np.flatnonzero(chance >= LIKELY) if chance.max() >= LIKELY else np.zeros(1, int)
        launches, bytes, chance = launches[rows], bytes[rows], chance[rows]
    seconds = sum(launch_seconds(launches, sizes, site, launcher, fitted=fitted).values())
    tokens = launches.global_batch * launches.seq / seconds / launches.devices
    mfu = sizes.flops_per_token(launches.seq) * tokens / site.peak
    return launches, LaunchPrices(seconds, bytes, tokens, mfu, chance, chance >= LIKELY)  # type: ignore[arg-type]


def launch_memory(launches: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str, *, fitted: bool = True) -> Memory:
    """Bytes of launches by stage, moment and kind."""
    runs, constants, split = _described(launches, sizes, site, launcher, fitted)
    of_pass = runs.with_columns(global_batch=runs.global_batch / runs.passes)  # as many microbatches are in flight as a pass has
    memory = replace(memory_of(of_pass, constants, split), bias=site.memory_bias)
    return memory.with_more(experts(runs, sizes, constants, split)[1]) if sizes.experts else memory


def launch_seconds(launches: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str, *, fitted: bool = True) -> Parts:
    """Seconds of a step of launches by kind."""
    runs, constants, split = _described(launches, sizes, site, launcher, fitted)
    one, ends = of_each_kind(block, runs, constants)
    of_experts, _, more = experts(runs, sizes, constants, split, one) if sizes.experts else ({}, {}, ())
    parts = step_parts(runs, constants, split, one, ends, *more)
    if runs.offload.any():  # gradients go to the host, whose processors update; parameters come back
        owned = stage_parameters(runs, split) / np.where(runs.zero >= 1, runs.sharing, 1.0)
        link = host_seconds(1.0, DEVICES[site.device])
        parts["optimizer"] = np.where(runs.offload > 0, owned * (6 * link + optimizer_bytes(runs) / HOST_MEMORY), parts["optimizer"])
    if (runs.loss_chunks > 1).any():  # the head's gradient of a chunk is added to that of those before
        added = (runs.loss_chunks - 1) * 3 * 2 * runs.table_parameters / runs.tensor / constants.memory_rate
        parts["elementwise"] = parts["elementwise"] + runs.microbatches * added
    return {**parts, **{kind: parts.get(kind, 0.0) + seconds for kind, seconds in of_experts.items()}}


def interval(launcher: str) -> tuple[float, float]:
    """Factors of a predicted rate between which SHARE of measured runs are expected: from errors on runs that no constant was fitted to."""
    low, high = (float(np.ravel(bound)[0]) for bound in spread_of([STACKS.get(launcher, launcher)], SHARE))
    return float(np.exp(-high)), float(np.exp(-low))


def limits(by_kind: Mapping[str, float]) -> dict[str, float]:
    """What a step waits for, as shares of it, the largest first: compute, memory bandwidth, links (of which parallelism), bubble, host."""
    shares: dict[str, float] = {}
    for kind, seconds in by_kind.items():
        name = LIMITED.get(kind, kind)
        shares[name] = shares.get(name, 0.0) + seconds / sum(by_kind.values())
    return _largest_first(shares)


def by_kind(run: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of one run's step and the bytes of its fullest device, each the largest first.

    They add up to the seconds and bytes of `prices_of`. Kinds of seconds as of `step_parts`, and expert parallel; of bytes as of
    `memory_of`, what the allocator has cached, and contexts.
    """
    parts, memory = launch_seconds(run, sizes, site, launcher), launch_memory(run, sizes, site, launcher)
    held = {kind: memory.bias * bytes for kind, bytes in memory.fullest().kinds.items()}
    held |= {"cached": memory.reserved - memory.allocated, "contexts": memory.device - memory.reserved}
    seconds, bytes = ({kind: float(value[0]) for kind, value in both.items()} for both in (parts, held))
    return _largest_first(seconds), _largest_first(bytes)


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By kind how much more there is after than before, the largest differences first; those of equal size by name."""
    more = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in {**before, **after}}
    return dict(sorted(more.items(), key=lambda kind: (-abs(kind[1]), kind[0])))


def _largest_first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda value: (-value[1], value[0])))


def _described(
    launches: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str, fitted: bool
) -> tuple[TrainingRuns, RunConstants, Stages]:  # fmt: skip
    """All columns, the constants of the site and of the launcher's software, and the stages."""
    if (launches.precision == "fp32").any():
        raise ValueError("matmuls in float32 have no prices; expected a run in bf16, fp16, fp8 or nvfp4")
    peaks = device_constants([site.device])
    faster = {"fp": np.any(peaks.peak8 > peaks.peak16), "mx": np.any(peaks.peak4 > peaks.peak8), "nv": np.any(peaks.peak4 > peaks.peak8)}
    of = launches.precision[:1] if (launches.precision == launches.precision[:1]).all() else launches.precision
    if slow := [name for name in {*of.tolist()} if PRECISIONS[name] < 2 and not faster[name[:2]]]:
        raise ValueError(f"{site.device} multiplies no {slow[0]} numbers; expected another precision or device")
    runs = priced_runs(launches, sizes, site)
    constants = RunConstants.of([site.device], [STACKS.get(launcher, launcher)], of, fitted=fitted)
    if sizes.dense_layers:  # the mean width of an MLP over all blocks is that of no matrix
        constants = replace(constants, matmul=replace(constants.matmul, unaligned=1.0))
    if launches.grads16.any():
        of = np.full(1, 2.0) if launches.grads16.all() else np.where(launches.grads16, 2.0, constants.stack.gradient_bytes)
        constants = replace(constants, stack=replace(constants.stack, gradient_bytes=of), memory=replace(constants.memory, gradients=of))
    if site.inside is not None:
        stated = {"link_bandwidth": np.array([site.inside]), "link": np.ones(1)}  # as plans have it: what collectives reach
        constants = replace(constants, device=replace(constants.device, **stated))
    return runs, constants, stages(runs, constants.stack.balanced > 0)


def experts(
    runs: TrainingRuns, sizes: ModelSizes, constants: RunConstants, split: Stages, one: Block | None = None
) -> tuple[Parts, Kinds, tuple[np.ndarray, ...]]:  # fmt: skip
    """What a mixture needs beyond its dense model: bytes per device by kind; or with a block's seconds those per step by kind, and those
    of one block and microbatch for `step_parts`."""
    stack, device = constants.stack, constants.device
    blocks = sizes.expert_layers / runs.pipeline  # of a device
    ranks = runs.expert * runs.expert_tensor  # devices of one copy of the experts
    tokens = runs.tokens * runs.expert_tensor / runs.tensor  # of those that have the same shares of experts
    local = sizes.expert_parameters / max(sizes.expert_layers, 1) / ranks  # of a block
    alike = np.maximum(runs.data * runs.context * runs.tensor / ranks, 1.0)  # devices with the same experts
    sharded = np.where(runs.zero >= 1, np.minimum(np.maximum(runs.sharing * runs.tensor / ranks, 1.0), alike), 1.0)
    if one is None:
        largest = np.maximum(split.largest, split.last) / runs.layers * runs.pipeline  # of the fullest stage, relative to the mean
        # a token's copies, by Megatron those that came to the experts, as their matmuls read them; recomputation of whole blocks keeps none
        each = np.where(stack.fused_accumulation > 0, np.minimum(runs.itemsize, 2.0), 4.0)
        sent_bytes = np.where(runs.recompute == "full", 1 - runs.again, 1.0) * each * tokens * sizes.active * sizes.width
        kept = blocks * local * largest
        kinds = state_bytes(runs.with_columns(sharing=sharded), kept, kept, constants)
        at_hand = np.minimum(blocks * largest, 2)  # by FSDP: a block and the next
        kinds["gathered"] = np.where((runs.zero >= 3) & (sharded > 1), 2.0 * at_hand * local, 0.0)
        kinds["activations"] = in_flight(runs, 0) * blocks * largest * sent_bytes
        return {}, kinds, ()
    ring = constants.ring(runs, runs.expert, runs.expert_tensor)
    inside, adapter = device.link_bandwidth * device.link, runs.network * device.network * ring.nodes**-stack.congestion
    # to the experts and back, forward and backward; copies of a token for experts of one device are one
    copies = np.minimum(sizes.active, runs.expert * (1 - (1 - 1 / runs.expert) ** sizes.active))
    # by Megatron of a device's own tokens; those that arrived are gathered by all with a share of an expert, once as the dense model's are
    shares = np.where(stack.fused_accumulation > 0, runs.expert_tensor, 1)
    gathered = constants.ring(runs, shares, np.ones(1)).gather(2 * tokens * (sizes.active - 1) * sizes.width)
    exchanged = 4 * (ring.all_to_all(2 * tokens / shares * sizes.width, copies, inside, adapter, runs.deepep) + gathered)
    (few,) = of_each_kind(partial(_experts_seconds, sizes=sizes), runs, constants, [runs.expert, runs.expert_tensor])
    owned = blocks * local / sharded
    end, gathers = 1 / np.maximum(blocks, 1.0), np.where(runs.gather8 > 0, 1.0, 2.0)  # nothing hides those of one block
    exposed, reduced = gradient_seconds(blocks * local, end, runs, constants, sharded, alike / sharded, ranks, gathers)
    # behind what the transfers of other parameters leave, and tokens' behind what both leave, in the microbatches that have them
    among, of_dense = constants.ring(runs, sharded, ranks), constants.ring(runs, runs.sharing, runs.tensor)
    dense = transfers_of_fsdp(runs, constants, of_dense, runs.block_parameters / runs.tensor)
    gather, back = transfers_of_fsdp(runs, constants, among, local)
    both = np.add(dense, (gather, back))
    there, again = ({**way, "matmul": way["matmul"] + k * few / 3} for k, way in ((1, one.forward), (2, one.backward)))
    of_both = Block(there, again, one.launches)
    hidden: Callable[..., np.ndarray] = partial(beside_block, of_both, runs, constants)
    ways = hidden(*both)
    behind, last = sum(ways), left_of_backward(of_both, ways[1], both[1], np.maximum(among.nodes, of_dense.nodes))
    sent = behind - few - sum(beside_block(one, runs, constants, *dense))
    exchanged = np.where(runs.async_expert > 0, sum(hidden(*both, exchanged / 2)) - behind, exchanged)
    first = (runs.pipeline == 1) * (not sizes.dense_layers)  # whether the first block has experts: nothing hides its transfers
    edges = first * (back + gather * (runs.zero < 3))
    times = blocks * runs.microbatches
    parts = {
        "expert parallel": times * exchanged, "matmul": times * few, "optimizer": optimizer_bytes(runs) * owned / constants.memory_rate,
        "data parallel": times * sent + runs.microbatches * edges + exposed,
    }  # fmt: skip
    beside = sent + np.where(runs.async_expert > 0, exchanged, 0.0)
    share = sizes.expert_layers / runs.layers
    return parts, {}, (share * (exchanged + few + sent - beside), share * beside, reduced, last)


def _experts_seconds(runs: TrainingRuns, constants: RunConstants, sizes: ModelSizes) -> tuple[np.ndarray]:
    """How much longer the experts of a block take than the MLP that one token passes through."""
    tokens, expert_ffn = runs.tokens * runs.expert_tensor / runs.tensor, sizes.expert_ffn / runs.expert_tensor
    rows, local_experts = tokens * sizes.active, np.minimum(sizes.experts / runs.expert, tokens * sizes.active)
    routed = experts_seconds(rows, local_experts, rows, sizes.width, expert_ffn, sizes.matrices, constants.experts)
    of, ffn = constants.in_program(constants.matmul), runs.ffn / runs.tensor
    dense = matmul_seconds(runs.tokens, runs.width, (1 + runs.gated) * ffn, of) + matmul_seconds(runs.tokens, ffn, runs.width, of)
    return (3 * (constants.device.training * routed - dense * sizes.active * sizes.expert_ffn / runs.ffn),)

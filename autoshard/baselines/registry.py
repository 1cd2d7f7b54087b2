"""Every scheme by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from autoshard.baselines import schemes
from autoshard.baselines.context_parallel import CONTEXT_PARALLEL, context_parallel
from autoshard.baselines.expert_parallel import expert_parallel
from autoshard.baselines.setting import Baseline, Setting
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.strategies import LONG, Candidates

RULES: dict[str, Callable[[Setting], Baseline | None]] = {  # None: there is no such scheme for this graph on this mesh
    "data_parallel": schemes.data_parallel,
    "fsdp": schemes.fsdp,
    "megatron": schemes.megatron,
    "megatron_sp": schemes.megatron_sp,
    schemes.SHARDED_MEGATRON: schemes.sharded_megatron,
    **{name: partial(schemes.megatron_experts, name=name) for name in (schemes.MEGATRON_EXPERTS, schemes.MEGATRON_EXPERT_PARALLEL)},
    "expert_parallel": expert_parallel,
    **{name: partial(schemes.zero_stage, name=name) for name in schemes.ZERO},
    **{name: partial(context_parallel, name=name) for name in CONTEXT_PARALLEL},
}
USUAL = ("data_parallel", "fsdp", "megatron", "megatron_sp")
WHY_NOT = {
    "hsdp": "hsdp shards over one mesh axis and replicates over others, the mesh has one axis only; use zero3",
    **{
        name: f"{name} shards the sequence of attention over axes that the batch doesn't divide; there is no such axis, or no attention of "
        f"at least {LONG} tokens; use fsdp"
        for name in CONTEXT_PARALLEL
    },
}


def baselines(graph: Graph, mesh: Mesh, candidates: Candidates, names: Sequence[str] = USUAL) -> tuple[Baseline, ...]:
    """Those of the schemes that exist for this graph on this mesh; each pin is a candidate of its op."""
    setting = Setting(graph, mesh, candidates)
    possible = (RULES[name](setting) for name in names)
    return tuple(baseline for baseline in possible if baseline is not None)


def baseline(graph: Graph, mesh: Mesh, candidates: Candidates, name: str) -> Baseline:
    """The scheme of this name. ValueError where there is none for this graph on this mesh, or under another name."""
    for scheme in baselines(graph, mesh, candidates, [name] if name in RULES else []):
        return scheme
    others = ", ".join(other for other in RULES if other != name)
    raise ValueError(WHY_NOT.get(name, f"there is no scheme {name!r} on this mesh; expected one of {others}"))

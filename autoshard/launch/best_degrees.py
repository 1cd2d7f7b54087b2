"""`degrees`: which launches of a launcher can train a model, how fast, and how far the best is from the best plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.mesh import Mesh

from .launch_prices import Only, Site
from .model_sizes import PADDED, ModelSizes
from .ranking import Ranking, ranking
from .runs import Launch

if TYPE_CHECKING:
    from autoshard.planning import Progress, Regret

ModelOf = Callable[[int], tuple[Any, Any]]  # batch -> (module, example inputs)
GAP = 0.01  # relative: how well the bound is proven


@dataclass(frozen=True, eq=False)
class Degrees:
    """Every legal launch, best first; and the regret of row `compared` (0 is the first), the best that a plan can express."""

    ranked: Ranking
    compared: int | None
    against: Regret | None
    cpu_seconds: float
    why_not: str = ""  # why there is no regret

    def to_dict(self, top: int | None = None, row: int | None = None) -> dict[str, Any]:
        """As `autoshard degrees --json` prints it. row: from 0, whose seconds are taken apart. ValueError where there are fewer."""
        if row is not None and row >= len(self.ranked):
            raise ValueError(f"there is no row {row + 1}; expected 1 to {len(self.ranked)}, the legal launches")
        apart = {} if row is None else {"row": {"row": row, **dict(zip(("seconds_by_kind", "bytes_by_kind"), self.ranked.by_kind(row)))}}
        return {
            **apart,
            "configurations": self.ranked.rows(top), "simplest": self.ranked.simplest,
            "bound_seconds": None if self.against is None else self.against.bound,
            "regret": None if self.against is None else self.against.regret,
            "compared": self._compared(),
            "mfu_of": self.ranked.site.mfu_of, "cpu_seconds": self.cpu_seconds,
        }

    def _compared(self) -> dict[str, Any] | None:
        """The row that the regret is of, and the plan of it: its scheme, mesh, batch and blocks' recomputation, and its seconds."""
        if self.against is None or self.compared is None:
            return None
        launch = self.ranked.launch(self.compared)
        return {
            "row": self.compared, "scheme": self.against.scheme, "mesh": list(mesh_of(launch, self.ranked.site).shape),
            "batch": launch.data * launch.microbatch, "recompute": recompute_of(launch), "cost_seconds": self.against.cost,
        }  # fmt: skip


def degrees(
    sizes: ModelSizes,
    launch: Launch,
    site: Site,
    launcher: str = "torchtitan",
    *,
    model_of: ModelOf | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    time_limit: float = 30.0,
    only: Only | None = None,
    **links: float,
) -> Degrees:
    """All launches with the devices, sequence, global batch, precision and flags of `launch`, priced and sorted.

    model_of: builds the model for a batch; with it, the step of the best launch without pipeline, context and expert parallelism is
    compared with the proven bound of an unrestricted plan, both at a plan's prices (planning.baselining) on the mesh data x tensor, in the
    launch's precision where it is in float32. links: intra_node_bandwidth and inter_node_bandwidth of that mesh, bytes/s. executor: prices
    launches in its workers. only: values of degrees, {"tp": (1, 2), "recompute": ("full",)}. ValueError where no launch
    is legal.
    """
    began = time.process_time()
    ranked = ranking(launch, sizes.with_padded_vocab(PADDED.get(launcher, 0), 1), site, launcher, executor, only)
    if model_of is None:
        return Degrees(ranked, None, None, time.process_time() - began)
    c = ranked.columns
    plain = (c.pipeline == 1) & (c.context == 1) & (c.expert == 1) & (c.shard == np.where(c.zero > 0, c.data, 1)) & (c.zero != 1)
    row = ranked.first(plain & ranked.prices.fits)
    if row is None:
        return Degrees(ranked, None, None, time.process_time() - began, "no launch without pipeline, context and expert parallelism fits")
    try:
        against = _regret(ranked.launch(row), site, model_of, progress, time_limit, links)
    except ValueError as error:
        return Degrees(ranked, row, None, time.process_time() - began, str(error))
    return Degrees(ranked, row, against, time.process_time() - began)


def scheme_of(launch: Launch) -> str:
    """The scheme of baselines that a launch without pipeline and context parallelism runs."""
    if launch.tensor == 1:
        return "fsdp" if launch.zero >= 2 else "data_parallel"
    if launch.zero >= 2 and launch.data > 1:
        return "megatron_fsdp"
    return "megatron_sp" if launch.sequence_parallel else "megatron"


def mesh_of(launch: Launch, site: Site, **links: float) -> Mesh:
    """data x tensor; without tensor parallelism nodes x their devices. ValueError for a device that plans have no prices of."""
    per_node = min(site.per_node, launch.devices)
    shape = (launch.data, launch.tensor) if launch.tensor > 1 else (launch.devices // per_node, per_node)
    return Mesh.from_bandwidths(tuple(n for n in shape if n > 1) or (1,), devices_per_node=per_node, device=site.device, **links)  # type: ignore[arg-type]


def recompute_of(launch: Launch) -> int | str:
    """A plan's option `recompute`. Kinds that recompute some ops of a block count as none."""
    return "all" if launch.recompute == "full" else 0


def precision_of(module: Any, launch: Launch) -> str | None:
    """A plan's option `precision`: launches compute in 16 bits what a model holds in float32. Matmuls in 8 bits count as in bf16."""
    in_float32 = all(str(w.dtype) == "torch.float32" for w in module.parameters())
    return ("fp16" if launch.precision == "fp16" else "bf16") if in_float32 else None


def _regret(launch: Launch, site: Site, model_of: ModelOf, progress: Progress | None, time_limit: float, links: dict[str, float]) -> Regret:
    from autoshard.planning import regret  # here: torch takes seconds to import, and prices of launches need none

    module, example_inputs = model_of(launch.data * launch.microbatch)
    mesh, options = mesh_of(launch, site, **links), {"gap": GAP, "time_limit": time_limit, "precision": precision_of(module, launch)}
    return regret(module, example_inputs, mesh, scheme_of(launch), recompute=recompute_of(launch), progress=progress, **options)

"""A dense model and its embedding tables, planned for the same devices.

    seconds(D, X) = cost(D) + slowest device(X) + route(S(0) on every axis -> layout of `pooled` in D), there and back
    memory        = peak(D) + bytes of X on every device  <=  limit

D = a plan of the dense model, X = a plan of the tables. The tables leave on each device the pooled rows of its own examples (that
all_to_all is in the tables' seconds); where D has another input layout for them, one more route on the same mesh follows. X may use the
memory that D leaves free.

apart     D planned alone with all the memory, X in what D leaves
together  the best of several D, each with the best X beside it: D free or with `pooled` pinned to the layout by examples, with all the
          memory or less
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.capture import in_turn
from autoshard.layout import parse
from autoshard.mesh import Mesh
from autoshard.planning import Infeasible, Progress, plan
from autoshard.routes import Routes
from autoshard.solution import Solution
from autoshard.tables.plan import plan_tables
from autoshard.tables.records import Table, TablePlan

LIMITS = (1.0, 0.6)  # of the peak of the plan with all the memory: limits under which the dense model is planned


@dataclass(frozen=True)
class WithTables:
    """A dense plan and a tables plan that share the devices, and the seconds of a step of both."""

    dense: Solution
    tables: TablePlan
    pooled: str  # input layout of the pooled rows in the dense plan
    route_seconds: float  # of the pooled rows and their gradients, beyond the tables' own all_to_all
    limit: float  # bytes per device
    how: str  # under which limit and pins the dense model was planned

    @property
    def seconds(self) -> float:
        return self.dense.cost + self.tables.slowest_device_seconds + self.route_seconds

    @property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        return self.dense.peak_bytes + max((d.hbm_bytes for d in self.tables.devices), default=0.0)

    def to_dict(self) -> dict:
        return {
            "seconds": self.seconds, "dense_seconds": self.dense.cost, "tables_seconds": self.tables.slowest_device_seconds,
            "tables_bound_seconds": self.tables.bound_seconds, "route_seconds": self.route_seconds, "pooled": self.pooled,
            "peak_bytes": self.peak_bytes, "dense_peak_bytes": self.dense.peak_bytes, "limit_bytes": self.limit, "how": self.how,
        }  # fmt: skip


@dataclass(frozen=True)
class Together:
    """The best combined plan, the two planned apart (None where that does not fit), and all that were compared."""

    best: WithTables
    apart: WithTables | None
    tried: tuple[WithTables, ...]

    def to_dict(self) -> dict:
        apart = None if self.apart is None else self.apart.to_dict()
        return {"together": self.best.to_dict(), "apart": apart, "tried": [one.to_dict() for one in self.tried]}


@in_turn
def plan_with_tables(
    dense: torch.nn.Module,
    example_inputs: tuple,
    pooled: str,
    tables: Sequence[Table],
    mesh: Mesh,
    *,
    hbm: float,
    host_memory: float | None = None,
    devices_per_node: int | None = None,
    training: bool = True,
    effort: float = 0.3,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Together:
    """Plan a model and its tables on the same devices.

    pooled: the name of the dense model's input (batch, tables, columns) that the tables produce; the batch must divide over the devices.
    hbm: bytes per device for both; host_memory: bytes per host, for tables. options: those of `plan`. ValueError on bad input,
    `Infeasible` where the two do not fit together.
    """
    position = _position(dense, pooled)
    rows = example_inputs[position] if position < len(example_inputs) else None
    if not isinstance(rows, torch.Tensor) or not rows.ndim:
        raise ValueError(f"the example input for {pooled!r} is {type(rows).__name__}; expected a tensor (batch, tables, columns)")
    op = f"input_{position}"  # as captured
    batch, by_examples = rows.shape[0], ",".join(["S(0)"] * len(mesh.axes))
    if batch % mesh.num_devices:
        raise ValueError(f"{pooled} has {batch} examples; expected a multiple of the {mesh.num_devices} devices")

    def dense_plan(limit: float, pins: dict[str, str]) -> Solution | None:
        asked = {**options, "pins": {**options.get("pins", {}), **pins}}
        try:
            return plan(dense, example_inputs, mesh, training=training, memory_limit=limit, baselines=False, **asked)
        except Infeasible:
            return None

    def beside(solution: Solution, how: str) -> WithTables | None:
        """The plan with the best tables plan in the memory that it leaves; None where the tables don't fit."""
        left = hbm - solution.peak_bytes
        if left <= 0:
            return None
        table_plan = plan_tables(
            tables, mesh, hbm=left, host_memory=host_memory, batch=batch // mesh.num_devices, devices_per_node=devices_per_node,
            effort=effort, seed=seed,
        )  # fmt: skip
        layout = solution.layouts[op].outputs[0] or by_examples
        produced, read, routes = parse(by_examples), parse(layout), Routes(mesh)
        pairs = [(produced, read), (read, produced)] if training else [(produced, read)]  # the rows, and their gradients
        known = [routes.route(tuple(rows.shape), rows.element_size(), a, b) for a, b in pairs]
        seconds = sum(route.seconds if route is not None else math.inf for route in known)
        return WithTables(solution, table_plan, layout, seconds, hbm, how) if table_plan.devices else None

    say = progress or (lambda what, fraction: None)
    say("planning the two apart", 0.0)
    alone = dense_plan(hbm, {})
    apart = beside(alone, "planned apart") if alone is not None else None
    tried = [apart] if apart is not None else []
    peak = alone.peak_bytes if alone is not None else hbm
    asked = [(share, pins) for share in LIMITS for pins in ({}, {op: by_examples})][1:]  # the first one is the plan apart
    for k, (share, pins) in enumerate(asked):
        say("planning the two together", (k + 1) / (len(asked) + 1))
        limit = min(hbm, peak * share if share < 1 else hbm)
        solution = dense_plan(limit, pins)
        memory = "all the memory" if share == 1 else f"{share:.0%} of its peak"
        how = f"{memory}, {'pooled rows by examples' if pins else 'any layout'}"
        both = beside(solution, how) if solution is not None else None
        tried += [both] if both is not None else []
    if not tried:
        raise Infeasible(f"the model and its {len(tables)} tables do not fit {hbm / 1e9:.3g} GB per device together; raise the memory")
    return Together(min(tried, key=lambda one: one.seconds), apart, tuple(tried))


def _position(module: torch.nn.Module, name: str) -> int:
    names = list(inspect.signature(module.forward).parameters)
    if name not in names:
        raise ValueError(f"the model has no input {name!r}; its inputs are {', '.join(names)}")
    return names.index(name)

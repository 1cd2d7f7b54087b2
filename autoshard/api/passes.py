"""The compiler pass: an fx graph in, the same graph out with a DTensorSpec on every tensor node.

A graph is an nn.Module (the graph captured from it is returned), a GraphModule of ATen nodes, one from torch.fx.symbolic_trace, or an
ExportedProgram. `node.meta["autoshard"]` is written once, at the end: a DTensorSpec, or for a node of several results a tuple of
them (None where a result is no tensor).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autoshard.api.annotating import annotate
from autoshard.api.cached_plans import CachedPlans
from autoshard.baselines import CONTEXT_PARALLEL, SHARDED_MEGATRON
from autoshard.capture import Captured, capture_fx, capture_module, dims_of, ignored, in_turn, inputs_at, values_of
from autoshard.exports import sharding_map, spmd_type, unbacked_mesh
from autoshard.graph import Graph, Sizes
from autoshard.lower import Groups, lower, rewritten, verify_graph
from autoshard.mesh import Device, Mesh
from autoshard.options import Options, having
from autoshard.planning import (
    ModelGraphs,
    Question,
    Stopwatch,
    baseline_only,
    broken_by,
    checked_options,
    fingerprint,
    plan_graph,
    plan_ranges,
    with_number_of_microbatches,
)
from autoshard.runtime import device_mesh as ranks_of
from autoshard.solution import Solution, load_one, replay
from autoshard.strategies import RULES
from autoshard.writing import destination

log = logging.getLogger("autoshard")

ALGORITHMS = (
    "alpa", "data_parallel", "fsdp", "megatron", "megatron_sp", SHARDED_MEGATRON, "zero1", "zero2", "zero3", "hsdp", *CONTEXT_PARALLEL,
)  # fmt: skip
BACKENDS = ("nccl", "gloo")
PRICED = {  # options
    "inter_node_bandwidth", "intra_node_bandwidth", "communications_backend", "device", "devices_per_node", "tf32", "cost_model",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PassOptions(Options):
    """Options of `autosharding_pass`: those of planning that a graph has, and these; bandwidths in bytes per second."""

    mesh_shape: tuple[int, ...]
    inter_node_bandwidth: float = 400e9  # one node's link to the others
    intra_node_bandwidth: float | None = None  # per device; by default the device's own
    algo: str = "alpa"  # or a baseline, one of ALGORITHMS
    communications_backend: str = "nccl"
    mip_rel_gap: float = 0.0  # percent
    run_checks: bool = False  # verify the plan on simulated ranks
    preload_solution: bool = False  # read ilp_solution_file instead of solving
    ilp_solution_file: str | None = "ilp_solution.pkl"  # read by preload_solution; written after solving where the caller names it
    cache: str | None = None  # a folder, or a URL: plans are read from it and kept in it
    skip_forward: bool = False  # leave out the sharding map
    rewrite: bool = False  # return this rank's graph; on the ranks that torchrun started
    example_inputs: Any = None  # for graphs whose placeholders carry no shapes; sizes of dynamic dims
    device: str | Device = "h100"
    devices_per_node: int | None = None
    tf32: bool = False  # float32 matmuls run as TF32
    cost_model: Any = None  # such as cost.DefaultCosts, in place of the package's; the objective is then serial unless it is stated

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (("algo", self.algo, ALGORITHMS), ("communications_backend", self.communications_backend, BACKENDS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        for name, one in self.__dataclass_fields__.items():
            if isinstance(one.default, bool) and not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if not isinstance(self.ilp_solution_file, (str, os.PathLike, type(None))):
            raise ValueError(f"ilp_solution_file is {self.ilp_solution_file!r}; expected the name of a file")
        if not (isinstance(self.mip_rel_gap, (int, float)) and self.mip_rel_gap >= 0):
            raise ValueError(f"mip_rel_gap is {self.mip_rel_gap!r}; expected a percentage of 0 or more")
        if self.preload_solution and not self.ilp_solution_file:
            raise ValueError("preload_solution needs ilp_solution_file, the file to read")

    @staticmethod
    def of(options: Mapping[str, Any]) -> PassOptions:
        """From keywords, where None stands for the default. ValueError on a name that is no option, with the one that was meant."""
        own = tuple(name for name in PassOptions.__dataclass_fields__ if name not in Options.__dataclass_fields__)
        named = {name: value for name, value in options.items() if value is not None or name in own}
        if named.get("cost_model") is not None:
            named.setdefault("objective", "serial")
        return checked_options(PassOptions, named, own + having(Options, "in_pass"))

    def mesh(self) -> Mesh:
        mesh = Mesh.from_bandwidths(
            self.mesh_shape,
            intra_node_bandwidth=self.intra_node_bandwidth,
            inter_node_bandwidth=self.inter_node_bandwidth,
            device=self.device,
            devices_per_node=self.devices_per_node,
            backend=self.communications_backend,
            tf32=self.tf32,
        )
        return mesh if self.cost_model is None else replace(mesh, cost_model=self.cost_model)

    def planning(self) -> Options:
        """The options of planning alone. `training` says how a module is captured; a graph that was captured says it itself."""
        asked = {name: getattr(self, name) for name in having(Options, "in_pass")}
        return Options(**{**asked, "training": False, "gap": self.mip_rel_gap / 100})


@in_turn
def autosharding_pass(graph: fx.GraphModule | ExportedProgram | nn.Module, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Shard every tensor of an fx graph over a mesh: returns the annotated graph and a dict about the plan.

    options: the fields of `PassOptions`; `mesh_shape` is required, a wrong name is an error that names the right one. The
    returned dict holds `autosharding_time` (seconds), `tensor_sharding_map` (`{module: {"node", "sharding": {attribute:
    DTensorSpec}}}`, without it under skip_forward), `solution` (a Solution) and the certificate: `status`, `cost_seconds`,
    `bound_seconds`, `gap`. `pins` fixes layouts, `forbid` rules them out, by name or glob, as in `plan`. With `preload_solution` the
    solution is read from `ilp_solution_file` and nothing is solved; ValueError where its layouts don't fit the graph or the mesh, do not
    obey `pins` and `forbid`, or take more than `memory_limit`. Where they fit, but the shapes, dtypes or constants, or the prices or the
    `algo` that are given, are others than the plan's, its certificate says nothing here: `status` is "unjudged", seconds are inf, the bound
    is 0, and a warning is logged. With `rewrite`, on as many ranks as the mesh has, the graph that is returned is this rank's: local ops
    and functional collectives, from the local tensors `rank_inputs` names to a list of those that `rank_outputs` names, each in its planned
    layout.

        graph, info = autoshard.autosharding_pass(torch.fx.symbolic_trace(model), mesh_shape=(2, 4), example_inputs=(tokens,))
    """
    if "mesh_shape" not in options:
        raise ValueError("mesh_shape is missing; give the sizes of the mesh, slowest axis first, for example mesh_shape=(2, 4)")
    chosen = PassOptions.of(options)
    mesh, planning = chosen.mesh(), chosen.planning()
    written = chosen.ilp_solution_file if "ilp_solution_file" in options and not chosen.preload_solution else None
    if written:
        destination(written)  # an error now, not after the search
    clock = Stopwatch(None)
    with clock.phase("capture", "capturing the graph", 0.0):
        captured = _capture(graph, chosen)
    if chosen.preload_solution:
        solution = _preloaded(captured, chosen, mesh, options)
        _check_obeys(replay(solution, captured.graph).graph, solution, planning, chosen.ilp_solution_file)
        seconds = 0.0
    else:
        began = time.monotonic()
        solution, cached = _solve(graph, captured, clock, chosen, options)
        seconds = time.monotonic() - began
        if written:
            solution.save(written)
        figures = solution.objective_seconds, solution.objective, solution.objective_gap
        log.info("autosharding took %.1f s: %s, %.6g s per step (%s), gap %.2g", seconds, solution.status, *figures)
    if chosen.run_checks:
        _check(captured, solution, values_of(graph, chosen.example_inputs))
    device_mesh = unbacked_mesh(mesh)
    ops_of = annotate(captured, replay(solution, captured.graph).graph, solution, device_mesh)
    info: dict[str, Any] = {"autosharding_time": seconds, "solution": solution, "status": solution.status, "ops_of": ops_of}
    info["nodes_of"] = {op: node for node, ops in ops_of.items() for op in ops}
    info |= {"objective": solution.objective, "cost_seconds": solution.objective_seconds}
    info |= {"bound_seconds": solution.objective_bound, "gap": solution.objective_gap}
    if chosen.cache is not None and not chosen.preload_solution:
        info["cache"] = cached
    if not chosen.skip_forward:
        info["tensor_sharding_map"] = sharding_map(solution, device_mesh)
    if chosen.rewrite:
        return _rewritten(replay(solution, captured.graph).graph, solution, info), info
    return captured.fx_graph, info


def _rewritten(graph: Graph, solution: Solution, info: dict[str, Any]) -> fx.GraphModule:
    """This rank's graph; `info` gets the names of its inputs and outputs."""
    if solution.microbatches > 1:
        raise ValueError("rewrite has no graph of several microbatches; plan one, or run the module with autoshard.parallelize")
    device_mesh = ranks_of(solution)
    program = lower(graph, solution.layouts, solution.results, solution.mesh, device=device_mesh.device_type)
    info["rank_inputs"], info["rank_outputs"] = [one.name for one in program.loads], [one.key for one in program.results]
    own = rewritten(program, Groups.of(device_mesh), tuple(device_mesh.get_coordinate() or ()), device_mesh.device_type, RULES)
    for node in own.graph.nodes:
        slot = node.meta.pop("slot", None)
        if slot and (known := spmd_type(slot.layout, solution.mesh.axis_names, len(slot.shape))) is not None:
            node.meta["spmd_type"] = known
    return own


def _capture(graph: Any, chosen: PassOptions) -> Captured:
    if isinstance(graph, (fx.GraphModule, ExportedProgram)):
        if chosen.training:
            raise ValueError("training=True needs an nn.Module; a graph that already holds forward and backward is planned as it is")
        if chosen.precision is not None:
            raise ValueError(f"precision={chosen.precision} needs an nn.Module; a captured graph computes in its own dtypes")
        return capture_fx(graph, chosen.example_inputs)
    if isinstance(graph, nn.Module):
        if chosen.example_inputs is None:
            raise ValueError("an nn.Module needs example_inputs=(...), the arguments of its forward (meta tensors will do)")
        return capture_module(graph, chosen.example_inputs, training=chosen.training, precision=chosen.precision)
    raise ValueError(f"graph is {type(graph).__name__}; expected a torch.fx.GraphModule, a torch.export.ExportedProgram or an nn.Module")


def _solve(graph: Any, captured: Captured, clock: Stopwatch, chosen: PassOptions, given: Mapping[str, Any]) -> tuple[Solution, str | None]:
    """The plan, and whether it is the cache's ("hit"), started from near ones ("warm") or from nothing ("cold"); None without a cache."""
    noted = {"algo": chosen.algo, "communications_backend": chosen.communications_backend}
    noted |= {"ignored": words} if (words := ignored(captured.fx_graph)) else {}
    context = with_number_of_microbatches(Question(ModelGraphs(captured.graph), chosen.mesh(), chosen.planning(), clock, noted))
    if chosen.dynamic_shapes is not None:
        if chosen.cache is not None or chosen.algo != "alpa":
            raise ValueError("a cache and an algo are of one shape, and with dynamic_shapes many are planned: leave one of them out")
        ranges, named = dims_of(graph, chosen.example_inputs, chosen.dynamic_shapes)

        def at(sizes: Sizes) -> Graph:
            return _capture(graph, replace(chosen, example_inputs=inputs_at(graph, chosen.example_inputs, named, sizes))).graph

        return plan_ranges(context, ranges, named, at, given), None
    if chosen.cache is None:
        return _planned(context, chosen.algo), None
    plans = CachedPlans(chosen.cache, context, noted)
    if (solution := plans.exact()) is not None:
        return solution, "hit"
    if known := plans.near():  # they take the place of the usual plans, as starts
        context = replace(context.with_options(baselines=False), known=known)
    solution = _planned(context, chosen.algo)
    plans.keep(solution)
    return solution, "warm" if known else "cold"


def _planned(question: Question, algo: str) -> Solution:
    return plan_graph(question) if algo == "alpa" else baseline_only(question, algo)


def _preloaded(captured: Captured, chosen: PassOptions, mesh: Mesh, given: Collection[str]) -> Solution:
    """The solution of the file. given: the options that the caller named; without any of PRICED the prices are the plan's own."""
    assert chosen.ilp_solution_file is not None
    solution = load_one(chosen.ilp_solution_file)
    again = "; plan again without preload_solution"
    planned = replay(solution, captured.graph, mesh).checked(chosen.ilp_solution_file, "graph", again)
    asked = fingerprint(planned, mesh, chosen.planning())
    compared = {"graph": "shapes, dtypes or constants", **({"prices": "prices"} if PRICED & set(given) else {})}
    others = [what for key, what in compared.items() if solution.fingerprint.get(key, asked[key]) != asked[key]]
    if "algo" in given and solution.assumptions.get("algo", chosen.algo) != chosen.algo:
        others.append("algorithm")
    limit = chosen.memory_limit
    if limit is not None and compared["graph"] not in others and solution.peak_bytes > limit:
        held = f"{solution.peak_bytes:.4g} bytes per device, more than memory_limit={limit:.4g}"
        raise ValueError(f"{chosen.ilp_solution_file} takes {held}{again}")
    if not others:
        return solution
    log.warning("%s was planned for other %s: its layouts are used, and not judged", chosen.ilp_solution_file, " and ".join(others))
    return replace(solution, status="unjudged", cost=math.inf, bound=0.0, overlapped={})


def _check_obeys(graph: Graph, solution: Solution, planning: Options, path: str | None) -> None:
    broken = broken_by(solution, graph, planning)
    if broken:
        raise ValueError(f"{path} does not obey {', '.join(map(str, broken))}; plan again without preload_solution")


def _check(captured: Captured, solution: Solution, values: Mapping[str, torch.Tensor]) -> None:
    verification = verify_graph(replay(solution, captured.graph).graph, solution, values)
    if not verification.ok:
        wrong = verification.placement_mismatches[:1]
        what = f"the output of {wrong[0].op} is {wrong[0].actual}, planned {wrong[0].planned}" if wrong else "its numbers are off"
        raise ValueError(f"run_checks: the plan does not compute what the graph computes: {what}")

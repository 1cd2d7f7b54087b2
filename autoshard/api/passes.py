"""The compiler pass: an fx graph in, the same graph out with a DTensorSpec on every tensor node.

Four kinds of graph: an nn.Module (captured; the captured graph comes back), a GraphModule of ATen nodes, one from
torch.fx.symbolic_trace, an ExportedProgram. `node.meta["autoshard"]` is written once, at the end: a DTensorSpec, or a tuple of
them (None where there is no tensor) for a node of several results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autoshard.api.checking import verify_graph
from autoshard.capture import Captured, capture_given, capture_module, ignored, in_turn
from autoshard.exports.sharding_map import sharding_map, unbacked_mesh
from autoshard.graph import Graph
from autoshard.layout import local_numel, parse, replicated, text, why_illegal
from autoshard.mesh import Device, Mesh
from autoshard.planning.demands import broken_by
from autoshard.planning.plan import Options, Stopwatch, baseline_only, checked_options, plan_graph
from autoshard.solution import Placed, Solution, load, misfits

log = logging.getLogger("autoshard")

ALGORITHMS = ("alpa", "data_parallel", "fsdp", "megatron", "megatron_sp")
BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class PassOptions:
    """Options of `autosharding_pass`; bandwidths in bytes per second, times in seconds."""

    mesh_shape: tuple[int, ...]
    inter_node_bandwidth: float = 400e9  # one node's link to the others
    intra_node_bandwidth: float = 300e9  # per device
    algo: str = "alpa"  # or a baseline: data_parallel, fsdp, megatron, megatron_sp
    communications_backend: str = "nccl"
    skip_fully_replicated: bool = False  # no op fully replicated where it can be cut
    time_limit: float = 10000.0
    mip_rel_gap: float = 0.0  # percent
    run_checks: bool = False  # verify the plan on simulated ranks
    preload_solution: bool = False  # read ilp_solution_file instead of solving
    ilp_solution_file: str | None = "ilp_solution.pkl"  # written after solving; None writes nothing
    skip_forward: bool = False  # leave out the sharding map
    example_inputs: Any = None  # for graphs whose placeholders carry no shapes
    training: bool = False  # nn.Module only: capture the training step
    memory_limit: float | None = None  # bytes per device
    pins: Mapping[str, str] | None = None  # layout by name or glob
    forbid: Mapping[str, str | Sequence[str]] | None = None  # layouts that a tensor must not have, by name or glob
    optimizer: str = "adamw"
    solver: str = "auto"
    device: str | Device = "h100"
    devices_per_node: int | None = None
    tf32: bool = False  # float32 matmuls run as TF32

    def __post_init__(self) -> None:
        for name, value, known in (("algo", self.algo, ALGORITHMS), ("communications_backend", self.communications_backend, BACKENDS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if not (isinstance(self.mip_rel_gap, (int, float)) and self.mip_rel_gap >= 0):
            raise ValueError(f"mip_rel_gap is {self.mip_rel_gap!r}; expected a percentage of 0 or more")
        if self.preload_solution and not self.ilp_solution_file:
            raise ValueError("preload_solution needs ilp_solution_file, the file to read")

    def mesh(self) -> Mesh:
        return Mesh.from_bandwidths(
            self.mesh_shape,
            intra_node_bandwidth=self.intra_node_bandwidth,
            inter_node_bandwidth=self.inter_node_bandwidth,
            device=self.device,
            devices_per_node=self.devices_per_node,
            backend=self.communications_backend,
            tf32=self.tf32,
        )

    def planning(self) -> Options:
        return Options(
            optimizer=self.optimizer,
            memory_limit=self.memory_limit,
            pins=self.pins or {},
            forbid=self.forbid or {},
            solver=self.solver,
            time_limit=self.time_limit,
            gap=self.mip_rel_gap / 100,
            skip_fully_replicated=self.skip_fully_replicated,
        )


@in_turn
def autosharding_pass(graph: fx.GraphModule | ExportedProgram | nn.Module, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Shard every tensor of an fx graph over a mesh: returns the annotated graph and what was found.

    options: the fields of `PassOptions`; `mesh_shape` is required, a wrong name is an error that names the right one. The
    returned dict holds `autosharding_time` (seconds), `tensor_sharding_map` (`{module: {"node", "sharding": {attribute:
    DTensorSpec}}}`, without it under skip_forward), `solution` (a Solution) and the certificate: `status`, `cost_seconds`,
    `bound_seconds`, `gap`. `pins` fixes layouts, `forbid` rules them out, by name or glob, as in `plan`. With `preload_solution` the
    solution is read from `ilp_solution_file` and nothing is solved; ValueError where it is of another graph or mesh, or does not obey
    `pins` and `forbid`.

        graph, info = autoshard.autosharding_pass(torch.fx.symbolic_trace(model), mesh_shape=(2, 4), example_inputs=(tokens,))
    """
    if "mesh_shape" not in options:
        raise ValueError("mesh_shape is missing; give the sizes of the mesh, slowest axis first, for example mesh_shape=(2, 4)")
    chosen: PassOptions = checked_options(PassOptions, options)
    mesh, planning = chosen.mesh(), chosen.planning()
    watch = Stopwatch(None)
    with watch.phase("capture", "capturing the graph", 0.0):
        captured = _capture(graph, chosen)
    if chosen.preload_solution:
        solution = _preloaded(captured, chosen, mesh)
        _check_obeys(captured.graph, solution, planning, chosen.ilp_solution_file)
        seconds = 0.0
    else:
        began = time.monotonic()
        solution = _solve(captured, mesh, planning, watch, chosen)
        seconds = time.monotonic() - began
        if chosen.ilp_solution_file:
            solution.save(chosen.ilp_solution_file)
        log.info("autosharding took %.1f s: %s, %.6g s per step, gap %.2g", seconds, solution.status, solution.cost, solution.gap)
    if chosen.run_checks:
        _check(captured, solution)
    device_mesh = unbacked_mesh(mesh)
    annotate(captured, solution, device_mesh)
    info: dict[str, Any] = {"autosharding_time": seconds, "solution": solution, "status": solution.status}
    info |= {"cost_seconds": solution.cost, "bound_seconds": solution.bound, "gap": solution.gap}
    if not chosen.skip_forward:
        info["tensor_sharding_map"] = sharding_map(solution, device_mesh)
    return captured.given, info


def _capture(graph: Any, chosen: PassOptions) -> Captured:
    if isinstance(graph, (fx.GraphModule, ExportedProgram)):
        if chosen.training:
            raise ValueError("training=True needs an nn.Module; a graph that already holds forward and backward is planned as it is")
        return capture_given(graph, chosen.example_inputs)
    if isinstance(graph, nn.Module):
        if chosen.example_inputs is None:
            raise ValueError("an nn.Module needs example_inputs=(...), the arguments of its forward (meta tensors will do)")
        return capture_module(graph, chosen.example_inputs, training=chosen.training)
    raise ValueError(f"graph is {type(graph).__name__}; expected a torch.fx.GraphModule, a torch.export.ExportedProgram or an nn.Module")


def _solve(captured: Captured, mesh: Mesh, planning: Options, watch: Stopwatch, chosen: PassOptions) -> Solution:
    noted = {"algo": chosen.algo, "communications_backend": chosen.communications_backend}
    noted |= {"ignored": said} if (said := ignored(captured.given)) else {}
    if chosen.algo == "alpa":
        return plan_graph(captured.graph, mesh, planning, watch, noted)
    return baseline_only(captured.graph, mesh, planning, watch, noted, chosen.algo)


def _preloaded(captured: Captured, chosen: PassOptions, mesh: Mesh) -> Solution:
    assert chosen.ilp_solution_file is not None
    solution = load(chosen.ilp_solution_file, mesh)
    if solution.status == "unjudged":
        return _by_given_nodes(captured, solution, chosen.ilp_solution_file)
    reasons = misfits(solution, captured.graph, mesh)
    if reasons:
        raise ValueError(f"{chosen.ilp_solution_file} does not fit this graph: {'; '.join(reasons)}; plan again without preload_solution")
    return solution


def _check_obeys(graph: Graph, solution: Solution, planning: Options, path: str | None) -> None:
    broken = broken_by(solution, graph, planning)
    if broken:
        raise ValueError(f"{path} does not obey {', '.join(map(str, broken))}; plan again without preload_solution")


def _by_given_nodes(captured: Captured, old: Solution, path: str) -> Solution:
    """An old plan speaks of the given graph's nodes: its result layouts, put onto the values that those nodes became.

    Ops that it does not name stay replicated; nobody has judged such a plan, and its status says so.
    """
    graph, mesh = captured.graph, old.mesh
    whole = text(replicated(len(mesh.axes)))
    layouts = {op.name: Placed((whole,) * len(op.inputs), tuple(None if t is None else whole for t in op.outputs)) for op in graph.ops}
    known = [node for node in captured.values if node.name in old.layouts]
    if not known:
        raise ValueError(f"{path} names none of this graph's nodes; it is a plan of another graph, so plan again without preload_solution")
    for node in known:
        values = [leaf for leaf in pytree.tree_leaves(captured.values[node], is_leaf=_is_value) if leaf is not None]
        for (i, k), written in zip(values, old.layouts[node.name].outputs, strict=False):
            op, tensor = graph.ops[i], graph.tensor((i, k))
            reason = why_illegal(tensor.shape, parse(written), mesh) if written else None
            if reason:
                raise ValueError(f"{path} does not fit this graph: {node.name}: {reason}; plan again without preload_solution")
            outputs = list(layouts[op.name].outputs)
            outputs[k] = written or outputs[k]
            layouts[op.name] = replace(layouts[op.name], outputs=tuple(outputs))
    parameters = {
        name: {
            "layout": layouts[name].outputs[0],
            "shape": list(graph.tensor((i, 0)).shape),
            "dtype": graph.tensor((i, 0)).dtype,
            "local_bytes": local_numel(graph.tensor((i, 0)).shape, parse(layouts[name].outputs[0] or whole), mesh)
            * graph.tensor((i, 0)).itemsize,
        }
        for name, i in graph.parameters.items()
    }
    return replace(old, layouts=layouts, parameters=parameters)


def _check(captured: Captured, solution: Solution) -> None:
    found = verify_graph(captured.graph, solution)
    if not found.ok:
        wrong = found.placement_mismatches[:1]
        what = f"{wrong[0].op} gives {wrong[0].actual}, planned {wrong[0].planned}" if wrong else "its numbers are off"
        raise ValueError(f"run_checks: the plan does not compute what the graph computes: {what}")


def annotate(captured: Captured, solution: Solution, device_mesh: DeviceMesh) -> None:
    """Writes `node.meta["autoshard"]` on every tensor node of the given graph."""
    graph = captured.graph
    made: dict[tuple, DTensorSpec] = {}

    def spec(value: tuple[int, int] | None) -> DTensorSpec | None:
        if value is None:
            return None
        op = graph.ops[value[0]]
        written = solution.layouts[op.name].outputs[value[1]]
        tensor = op.outputs[value[1]]
        if tensor is None or written is None:
            return None
        key = (tensor, written)
        if key not in made:
            stride = torch.empty(tensor.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(tensor.shape), stride, getattr(torch, tensor.dtype))
            made[key] = DTensorSpec(device_mesh, parse(written), tensor_meta=meta)
        return made[key]

    for node, values in captured.values.items():
        specs = pytree.tree_map(spec, values, is_leaf=_is_value)
        if any(isinstance(leaf, DTensorSpec) for leaf in pytree.tree_leaves(specs)):
            node.meta["autoshard"] = tuple(specs) if isinstance(specs, list) else specs


def _is_value(leaf: object) -> bool:
    return leaf is None or (isinstance(leaf, tuple) and len(leaf) == 2 and all(isinstance(n, int) for n in leaf))

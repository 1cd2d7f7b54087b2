"""Seconds and bytes of a step on the devices of one tensor parallel group, per layer: Megatron's layouts at the prices of the mesh.

The layouts are those of the baseline `megatron`: weights of heads and hidden features by columns and rows, the vocabulary sharded, the
cache sharded by key-value heads, experts over the same devices. With expert parallelism the mesh has the replicas as a first axis:
they shard the sequences, and the experts are sharded over all devices. What the step costs in a layer is read from the plan's
breakdown, and the layers of the model cost what their corresponding layers do.
"""

from collections.abc import Collection
from dataclasses import dataclass

from autoshard.baselines import MEGATRON_EXPERT_PARALLEL, MEGATRON_EXPERTS
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning import ModelGraphs, Options, Question, Stopwatch, baseline_only
from autoshard.serving.projections import in_one_kernel
from autoshard.serving.steps import Steps, block_of_layer
from autoshard.solution import Solution
from autoshard.strategies import is_experts


@dataclass(frozen=True)
class StepPrice:
    """A step on one tensor parallel group. Seconds and bytes of a device."""

    layers: tuple[float, ...]  # seconds of each layer of the model
    rest: float  # seconds outside of the layers: embedding, last norm, head
    layer_weights: tuple[float, ...]  # bytes
    first_weights: float  # bytes of the parameters before the layers
    last_weights: float  # and after them
    shared_weights: float  # bytes that the two have in common: tied embeddings
    activations: float  # bytes at the fullest moment
    experts: float  # bytes of the experts of all layers, on a device of each stage
    replicated: float  # bytes of matrices of all layers that every device has: those that the layouts leave whole
    solution: Solution  # of the few layers

    @property
    def seconds(self) -> float:
        return sum(self.layers) + self.rest

    def stages(self, count: int) -> list[tuple[float, float, range]]:
        """(seconds, weight bytes, layers) of each pipeline stage: as many layers in each as possible, one more in the first ones.

        The seconds outside of the layers are mostly those of the head, and count as the last stage's.
        """
        n, stages, start = len(self.layers), [], 0
        for k in range(count):
            part = range(start, start + n // count + (k < n % count))
            start = part.stop
            seconds = sum(self.layers[i] for i in part) + (self.rest if k == count - 1 else 0.0)
            weights = sum(self.layer_weights[i] for i in part)
            weights += (self.first_weights if k == 0 else 0.0) + (self.last_weights if k == count - 1 else 0.0)
            stages.append((seconds, weights - (self.shared_weights if count == 1 else 0.0), part))
        return stages


def price_of(steps: Steps, graph: Graph, mesh: Mesh, modules: bool = True) -> StepPrice:
    """The price of a step. mesh: one axis, of the tensor parallel devices; or two, of replicas that share experts and these. modules:
    whether the solution is for exports."""
    scheme = MEGATRON_EXPERTS if len(mesh.axes) == 1 else MEGATRON_EXPERT_PARALLEL
    solution = baseline_only(Question(ModelGraphs(graph), mesh, Options(baselines=False, compiled=True), Stopwatch(None)), scheme, modules)
    few: dict[int | None, float] = dict.fromkeys([None, *range(len(steps.blocks))], 0.0)
    for name, row in solution.breakdown["blocks"].items():
        few[block_of_layer(name, steps.blocks)] += row["compute"] + row["communication"]
    for module, seconds in in_one_kernel(graph, mesh, solution):
        few[block_of_layer(module, steps.blocks)] += seconds
    weights, first, last, shared = _weights(steps, solution)
    parts = solution.peak["parts"]
    return StepPrice(
        tuple(few[k] for k in steps.corresponding), few[None], tuple(weights[k] for k in steps.corresponding), first, last, shared,
        sum(held for kind, held in parts.items() if kind not in ("parameters", "inputs")),
        _of_layers(steps, solution, _experts(graph)), _of_layers(steps, solution, _replicated(solution)), solution,
    )  # fmt: skip


def _of_layers(steps: Steps, solution: Solution, names: Collection[str]) -> float:
    """Bytes of these parameters on a device, of all layers of the model."""
    few = [0.0] * len(steps.blocks)
    for name in names:
        if (layer := block_of_layer(name, steps.blocks)) is not None:
            few[layer] += solution.parameters[name]["local_bytes"]
    return sum(few[k] for k in steps.corresponding)


def _experts(graph: Graph) -> set[str]:
    """The parameters of experts."""
    names = set()
    for op in graph.ops:
        for i, _ in op.inputs[3:] if is_experts(op) else ():
            while len(graph.ops[i].inputs) == 1:  # views
                i = graph.ops[i].inputs[0][0]
            names.add(graph.ops[i].name)
    return names


def _replicated(solution: Solution) -> list[str]:
    """The matrices that every tensor parallel device has."""
    alike = {name: set(row["layout"].split(",")) == {"R"} for name, row in solution.parameters.items() if len(row["shape"]) > 1}
    return [name for name, same in alike.items() if same and solution.mesh.shape[-1] > 1]


def _weights(steps: Steps, solution: Solution) -> tuple[list[float], float, float, float]:
    """Bytes per layer of the few, before the layers, after them, and of the tied ones, which are both before and after them."""
    layers, first, last, shared = [0.0] * len(steps.blocks), 0.0, 0.0, 0.0
    tied = {row["tied_to"] for row in solution.parameters.values() if "tied_to" in row}
    for name, row in solution.parameters.items():
        layer, held = block_of_layer(name, steps.blocks), row["local_bytes"]
        if layer is not None:
            layers[layer] += held
        elif name in tied:
            first, last, shared = first + held, last + held, shared + held
        elif "tied_to" not in row:
            first, last = (first, last + held) if any(layers) else (first + held, last)
    return layers, first, last, shared

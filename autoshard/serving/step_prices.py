"""Seconds and bytes of a step on the devices of one tensor parallel group, per layer: Megatron's layouts at the prices of the mesh.

The layouts are those of the baseline `megatron`: weights of heads and hidden features by columns and rows, the vocabulary sharded, the
cache sharded by key-value heads. What the step costs in a layer is read from the plan's breakdown, and the layers of the model cost
what their corresponding layers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning.context import Context
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.plan import baseline_only
from autoshard.serving.steps import Steps, block_of_layer
from autoshard.solution import Solution


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


def price_of(steps: Steps, graph: Graph, mesh: Mesh) -> StepPrice:
    """The price of a step. mesh: one axis, of the tensor parallel devices."""
    solution = baseline_only(Context(graph, mesh, Options(baselines=False), Stopwatch(None)), "megatron")
    few, rest = [0.0] * len(steps.blocks), 0.0
    for name, row in solution.breakdown["blocks"].items():
        seconds = row["compute"] + row["communication"]
        layer = block_of_layer(name, steps.blocks)
        if layer is None:
            rest += seconds
        else:
            few[layer] += seconds
    weights, first, last, shared = _weights(steps, solution)
    parts = solution.peak["parts"]
    return StepPrice(
        tuple(few[k] for k in steps.corresponding), rest, tuple(weights[k] for k in steps.corresponding), first, last, shared,
        sum(held for kind, held in parts.items() if kind not in ("parameters", "inputs")),
        _replicated(steps, solution), solution,
    )  # fmt: skip


def _replicated(steps: Steps, solution: Solution) -> float:
    rows = [
        (block_of_layer(name, steps.blocks), row)
        for name, row in solution.parameters.items()
        if len(row["shape"]) > 1 and row["layout"] == "R" and solution.mesh.num_devices > 1
    ]
    few = [sum(row["local_bytes"] for layer, row in rows if layer == k) for k in range(len(steps.blocks))]
    return sum(few[k] for k in steps.corresponding)


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

"""A pipeline plan and a model's captured microbatch -> the programs of its stages with their layouts, as `lower` runs them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from autoshard.graph import Graph
from autoshard.pipeline.layers import layers_of
from autoshard.pipeline.microbatches import batch_of
from autoshard.pipeline.schedules import Schedule, schedule_of
from autoshard.pipeline.stage_programs import StageProgram, stage_program
from autoshard.solution import SENT, Pipeline, PipelineStage, PipelineToRun, StageToRun
from autoshard.torch_private import pytree


def to_run(pipeline: Pipeline, graph: Graph, names: Iterable[str], example_inputs: Any) -> PipelineToRun:
    """The stages of `pipeline` in the program of one microbatch of the model.

    names: of the leaves of example_inputs, those of the full batch. ValueError where the plan is of another model or has no layouts.
    """
    layers = layers_of(graph, pipeline.assumptions.get("layers_asked"))
    if layers.count != (planned := pipeline.stages[-1].last):
        raise ValueError(f"the pipeline is of another model: it has {planned} layers, this model {layers.count}; plan this model")
    stages = tuple(_stage(stage_program(layers, s.first, s.last, recompute=s.recompute), s) for s in pipeline.stages)
    order = tuple(tuple((kind, k, stage) for kind, stage, k in units) for units in schedule_of_plan(pipeline).units)
    batch, leaves = batch_of(example_inputs), pytree.tree_leaves(example_inputs)
    pairs = zip(names, leaves, strict=True)
    split = frozenset(name for name, x in pairs if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch)
    return PipelineToRun(stages, order, pipeline.microbatches, pipeline.mesh.num_devices, split, pipeline.training)


def schedule_of_plan(pipeline: Pipeline) -> Schedule:
    return schedule_of(pipeline.schedule, pipeline.num_groups, pipeline.microbatches, len(pipeline.stages) // pipeline.num_groups)


def _stage(program: StageProgram, stage: PipelineStage) -> StageToRun:
    if stage.prices is None or not stage.layouts:
        raise ValueError("this pipeline has no layouts to run; plan it again with this version")
    missing = [op.name for op in program.graph.ops if op.name not in stage.layouts]
    if missing:
        raise ValueError(
            f"the pipeline is of another model: stage {stage.first} to {stage.last - 1} has no layouts for {missing[0]!r} and "
            f"{len(missing) - 1} more of this model; plan this model"
        )
    layouts = {op.name: stage.layouts[op.name] for op in program.graph.ops}
    return StageToRun(_sent_by_pass(program.graph), layouts, stage.prices, stage.devices, stage.group)


def _sent_by_pass(graph: Graph) -> Graph:
    """The graph with what the backward pass sends on among the gradients."""
    results = []
    for result in graph.results:
        backward = result.name.startswith(SENT) and result.value is not None and graph.ops[result.value[0]].backward
        results.append(replace(result, kind="gradient") if backward else result)
    return replace(graph, results=tuple(results))


def with_schedule(pipeline: Pipeline, name: str) -> Pipeline:
    """The same stages under another schedule. ValueError where it doesn't fit their number per device group."""
    chunks = len(pipeline.stages) // pipeline.num_groups
    schedule_of(name, pipeline.num_groups, pipeline.microbatches, chunks)  # raises
    if name == "interleaved_1f1b" and chunks < 2:
        raise ValueError("interleaved_1f1b needs two or more stages per device group, this pipeline has one; plan it with that schedule")
    return replace(pipeline, schedule=name)

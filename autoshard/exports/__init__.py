"""A Solution in the formats of other tools; each says what it leaves out of the plan and what that costs."""

import ast
import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.solution import PICKLE_SUFFIXES, Solution, json_text
from autoshard.writing import write_atomically

from . import checkpoint_policy, engines, fully_shard, modules, partition
from .record import Export, Left, why_not_held
from .sharding_map import as_text, portable, sharding_map, spec_of, spmd_type, unbacked_mesh


@dataclass(frozen=True)
class ExportFormat:
    """How an export is built from a Solution (and the name of an axis), and how it is written as plain data and as Python source."""

    make: Callable[[Solution, str | None], Any]
    plain: Callable[[Any], Any] = dict
    python: Callable[[Any], str] | None = None


FORMATS = {
    "sharding_map": ExportFormat(lambda solution, _: sharding_map(solution), as_text),
    "json": ExportFormat(lambda solution, _: portable(solution)),
    "parallelize_module": ExportFormat(modules.parallelize_plan, modules.styles_as_text, modules.as_python),
    "tp_plan": ExportFormat(modules.tp_plan),
    "vllm": ExportFormat(lambda solution, axis: engines.engine_plan(solution, "vllm", axis)),
    "sglang": ExportFormat(lambda solution, axis: engines.engine_plan(solution, "sglang", axis)),
    "fully_shard": ExportFormat(fully_shard.recipe, fully_shard.as_text, fully_shard.as_python),
    "checkpoint_policy": ExportFormat(checkpoint_policy.policy_of),
    "distribute_module": ExportFormat(lambda solution, _: partition.Partition(solution), python=partition.as_python),
}
apply_recipe = fully_shard.apply
checkpoint_contexts = checkpoint_policy.contexts_of
BY_MODULES = ("parallelize_module", "tp_plan", "vllm", "sglang", "fully_shard")
HOLDS_WITHIN = 0.05  # of the plan's seconds: what takes longer is another plan


class NotHeld(ValueError):
    """A format that can't hold the plan; the message says what it would take, and which formats can."""


def export(
    solution: Solution,
    kind: str,
    path: str | os.PathLike[str] | None = None,
    *,
    axis: str | None = None,
    within: float = HOLDS_WITHIN,
) -> Any:
    """The plan in the format `kind`; also written to `path`, in one atomic step, where there is one.

    sharding_map        {module: {"node", "sharding": {attribute: DTensorSpec}}}; a `.pkl` file holds the specs
    json                placements by parameter name, plain data
    parallelize_module  {module: ParallelStyle} for `parallelize_module(model, device_mesh[axis], plan)`
    tp_plan             {"layers.*.mlp.up_proj": "colwise"} for Hugging Face's `DistributedConfig(tp_plan=...)`
    vllm, sglang        {"layers\\.\\d+\\.mlp\\.up_proj$": "colwise"}, the `base_model_tp_plan` of a config for their Transformers backends
    fully_shard         a recipe: parallelize_module over an axis where that pays, checkpoint and fully_shard on blocks over the other axes;
                        `exports.apply_recipe` does it
    checkpoint_policy   {module: {operator: "MUST_SAVE", ...}} of what a plan with recompute="auto" saves; `exports.checkpoint_contexts`
                        makes the context_fn of torch.utils.checkpoint of it
    distribute_module   the partition function for `distribute_module(model, device_mesh, partition_fn)`

    axis: the mesh axis on which the module styles shard; by default the one on which the plan shards most weights. Each value has `said`,
    `left`, `cost_seconds` and `extra_seconds`: what it leaves out of the plan, and what that costs. within: the share of the plan's
    seconds by which a step may take longer as exported. Files are JSON; formats that are code for a launcher can also be written to a
    `.py` file. `NotHeld`, a ValueError, where a step takes longer or needs more than the plan's memory limit; formats whose seconds the
    reader decides (cost_seconds is inf) are never refused. ValueError on an unknown kind, axis or file ending, on a plan whose
    parameters lack shape, dtype or bytes, and on a negative `within`.
    """
    if kind not in FORMATS:
        raise ValueError(f"there is no export {kind!r}; expected one of {', '.join(FORMATS)}")
    if axis is not None and kind not in BY_MODULES:
        raise ValueError(f"{kind} carries every axis; leave axis={axis!r} out")
    if not within >= 0:
        raise ValueError(f"within is {within}; expected a share of 0 or more, for example 0.05")
    content = None if path is None else _content(kind, Path(path))
    for name, row in solution.parameters.items():  # a file needs no more than layouts to be a plan
        if missing := [field for field in ("shape", "dtype", "local_bytes") if field not in row]:
            raise ValueError(f"parameter {name!r} of the plan has no {' and no '.join(missing)}, which an export needs; plan again")
    value = _exported(solution, kind, axis, within)
    if why := _why_not_held(solution, value, within):
        raise NotHeld(f"{kind} can't hold this plan: {why}; {_others(solution, kind, within)}")
    if path is not None and content is not None:
        parser: Callable[[bytes], object] = ast.parse if Path(path).suffix == ".py" else json.loads
        write_atomically(content(value), path, None if Path(path).suffix in PICKLE_SUFFIXES else parser)
    return value


def _exported(solution: Solution, kind: str, axis: str | None, within: float) -> Any:
    return fully_shard.recipe(solution, axis, within) if kind == "fully_shard" else FORMATS[kind].make(solution, axis)


def _why_not_held(solution: Solution, value: Any, within: float) -> str:
    return why_not_held(solution, value.cost_seconds, getattr(value, "peak_bytes", None), within)


def _others(solution: Solution, kind: str, within: float) -> str:
    """The formats that hold the plan, as advice."""
    held: list[str] = []
    layouts: list[str] = []
    for other in FORMATS:
        try:
            value = _exported(solution, other, None, within)
        except ValueError:
            continue  # it has nothing of this plan
        if other != kind and not _why_not_held(solution, value, within):
            (held if value.cost_seconds < math.inf else layouts).append(other)
    seconds = f"{' and '.join(held)} can" if held else "no format of modules can"
    if modules.NO_AXIS not in solution.modules:
        seconds += ", as far as this file has prices of them: plan again for those of fully_shard alone"
    return f"{seconds}; {', '.join(layouts)} carry its layouts or choices without the routes between them, and `parallelize` runs all of it"


def as_plain(value: Any, kind: str) -> Any:
    """The value of `export(solution, kind)` as lists, dicts and strings: the content of its JSON file."""
    return FORMATS[kind].plain(value)


def _content(kind: str, path: Path) -> Callable[[Any], str | bytes]:
    """The function that writes the file's content, chosen (or refused) before the export is computed."""
    python = FORMATS[kind].python
    if path.suffix in PICKLE_SUFFIXES:
        if kind != "sharding_map":
            raise ValueError(f"{path} asks for a pickle, but {kind} is text; name a file that ends in .json")
        return lambda value: pickle.dumps(dict(value))
    if path.suffix == ".py":
        if python is None:
            raise ValueError(f"{path} asks for Python, but {kind} is data; name a file that ends in .json")
        return python
    return lambda value: json_text(as_plain(value, kind)) + "\n"

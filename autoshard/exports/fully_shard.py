"""A recipe of two steps for a mesh with a tensor parallel axis: `parallelize_module` on it, then `fully_shard` on the other axes.

    recipe = export(solution, "fully_shard")     {"mesh", "parallelize_module", "fully_shard", "replicate", "microbatches", "mp_policy"}
    apply(recipe, model, device_mesh)                   or write it: export(solution, "fully_shard", "recipe.py")

A plan of several microbatches has two more choices, which fully_shard has once for all parameters; here that of most bytes:

    a kept copy is sharded        reshard_after_forward=True, gathered again for every use
    a kept copy is replicated     reshard_after_forward=False, and set_reshard_after_backward(False) up to the last microbatch
    a sum of gradients is Partial, reduced once per step     set_requires_gradient_sync(False) up to the last microbatch
    a sum of gradients is sharded, reduced every time        set_requires_gradient_sync(True)

    for k in range(m):
        begin_microbatch(recipe, model, k)      before the forward of microbatch k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from autoshard.exports.modules import PRECISION, generic, on_axis, parallelize_plan, styles_as_text
from autoshard.exports.record import Export, Left, with_cost
from autoshard.exports.source import comments, literal, rows
from autoshard.layout import parse
from autoshard.solution import Solution
from autoshard.torch_private import source_of


def recipe(solution: Solution, axis: str | None = None) -> Export:
    """The axes of parallelize_module (tensor parallel), fully_shard and replicate. The data axes are all other axes; they shard the batch.

    Parameters are sharded on the data axes where the plan shards most of their bytes there, otherwise replicated.
    """
    axis, known = on_axis(solution, axis)
    k = solution.mesh.axis_names.index(axis)
    styles = parallelize_plan(solution, axis)
    data = [name for j, name in enumerate(solution.mesh.axis_names) if j != k and solution.mesh.shape[j] > 1]
    sharded = _is_sharded(solution, [solution.mesh.axis_names.index(name) for name in data])
    blocks = list(dict.fromkeys(_block(name) for name in solution.parameters if _block(name)))
    value = {
        "mesh": {"shape": list(solution.mesh.shape), "axis_names": list(solution.mesh.axis_names)},
        "parallelize_module": {"axis": axis, "plan": dict(styles)},
        "fully_shard": {"axes": data if sharded else [], "modules": [*blocks, ""] if sharded and data else []},
        "replicate": {"axes": [] if sharded else data},
    }
    if solution.precision is not None and data:
        value["mp_policy"] = asdict(solution.precision)
    carried = ("the memory limit", PRECISION) if data else ("the memory limit",)
    left = [one for one in styles.left if "fully_shard can shard on the others" not in one.why and one.what not in carried]
    if solution.microbatches > 1:
        value["microbatches"], lost = _microbatches(solution, [solution.mesh.axis_names.index(name) for name in data])
        left += lost
    if data:
        left.append(Left("which dim of each parameter is sharded on the data axes", "fully_shard shards dim 0 of all of them"))
    return with_cost(solution, value, tuple(left), known, "fully_shard" if sharded and data else "modules")


def _microbatches(solution: Solution, axes: list[int]) -> tuple[dict, list[Left]]:
    """How copies of parameters and sums of gradients are treated on the data axes, and what that loses of the plan."""
    stored = {name: row for name, row in solution.parameters.items() if "kept" in row and "tied_to" not in row}

    def most(key: str, holds: Callable[[Any], bool]) -> tuple[bool, int]:
        """Whether it holds for most bytes, on some data axis; and for how many parameters it is the other way."""
        rows = [(any(holds(parse(row[key])[k]) for k in axes), row["local_bytes"]) for row in stored.values() if key in row]
        chosen = sum(size if one else -size for one, size in rows) > 0
        return chosen, sum(one != chosen for one, _ in rows)

    sharded, otherwise = most("kept", lambda p: p.is_shard())
    once, summed_otherwise = most("accumulated", lambda p: p.is_partial())
    left = [Left(f"the kept copies of {otherwise} parameters", "fully_shard has one choice here for all")] if otherwise else []
    left += [Left(f"when {summed_otherwise} gradients are reduced", "fully_shard has one choice here for all")] if summed_otherwise else []
    if solution.accumulation_dtype:
        left.append(Left(f"sums of gradients in {solution.accumulation_dtype}", "fully_shard adds them up in its reduce_dtype"))
    return {"number": solution.microbatches, "reshard_after_forward": sharded, "requires_gradient_sync": not once}, left


def begin_microbatch(recipe: dict, model: nn.Module, k: int) -> None:
    """Sets, before the forward of microbatch k of a step, what `apply`'s modules do after forward and backward."""
    step = recipe["microbatches"]
    is_last = k == step["number"] - 1
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(is_last or step["requires_gradient_sync"], recurse=False)
            module.set_reshard_after_backward(is_last or step["reshard_after_forward"], recurse=False)


def apply(recipe: dict, model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Carry the recipe out on a model and a DeviceMesh whose axes have the recipe's names; the same module, changed.

    recipe: the value of `export(solution, "fully_shard")`. Every rank calls this. ValueError where the axes have other names.
    """
    if tuple(device_mesh.mesh_dim_names or ()) != tuple(recipe["mesh"]["axis_names"]):
        raise ValueError(f"the device mesh's axes are {device_mesh.mesh_dim_names}, the recipe's {recipe['mesh']['axis_names']}")
    tensor = recipe["parallelize_module"]
    if tensor["plan"]:
        parallelize_module(model, device_mesh[tensor["axis"]], tensor["plan"])
    axes = recipe["fully_shard"]["axes"]
    policy = MixedPrecisionPolicy(**{k: getattr(torch, v) if isinstance(v, str) else v for k, v in recipe.get("mp_policy", {}).items()})
    inner = replace(policy, output_dtype=None)  # only the model's own outputs are cast
    for name in recipe["fully_shard"]["modules"]:
        options = {"mp_policy": inner if name else policy, **_resharding(recipe)}
        fully_shard(model.get_submodule(name), mesh=_flat(device_mesh, axes), **options)
    if recipe["replicate"]["axes"]:
        from autoshard.torch_private import replicate  # here: only plans with replicated parameters need it

        replicate(model, mesh=_flat(device_mesh, recipe["replicate"]["axes"]), mp_policy=policy)
    return model


def _resharding(recipe: dict) -> dict[str, bool]:
    step = recipe.get("microbatches")
    return {} if step is None else {"reshard_after_forward": step["reshard_after_forward"]}


def _flat(device_mesh: DeviceMesh, axes: list[str]) -> DeviceMesh:
    part = device_mesh[tuple(axes)] if len(axes) > 1 else device_mesh[axes[0]]
    return part._flatten("_".join(axes)) if len(axes) > 1 else part


def as_text(recipe: dict) -> dict:
    """The recipe as plain data, with the styles as text."""
    tensor = recipe["parallelize_module"]
    return {**recipe, "parallelize_module": {"axis": tensor["axis"], "plan": styles_as_text(tensor["plan"])}}


IMPORTS = "from dataclasses import replace\n\nimport torch\n"  # of a file with a policy of mixed precision


def as_python(recipe: Any) -> str:
    """A module with one function `apply(model, device_mesh)` that does it, for a launcher without autoshard."""
    plan = rows(as_text(recipe)["parallelize_module"]["plan"])
    names, shape = tuple(recipe["mesh"]["axis_names"]), tuple(recipe["mesh"]["shape"])
    head = f"Written by autoshard. For init_device_mesh(device, {shape}, mesh_dim_names={names})."
    shard, replicated = recipe["fully_shard"], recipe["replicate"]["axes"]
    lines = [f"    parallelize_module(model, device_mesh[{literal(recipe['parallelize_module']['axis'])}], PLAN)"] if plan else []
    policy = ", mp_policy=POLICY" if "mp_policy" in recipe else ""
    if shard["modules"]:
        lines += [f"    data = {_mesh_code(shard['axes'])}", f"    for name in {literal(shard['modules'])}:"]
        options = f"{policy and ', mp_policy=INNER if name else POLICY'}"
        options += "".join(f", {key}={value}" for key, value in _resharding(recipe).items())
        lines += [f"        fully_shard(model.get_submodule(name), mesh=data{options})"]
    if replicated:
        lines += [f"    {source_of('replicate')}", ""]
        lines += [f"    replicate(model, mesh={_mesh_code(replicated)}{policy})"]
    return (
        f"{comments([head, *getattr(recipe, 'said', ())])}\n"
        f"{IMPORTS if policy else ''}from torch.distributed.fsdp import {'MixedPrecisionPolicy, ' if policy else ''}fully_shard\n"
        "from torch.distributed.tensor import Replicate\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n\n"
        f"PLAN = {{\n{plan}}}\n{_policy_code(recipe)}\n\ndef apply(model, device_mesh):\n"
        + "\n".join([*lines, "    return model"]) + "\n" + _loop_code(recipe)
    )  # fmt: skip


def _loop_code(recipe: dict) -> str:
    """The function to be called before each microbatch, where a step has several."""
    step = recipe.get("microbatches")
    if step is None:
        return ""
    last = f"k == {step['number'] - 1}"
    values = {"requires_gradient_sync": step["requires_gradient_sync"], "reshard_after_backward": step["reshard_after_forward"]}
    calls = [f"            module.set_{key}({True if value else last}, recurse=False)" for key, value in values.items()]
    head = f"def begin_microbatch(model, k):\n    # before the forward of microbatch k of {step['number']}\n"
    body = ["    for module in model.modules():", "        if hasattr(module, 'set_requires_gradient_sync'):", *calls]
    return f"\n\n{head}" + "\n".join(body) + "\n"


def _policy_code(recipe: dict) -> str:
    """The lines that make the policy of mixed precision; empty without one."""
    if "mp_policy" not in recipe:
        return ""
    given = [f"{name}={f'torch.{value}' if isinstance(value, str) else value}" for name, value in recipe["mp_policy"].items()]
    lines = [f"POLICY = MixedPrecisionPolicy({', '.join(given)})", "INNER = replace(POLICY, output_dtype=None)  # of modules inside"]
    return "\n".join([*lines, ""])


def _mesh_code(axes: list[str]) -> str:
    if len(axes) == 1:
        return f"device_mesh[{literal(axes[0])}]"
    return f"device_mesh[tuple({literal(axes)})]._flatten({literal('_'.join(axes))})"


def _is_sharded(solution: Solution, axes: list[int]) -> bool:
    """Whether most bytes of parameters are sharded on one of `axes`."""
    sharded = replicated = 0
    for row in solution.parameters.values():
        layout = parse(row["layout"])
        if any(layout[k].is_shard() for k in axes):
            sharded += row["local_bytes"]
        else:
            replicated += row["local_bytes"]
    return sharded > replicated


def _block(name: str) -> str:
    """`h.0.attn.c_attn.weight` -> `h.0`; empty for parameters outside of repeated blocks."""
    head, star, _ = generic(name).partition("*")
    return name[: len(head)] + name[len(head) :].partition(".")[0] if star else ""

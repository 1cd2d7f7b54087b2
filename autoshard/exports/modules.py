"""Plans for launchers that shard modules on one mesh axis: torch's `parallelize_module`, Hugging Face's `tp_plan`.

Both shard weights of nn.Linear and nn.Embedding and run the model's own code on the local tensors. Planning has recorded which weights
of a Solution can be sharded like that (`Solution.modules`); here each of them gets the tool's name for its style:

    style             weight              parallelize_module                              tp_plan
    column            [out / n, in]       ColwiseParallel()                               colwise
    row               [out, in / n]       RowwiseParallel()                               rowwise
    column_gathered   [out / n, in]       ColwiseParallel(output_layouts=Replicate())     colwise_gather_output
    vocabulary        [words / n, width]  RowwiseParallel(input_layouts=Replicate())      embedding_rowwise
    features          [words, width / n]  ColwiseParallel(output_layouts=Replicate())     embedding_colwise
"""

import re
from typing import Any

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Replicate

from autoshard.exports.record import Export, Left, sent_tokens, with_cost
from autoshard.exports.source import comments, rows
from autoshard.layout import parse
from autoshard.solution import Solution

TP_STYLES = {
    "column": "colwise",
    "row": "rowwise",
    "column_gathered": "colwise_gather_output",
    "vocabulary": "embedding_rowwise",
    "features": "embedding_colwise",
    "inside": "replicated_with_grad_allreduce",
}
PRECISION = "mixed precision"  # of a plan, which module styles leave out
RECOMPUTED = "recomputation"  # too
NO_AXIS = ""  # the entry of `Solution.modules` without tensor parallelism


def style(name: str) -> ParallelStyle:
    """The style as torch's object."""
    by_rows = name in ("row", "vocabulary")
    options = {} if name in ("row", "column") else {"input_layouts" if by_rows else "output_layouts": Replicate()}
    return RowwiseParallel(**options) if by_rows else ColwiseParallel(**options)


def parallelize_plan(solution: Solution, axis: str | None = None) -> Export:
    """`{module: ParallelStyle}` for `parallelize_module(model, device_mesh[axis], plan)`."""
    axis, known = on_axis(solution, axis)
    plan = {weight.rpartition(".")[0]: style(name) for weight, name in known["styles"].items() if name != "inside"}
    inside = [weight for weight, name in known["styles"].items() if name == "inside"]
    left = [Left(generic(weight), "it is replicated among sharded tensors: its gradient must be summed over the axis") for weight in inside]
    left = list(dict.fromkeys(left)) if solution.training else []
    return with_cost(solution, plan, (*left, *left_on(solution, axis, known)), known, "modules")


def tp_plan(solution: Solution, axis: str | None = None) -> Export:
    """`{"model.layers.*.self_attn.q_proj": "colwise", ...}` for `DistributedConfig(tp_plan=...)` of transformers.

    from_pretrained(folder, distributed_config=DistributedConfig(tp_plan=dict(plan)))     what replaces from_pretrained(folder, tp_plan=...)

    transformers merges it with the model's own plan, so replicated modules are named too: "replicate".
    """
    axis, known = on_axis(solution, axis)
    plan: dict[str, str] = {}
    for name in solution.parameters:
        module, _, attribute = name.rpartition(".")
        key = generic(module if attribute in ("weight", "bias") else name)
        plan.setdefault(generic(module), "replicate")
        plan.setdefault(key, "replicate")
        if name in known["styles"]:
            plan[key] = TP_STYLES[known["styles"][name]]
    plan.pop("", None)
    return with_cost(solution, plan, left_on(solution, axis, known), known, "modules")


def styles_as_text(plan: dict[str, ParallelStyle]) -> dict[str, str]:
    """`{"h.0.mlp.up": "ColwiseParallel()", ...}`: the Python expression of each style."""
    options = {ColwiseParallel: "output_layouts", RowwiseParallel: "input_layouts"}

    def written(one: Any) -> str:
        option = options[type(one)]
        return f"{type(one).__name__}({f'{option}=Replicate()' if getattr(one, option) == (Replicate(),) else ''})"

    return {module: written(one) for module, one in plan.items()}


def as_python(plan: Export) -> str:
    """A module with PLAN, for a launcher without autoshard."""
    return (
        f"{comments(['Written by autoshard: parallelize_module(model, device_mesh, PLAN).', *plan.said])}\n"
        "from torch.distributed.tensor import Replicate\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n\n"
        f"PLAN = {{\n{rows(styles_as_text(plan))}}}\n"
    )


def on_axis(solution: Solution, axis: str | None) -> tuple[str, dict]:
    """The axis of the module styles and its entry of `Solution.modules`; by default the axis on which the plan shards most weights."""
    names, known = solution.mesh.axis_names, {name: row for name, row in solution.modules.items() if name != NO_AXIS}
    if axis is not None and axis not in names:
        raise ValueError(f"the mesh has no axis {axis!r}; its axes are {', '.join(names)}")
    if solution.mesh.num_devices == 1:
        return axis or names[-1], {"styles": {}, "dropped": [], "seconds": {"modules": solution.cost, "fully_shard": solution.cost}}
    if not known:
        raise ValueError("the solution doesn't say how its weights are used; plan again, and with baselines, to export plans of modules")
    if axis is None:
        axis = max(reversed(known), key=lambda name: len(known[name]["styles"]))
    if axis not in known:
        raise ValueError(f"the plan shards no weight on {axis}, so there is nothing to export; it does on {', '.join(known)}")
    return axis, known[axis]


def left_on(solution: Solution, axis: str, known: dict) -> tuple[Left, ...]:
    """What a plan of module styles on `axis` leaves out."""
    left = [Left(row["weights"], row["why"], row["plan"]) for row in known["dropped"]]
    k = solution.mesh.axis_names.index(axis)
    for other, name in enumerate(solution.mesh.axis_names):
        sharded = [row for row in solution.parameters.values() if other != k and parse(row["layout"])[other].is_shard()]
        if sharded:
            why = "module styles cover one axis; fully_shard can shard on the others"
            left.append(Left(f"{len(sharded)} parameters sharded on {name}", why))
    if _inputs_are_sharded(solution, k):
        left.append(Left(f"inputs sharded on {axis}", f"under module styles all ranks of {axis} see the same inputs"))
    if solution.precision is not None:
        left.append(Left(PRECISION, f"{solution.precision}; the module runs in its own dtypes: use fully_shard's mp_policy, or autocast"))
    if solution.training and (solution.recompute or solution.saved):
        left.append(Left(RECOMPUTED, "the seconds and bytes are those with it: switch the tool's own activation checkpointing on"))
    left += sent_tokens(solution)
    left.append(Left("layouts of activations, and routes between them", "a module's style fixes them"))
    return tuple(left)


def _inputs_are_sharded(solution: Solution, axis: int) -> bool:
    return any(
        placed.outputs and placed.outputs[0] is not None and parse(placed.outputs[0])[axis].is_shard()
        for name, placed in solution.layouts.items()
        if name in solution.inputs and not placed.inputs
    )


def block_of(name: str) -> str:
    """`h.0.attn.c_attn.weight` -> `h.0`; empty for parameters outside of repeated blocks, such as those of a ParameterList."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else ""


def owners_of(solution: Solution) -> dict[str, str]:
    """For each name of a block that holds parameters the name that its parameters have: another one, if the model has it at two places."""
    owners: dict[str, set[str]] = {}
    for name, row in solution.parameters.items():
        owners.setdefault(block_of(name), set()).add(block_of(row.get("tied_to", name)))
    return {block: of.pop() if len(of) == 1 else block for block, of in owners.items() if block}


def generic(name: str) -> str:
    """`layers.3.mlp.up_proj` -> `layers.*.mlp.up_proj`, number by number as transformers looks names up in a plan."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)

"""Plans for the Transformers backends of vLLM and SGLang: `{pattern of modules: style}`, what both read as `model.tp_plan`.

Each nn.Linear of the base model is replaced by the class of the first pattern that matches its name (`re.match`, "model." put before
both), and without one by a replicated linear. So a pattern here is a regular expression up to the end of a name,
`layers\\.\\d+\\.mlp\\.up_proj$`; names begin below the base model, as in a config's `base_model_tp_plan`. Embeddings and the head are
outside of it: the engines shard the vocabulary by themselves.

    style             vLLM                                           SGLang
    column            colwise               ColumnParallelLinear     colwise
    row               rowwise               RowParallelLinear        rowwise
    column_gathered   colwise_gather_output gather_output=True       colwise_rep
    no style          replicate             ReplicatedLinear         replicate

Sources: vllm-project/vllm vllm/model_executor/models/transformers/{utils.py: replace_linear_class, base.py: recursive_replace};
sgl-project/sglang python/sglang/srt/models/transformers.py: replace_linear_class, _normalize_tp_style (other names are a ValueError there).
vLLM knows the names of transformers 4 (colwise_rep) and 5 (colwise_gather_output); transformers 5 itself the second one only.
"""

import re

from autoshard.exports.modules import left_on, on_axis
from autoshard.exports.record import Export, Left, with_cost
from autoshard.solution import Solution

REPLICATE = "replicate"
STYLES = {
    "vllm": {"column": "colwise", "row": "rowwise", "column_gathered": "colwise_gather_output"},
    "sglang": {"column": "colwise", "row": "rowwise", "column_gathered": "colwise_rep"},
}
OUTSIDE = ("vocabulary", "features")  # styles of embeddings


def engine_plan(solution: Solution, engine: str, axis: str | None = None) -> Export:
    """The plan for `engine`, a key of STYLES."""
    axis, known = on_axis(solution, axis)
    base, left = _base_model(solution), list(left_on(solution, axis, known))
    plan: dict[str, str] = {}
    for name, row in solution.parameters.items():
        module, _, attribute = name.rpartition(".")
        style = known["styles"].get(name)
        if attribute != "weight" or len(row["shape"]) != 2:
            continue
        if style in OUTSIDE or not module.startswith(base):
            left.append(Left(module, f"{engine} shards embeddings and the head by itself"))
        else:
            plan.setdefault(pattern(module.removeprefix(base)), STYLES[engine].get(style, REPLICATE))
    return with_cost(solution, plan, tuple(dict.fromkeys(left)), known, "modules")


def pattern(module: str) -> str:
    """`layers.3.mlp.up_proj` -> `layers\\.\\d+\\.mlp\\.up_proj$`."""
    return ".".join(r"\d+" if part.isdigit() else re.escape(part) for part in module.split(".")).replace(".", r"\.") + "$"


def _base_model(solution: Solution) -> str:
    """What the names of the base model begin with: "model." where a head is beside it, "" where the plan is of a base model alone."""
    parts = [name.split(".") for name in solution.parameters]
    layers = [part[0] for part in parts if any(word.isdigit() for word in part)]
    beside = any(part[0] != layers[0] for part in parts) if layers else False
    nested = layers and all(not part[1].isdigit() for part in parts if part[0] == layers[0] and len(part) > 1)
    return f"{layers[0]}." if beside and nested else ""

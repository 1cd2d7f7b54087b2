"""What a plan recomputes, as a policy of torch's selective activation checkpointing: torchtitan's per-op list, or any other launcher's.

    policy = export(solution, "checkpoint_policy")       {module: {operator: "MUST_SAVE", "PREFER_RECOMPUTE" or "MUST_CPU_OFFLOAD"}}
    contexts = contexts_of(policy, module_name)             what torch.utils.checkpoint(..., context_fn=contexts) takes

    saved by the plan          an operator of a module of which the plan recomputes no call
    recomputed by the plan     one of which it recomputes every call whose result the backward pass reads

The policy sees an operator, not a call: where a module calls one operator several times, and the plan treats these calls differently,
the operator is saved, and `left` says so; a block with several names has one policy. Views cost nothing and are left out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoshard.exports.modules import block_of, owners_of
from autoshard.exports.record import Export, Left
from autoshard.solution import Solution

SAVE, RECOMPUTE, OFFLOAD = "MUST_SAVE", "PREFER_RECOMPUTE", "MUST_CPU_OFFLOAD"
WORDS = {"kept": SAVE, "recomputed": RECOMPUTE, "offloaded": OFFLOAD}
KERNELS = tuple(f"aten._scaled_dot_product_{kernel}.default" for kernel in ("flash_attention", "efficient_attention", "cudnn_attention"))
# what torch calls where a captured graph has one operator
OPERATORS = {"autoshard.attention.default": KERNELS, "autoshard.dropout_attention.default": KERNELS}


def policy_of(solution: Solution, _: str | None = None) -> Export:
    """The policy of a plan that was made with recompute="auto". ValueError for a plan without any choice per tensor."""
    if not solution.saved:
        raise ValueError("the plan recomputes and offloads nothing per tensor, so it has no policy; plan with recompute='auto' and a limit")
    owner, names = owners_of(solution), {}
    together: dict[str, dict[str, set[str]]] = {}
    for module, targets in solution.saved.items():
        block = block_of(f"{module}.")
        names[module] = (owner.get(block) or block) + module[len(block) :]
        for target, ways in targets.items():
            together.setdefault(names[module], {}).setdefault(target, set()).update(ways)
    mixed = [f"{target} of {module or 'the model'}" for module, of in together.items() for target, of_all in of.items() if len(of_all) > 1]
    value: dict[str, dict[str, str]] = {}
    for module, name in (*zip(together, together), *names.items()):
        for target, of_all in together[name].items():
            way = WORDS[min(of_all)] if len(of_all) == 1 else SAVE
            value.setdefault(module, {}).update(dict.fromkeys(OPERATORS.get(target, (target,)), way))
    why = "a policy treats all calls of an operator alike: they are saved"
    left = (Left(f"how calls differ of {mixed[0]} and {len(mixed) - 1} more", why),) if mixed else ()
    return Export(value, left=left)


def contexts_of(policy: Mapping[str, Mapping[str, str]], module: str) -> Callable[[], Any]:
    """`context_fn` for torch.utils.checkpoint of the block `module` ("layers.3"): the policy of the operators of all modules in it."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, of_block(policy, module)))


def of_block(policy: Mapping[str, Mapping[str, str]], module: str) -> dict[str, str]:
    """The policy of a block: how each operator of all modules in it is treated."""
    ways: dict[str, set[str]] = {}
    for name, targets in policy.items():
        if name == module or name.startswith(module + "."):
            for target, way in targets.items():
                ways.setdefault(target, set()).add(way)
    return {target: way.pop() if len(way) == 1 else SAVE for target, way in ways.items()}


def _policy(chosen: Mapping[str, str], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Operators that the plan doesn't know run again, as without a policy."""
    return getattr(CheckpointPolicy, chosen.get(str(operator), RECOMPUTE))

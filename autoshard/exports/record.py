"""The value of an export: a dict that also says what it leaves out of the plan and what that costs."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from autoshard.layout import parse
from autoshard.solution import Solution
from autoshard.units import seconds, size


class Left(NamedTuple):
    """Something of the plan that the format can't carry."""

    what: str  # generic names of tensors, or a kind of thing
    why: str
    plan: str = ""  # its layout in the plan

    def __str__(self) -> str:
        return f"not carried: {self.what}{f' ({self.plan})' if self.plan else ''}: {self.why}"


class Export(dict):
    """The export as a dict in its tool's format, with a list of what it leaves out.

    left: the parts of the plan that the format can't carry. cost_seconds: the time of a step under the export, at the plan's prices,
    inf where it isn't known; extra_seconds: how much longer it is than under the plan. peak_bytes: of a device under the export; None
    where it isn't known.
    """

    def __init__(
        self, value: Any = (), *, left: tuple[Left, ...] = (), cost_seconds: float = float("inf"), plan_seconds: float = 0.0,
        peak_bytes: float | None = None,
    ):  # fmt: skip
        super().__init__(value)
        self.left, self.cost_seconds, self.plan_seconds, self.peak_bytes = left, cost_seconds, plan_seconds, peak_bytes

    @property
    def extra_seconds(self) -> float:
        return self.cost_seconds - self.plan_seconds

    @property
    def said(self) -> tuple[str, ...]:
        """As sentences: one for the cost, one for each thing left out."""
        price = "what it costs is not known: the tool that reads it decides the rest by itself"
        if self.cost_seconds < math.inf:
            price = f"a step takes {self.cost_seconds:.4g} s as exported, {self.plan_seconds:.4g} s as planned: {self.extra_seconds:+.3g} s"
        return (price, *map(str, self.left))


def _of_computation(solution: Solution) -> Iterator[Left]:
    """Attention over a sharded sequence, and a loss in chunks of tokens."""
    attention = [(op, placed) for op, placed in solution.layouts.items() if op.startswith("attention") and placed.inputs]
    sharded = [placed.inputs[:2] for op, placed in attention if "backward" not in op and "S(2)" in placed.inputs[0].split(",")]
    if sharded:
        why = "modules compute attention of all tokens that they are given; shard the sequence with the tool's own context parallelism"
        order = " in head-tail order" if solution.sequence_order is not None else ""
        yield Left(f"attention over a sharded sequence{order}", why, f"queries {sharded[0][0]}, keys {sharded[0][1]}")
    if solution.chunked_loss:
        why = "modules compute the logits of all tokens that they are given; use a chunked cross entropy in the model"
        yield Left(f"logits of {solution.chunked_loss} tokens at a time", why)


def sent_tokens(solution: Solution) -> tuple[Left, ...]:
    """What a format of parameters and modules loses of expert parallelism: one entry where tokens go to sharded experts by all_to_all."""
    of_experts = [placed.inputs for op, placed in solution.layouts.items() if re.fullmatch(r"(biased_)?experts(_\d+)?", op)]
    pairs = [list(zip(parse(inputs[0]), parse(inputs[3]), strict=True)) for inputs in of_experts if len(inputs) in (5, 7)]
    count = sum(any(tokens.is_shard(0) and experts.is_shard(0) for tokens, experts in pair) for pair in pairs)
    why = "the model's own code sorts all tokens on each device, and none are sent"
    return (Left(f"tokens sent to the experts of {count} layers by all_to_all", why),) if count else ()


def with_cost(solution: Solution, value: dict, left: tuple[Left, ...], known: dict, scheme: str) -> Export:
    """The export with the cost of `scheme`, which planning computed. known: the axis' entry of `Solution.modules`."""
    cost, peak = known["seconds"].get(scheme), known.get("peak_bytes", {}).get(scheme)
    left = (*left, *_of_computation(solution))
    return Export(value, left=left, cost_seconds=math.inf if cost is None else cost, plan_seconds=solution.cost, peak_bytes=peak)


def why_not_held(solution: Solution, cost: float, peak: float | None, within: float) -> str:
    """Why something of this cost is not the plan any more; "" where it is, within this share of its seconds, or where nothing is known."""
    if (limit := solution.memory_limit) is not None and peak is not None and peak > limit:
        return f"a device needs {size(peak)} as exported, the plan was made for {size(limit)}"
    if cost < math.inf and cost > solution.cost * (1 + within):
        return f"a step takes {seconds(cost)} as exported and {seconds(solution.cost)} as planned, more than {within:.0%} longer"
    return ""

"""An export that says what it leaves out of the plan and what that costs."""

from __future__ import annotations

from typing import Any, NamedTuple

from autoshard.solution import Solution


class Left(NamedTuple):
    """Something of the plan that the format can't carry."""

    what: str  # generic names of tensors, or a kind of thing
    why: str
    plan: str = ""  # the layout that the plan gives it


class Export(dict):
    """The export as a dict, as its tool takes it, with what is not in it.

    left: what of the plan it can't carry. cost_seconds: a step under the export, at the plan's prices, inf where that isn't known;
    extra_seconds: how much more than under the plan.
    """

    def __init__(self, value: Any = (), *, left: tuple[Left, ...] = (), cost_seconds: float = float("inf"), plan_seconds: float = 0.0):
        super().__init__(value)
        self.left, self.cost_seconds, self.plan_seconds = left, cost_seconds, plan_seconds

    @property
    def extra_seconds(self) -> float:
        return self.cost_seconds - self.plan_seconds

    @property
    def said(self) -> tuple[str, ...]:
        """In sentences: one for the price, one for each thing left out."""
        if self.cost_seconds == float("inf"):
            price = "what it costs is not known: the tool that reads it decides the rest by itself"
        else:
            price = f"a step takes {self.cost_seconds:.4g} s as exported, {self.plan_seconds:.4g} s as planned: {self.extra_seconds:+.3g} s"
        return (price, *(f"not carried: {one.what}{f' ({one.plan})' if one.plan else ''}: {one.why}" for one in self.left))


def made(solution: Solution, value: dict, left: tuple[Left, ...], found: dict, name: str) -> Export:
    """The export with the price of the scheme `name` among those that planning has priced for an axis."""
    cost, peak = found["seconds"].get(name), found.get("peak_bytes", {}).get(name)
    limit = solution.memory_limit
    if peak is not None and limit is not None and peak > limit:
        said = f"a device needs {peak / 1e6:.4g} MB as exported, the plan was made for {limit / 1e6:.4g} MB"
        left = (*left, Left("the memory limit", said))
    return Export(value, left=left, cost_seconds=float("inf") if cost is None else cost, plan_seconds=solution.cost)

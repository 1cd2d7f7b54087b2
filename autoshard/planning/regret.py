"""How much longer a scheme's step is than any plan's, at most: its pinned cost against the proven bound of an unrestricted plan.

    regret = cost(scheme) / bound - 1            cost(plan) >= bound for every plan of the same program on the same mesh at the same prices

Both are of one pass over the inputs and one update, serial, without a memory limit: a limit can only raise the bound.
"""

from dataclasses import dataclass
from typing import Any

import torch

from autoshard.baselines import baseline
from autoshard.mesh import Mesh
from autoshard.planning.baselining import scheme_price
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Options, Progress, Stopwatch, checked_options
from autoshard.planning.question import ask
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.planning.solving import solve_instance


@dataclass(frozen=True)
class Regret:
    scheme: str
    cost: float  # seconds: those of a plan of this scheme alone (`baseline_only`, autosharding_pass(algo=scheme))
    bound: float  # seconds
    peak_bytes: float  # of the scheme
    matched: str  # in words, what the scheme recognised in the graph

    @property
    def regret(self) -> float:
        return self.cost / self.bound - 1 if self.bound > 0 else float("inf")


def regret(
    model: torch.nn.Module, example_inputs: Any, mesh: Mesh, scheme: str, *, progress: Progress | None = None, **options: Any
) -> Regret:
    """The cost of a scheme (`baselines.baseline`) and the bound of an unrestricted plan. options: as `plan`; memory limits are left out.

    ValueError where the scheme does not apply, its pins forbid each other, or nothing was proven within the time limit.
    """
    checked = checked_options(Options, {"training": True, **options, "memory_limit": None})
    clock = Stopwatch(progress)
    question = with_recomputed_blocks(ask(model, example_inputs, mesh, checked, clock))
    instance = instance_of(question)
    with clock.phase("solve", "pricing the scheme", 0.5):
        pinned = baseline(question.graph, mesh, instance.formulated.candidates, scheme)
        price = scheme_price(question, instance, pinned, seconds=checked.time_limit, gap=0.0)
    if price is None:
        raise ValueError(f"the layouts of {scheme} forbid each other on this mesh ({pinned.matched}); choose another launch")
    with clock.phase("solve", "bounding all plans", 0.6):
        answer = solve_instance(question, instance, [])
    if not 0 < answer.bound < float("inf"):
        raise ValueError(f"no bound was proven in {checked.time_limit:g} s; give the search more time")
    return Regret(scheme, price[0], answer.bound, price[1], pinned.matched)

"""Plans from a cache, which are judged before they are used, and near ones, from which the search starts."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from autoshard.explain import reopened
from autoshard.planning import Question, broken_by, fingerprint
from autoshard.simulate import timeline_of
from autoshard.solution import ROUNDING, VERSION, CacheEntry, PlanCache, Solution, from_text, json_hash, replay, to_text
from autoshard.strategies import registered_rows

log = logging.getLogger("autoshard")

FEW = 2  # near plans that a search starts from


class CachedPlans:
    """The cache as one question sees it. noted: what else the plan depends on, such as `algo`."""

    def __init__(self, location: str, question: Question, noted: Mapping[str, Any]):
        self.cache, self.question = PlanCache(location), question
        options, graph = question.options, question.graph
        hashes = fingerprint(graph, question.mesh, options)
        asked = {"solver": str(options.solver), "gap": options.gap, "time_limit": options.time_limit, **noted}
        asked |= {"rules": rules} if (rules := registered_rows(graph)) else {}
        self.facts = {"structure": hashes["structure"], "mesh": list(question.mesh.shape), "ops": len(graph.ops), "autoshard": VERSION}
        self.key = json_hash({**hashes, **asked, "version": VERSION, "torch": torch.__version__})
        self.family = json_hash([sorted({op.target for op in graph.ops}), list(question.mesh.shape), graph.trains])

    def exact(self) -> Solution | None:
        """The plan of this very question, judged; None where there is none, or it is not what it says."""
        entry = self.cache.get(self.key, self.family)
        if entry is None:
            return None
        try:
            solution = from_text(entry.text, "the cache's entry")
            why = why_wrong(solution, self.question)
        except ValueError as error:
            why = str(error)
        if why:
            log.warning("the cache's entry %.12s is not used: %s", self.key, why)
            return None
        return solution

    def near(self) -> tuple[Solution, ...]:
        """Plans of questions that are near: of the same graph but for sizes first."""
        plans: list[tuple[bool, Solution]] = []
        for entry in self.cache.near(self.family):
            if entry.key != self.key:
                try:
                    plans.append((entry.facts.get("structure") != self.facts["structure"], from_text(entry.text, "the cache's entry")))
                except ValueError as error:
                    log.warning("the cache's entry %.12s is not used: %s", entry.key, error)
        return tuple(plan for _, plan in sorted(plans, key=lambda pair: pair[0])[:FEW])

    def keep(self, solution: Solution) -> None:
        """Puts the plan into the cache; a warning where that can't be written: the plan is the caller's all the same."""
        facts = {"status": solution.status, "objective": solution.objective, "seconds": solution.objective_seconds}
        entry = CacheEntry(self.key, self.family, {**self.facts, **facts, "bound": solution.objective_bound}, to_text(solution))
        try:
            self.cache.put(entry)
        except (ValueError, OSError) as error:
            log.warning("the plan is not kept: %s", error)


def why_wrong(solution: Solution, question: Question) -> str:
    """Why a plan that somebody else wrote is none for this question, or costs something else than it says; "" where it is right.

    Its layouts, cost, memory and time line are computed again. Its bound is not: `autoshard certify` proves one.
    """
    replayed = replay(solution, question.graph, question.mesh)
    if replayed.misfits:
        return "; ".join(replayed.misfits)
    if broken := broken_by(solution, replayed.graph, question.options):
        return f"it does not obey {', '.join(map(str, broken))}"
    plan = reopened(replayed.graph, solution, question.mesh)
    cost, limit = plan.judged.cost, question.options.memory_limit
    if not math.isclose(cost, solution.cost, rel_tol=ROUNDING):
        return f"it costs {cost:.9g} s, and says {solution.cost:.9g} s"
    if limit is not None and plan.judged.peak > limit:
        return f"it takes {plan.judged.peak:.6g} bytes per device, more than memory_limit={limit:.6g}"
    if solution.overlapped:
        seconds = timeline_of(plan.formulated, plan.choice, join=True).seconds
        if not math.isclose(seconds, solution.objective_seconds, rel_tol=ROUNDING):
            return f"its time line takes {seconds:.9g} s, and it says {solution.objective_seconds:.9g} s"
    return ""

"""The plan of several programs on one set of weights: a Solution per program, and what they have in common.

    cost      sum over programs of weight * seconds  +  sum over copied parameters of switches * seconds of the copy
    loss      of a program: its seconds in this plan / its seconds in the best plan of it alone - 1                       (`rows`)
    copies    parameters that a family of programs holds in another layout than home, with what one copy costs

Programs of one family (the shapes of one program) have the same parameters in the same layouts. Home is the program whose parameters
are the originals; the others run with them, or with copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.mesh import Mesh
from autoshard.solution.plan import Plan
from autoshard.solution.record import Solution, check_bound, plain


@dataclass(frozen=True)
class ProgramsSolution(Plan):
    """A plan for several programs on one set of weights, with its certificate. Seconds per unit of the weights, bytes per device."""

    programs: dict[str, Solution]  # each on its own mesh
    weights: dict[str, float]  # how often each runs per unit
    families: dict[str, str]  # by program: programs of one family are the shapes of one program
    home: str  # the program whose parameters are the originals
    mesh: Mesh  # of all devices
    cost: float  # seconds per unit
    bound: float  # seconds; no plan of these programs costs less
    status: str  # "optimal" or "feasible"
    solver: str
    peak_bytes: float  # at the fullest moment of any program, with what the others leave in memory
    switches: dict[str, float | None] = field(default_factory=dict)  # by family: copies made anew per unit; None: it has none
    devices: dict[str, list[int]] = field(default_factory=dict)  # of programs on part of the devices, row-major over their mesh
    best: dict[str, dict] = field(default_factory=dict)  # the best plan of each program alone: cost_seconds, bound_seconds, peak_bytes
    peaks: dict[str, float] = field(default_factory=dict)  # bytes by program, with what the others leave in memory
    keeps_state: list[str] = field(default_factory=list)  # families whose own buffers stay in memory while others run
    copies: tuple[dict, ...] = ()  # parameter, family, from, to, seconds, bytes (sent by all devices together)
    seconds: dict = field(default_factory=dict)  # {"cpu": {capture, ..., total}, "wall": ...}

    def __post_init__(self) -> None:
        for name in _REST:
            object.__setattr__(self, name, plain(getattr(self, name), name))
        object.__setattr__(self, "copies", tuple(plain(list(self.copies), "copies")))

    def __getitem__(self, name: str) -> Solution:
        """The plan of one program, for `explain`, `export`, `verify` and others. ValueError where there is none of that name."""
        if name not in self.programs:
            raise ValueError(f"there is no program {name!r}; the plan has {', '.join(self.programs)}")
        return self.programs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.programs)

    @property
    def parts(self) -> Mapping[tuple[str, int], Solution]:
        return {(name, 0): solution for name, solution in self.programs.items()}

    @property
    def memory_limit(self) -> float | None:
        return self[self.home].memory_limit

    @property
    def unverified(self) -> tuple[str, ...]:
        return tuple(name for name, solution in self.programs.items() if not solution.verified)

    def marked(self, report: Mapping[str, Any]) -> ProgramsSolution:
        """The same plan, each program marked by its own report among `programs`. ValueError where one says no."""
        return replace(self, programs={name: one.marked(report["programs"][name]) for name, one in self.programs.items()})

    @property
    def family_names(self) -> tuple[str, ...]:
        """The programs as they were passed: a program of several shapes counts once."""
        return tuple(dict.fromkeys(self.families.values()))

    def shapes_of(self, family: str) -> tuple[str, ...]:
        """The programs of a family. ValueError where there is no such family."""
        members = tuple(name for name, of in self.families.items() if of == family)
        if not members:
            raise ValueError(f"there is no program {family!r}; the plan has {', '.join(self.family_names)}")
        return members

    def copied(self, family: str) -> tuple[dict, ...]:
        """The parameters that the family holds as copies."""
        return tuple(row for row in self.copies if row["family"] == family)

    def switch_seconds(self, family: str) -> float:
        """Seconds of one switch to the family."""
        return math.fsum(row["seconds"] for row in self.copied(family))

    def loss(self, name: str) -> float:
        """By how much the program is slower than in the best plan of it alone, relative."""
        best = self.best[name]["cost_seconds"]
        return self.programs[name].cost / best - 1 if best else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """What sharing costs each program: name, weight, seconds, best_seconds, loss, copied (parameters), switch_seconds, peak_bytes."""
        rows = []
        for name, solution in self.programs.items():
            family = self.families[name]
            own = {"weight": self.weights[name], "seconds": solution.cost, "best_seconds": self.best[name]["cost_seconds"]}
            switched = {"copied": len(self.copied(family)), "switch_seconds": self.switch_seconds(family)}
            rows.append({"name": name, **own, "loss": self.loss(name), **switched, "peak_bytes": self.peaks[name]})
        return rows

    def to_dict(self) -> dict:
        """Plain dicts, lists, strings and finite numbers; `from_dict` is the inverse."""
        data = {name: getattr(self, name) for name in _HEAD}
        data |= {"mesh": plain(self.mesh.to_dict(), "mesh"), "copies": list(self.copies)}
        data |= {name: getattr(self, name) for name in _REST}
        return {**data, "programs": {name: solution.to_dict() for name, solution in self.programs.items()}}

    @staticmethod
    def from_dict(data: Mapping) -> ProgramsSolution:
        """The inverse of `to_dict`; ValueError where programs, families and copies don't belong together."""
        programs = {name: Solution.from_dict(row) for name, row in data["programs"].items()}
        solution = ProgramsSolution(**{**data, "mesh": Mesh.from_dict(data["mesh"]), "programs": programs, "copies": tuple(data["copies"])})
        for key in ("weights", "families", "best", "peaks"):
            if set(getattr(solution, key)) != set(programs):
                raise ValueError(f"its {key} are of {', '.join(getattr(solution, key))}, its programs are {', '.join(programs)}")
        if solution.home not in programs:
            raise ValueError(f"its home is {solution.home!r}, which is none of its programs {', '.join(programs)}")
        if wrong := [row["family"] for row in solution.copies if row["family"] not in solution.family_names]:
            raise ValueError(f"it has a copy for {wrong[0]!r}, which is none of its programs {', '.join(solution.family_names)}")
        check_bound(solution.cost, solution.bound)
        return solution


_HEAD = ("status", "solver", "cost", "bound", "peak_bytes", "home")  # first in a file, as readers look for them

_REST = ("weights", "families", "switches", "devices", "best", "peaks", "keeps_state", "seconds")

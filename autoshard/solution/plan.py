"""What plans of one program, of several programs and of stages have in common: parts, a certificate, a file, and the mark of `verify`."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from autoshard.solution.files import VERIFIED, digest, json_hash, write
from autoshard.solution.plan_format import packed


@dataclass(frozen=True)
class Verified:
    """What `verify` found to be right: the plan on simulated ranks against the unsharded model."""

    ranks: int
    device: str  # on which all ranks ran: "cpu", "cuda"
    torch: str  # its version
    inputs: Mapping[str, Any]  # the global shapes of the example inputs, by name
    largest_error: float  # of outputs and gradients, relative
    layouts: str  # the hash of the layouts that ran


class PlanPart(Protocol):
    """What a Solution and a stage of a Pipeline have."""

    @property
    def layouts(self) -> Mapping[str, Any]: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


class Plan(ABC):
    """A Solution, of one program; a ProgramsSolution, of several on one set of weights; or a Pipeline, of stages."""

    status: str
    bound: float  # seconds; no plan costs less
    peak_bytes: float  # per device

    @property
    @abstractmethod
    def memory_limit(self) -> float | None:
        """Bytes per device that the plan had to fit in; None without a limit."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[tuple[str, int], PlanPart]:
        """By program ("" for the only one) and stage (0 where there are none): layouts and parameters of some devices."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and finite numbers."""

    @abstractmethod
    def marked(self, report: Mapping[str, Any]) -> Plan:
        """The same plan, marked as verified by a report of `verify`. ValueError where that says no."""

    @property
    @abstractmethod
    def unverified(self) -> tuple[str, ...]:
        """Which programs have no mark of `verify` for the layouts they have now."""

    @property
    def gap(self) -> float:
        """How far the cost may be above the least cost of any plan, relative; 0 where it is proven that there is none cheaper."""
        cost: float = self.cost  # type: ignore[attr-defined]  # a field, or of a Pipeline a property
        if cost <= self.bound < math.inf:
            return 0.0
        return (cost - self.bound) / abs(cost) if cost and math.isfinite(cost - self.bound) else math.inf

    @property
    def digest(self) -> str:
        """A hash of what ranks run of this plan, by which they see that they have the same one."""
        return digest(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path`, completely or not at all: `.pkl` and `.dill` as a pickle of plain containers, anything else as JSON."""
        write(packed(self.to_dict()), path)


T = TypeVar("T")


class Fact(Generic[T]):
    """A fact about a plan that files keep among its assumptions, by its own name or `key`. read: makes it of what a file has; nothing: what
    stands for None there."""

    def __init__(self, doc: str, read: Callable[[Any], T] = lambda noted: noted, *, nothing: Any = None, key: str = ""):
        self.__doc__, self.read, self.nothing, self.key = doc, read, nothing, key

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = self.key or name

    def __get__(self, plan: Any, owner: type) -> T:
        if plan is None:
            return self  # type: ignore[return-value]  # for help()
        noted = plan.assumptions.get(self.key)
        return self.read(self.nothing if noted is None else noted)


class ModelPlan(Plan):
    """A plan of one model: a Solution, or a Pipeline."""

    assumptions: dict[str, Any]
    model = Fact[Any](
        "`file.py:function` of the planned model; None where the plan was not made from a file. A file may hold anything here."
    )
    model_settings = Fact[Any]("Keyword arguments of the function `model`; None without any. A file may hold anything here.", key="set")

    @abstractmethod
    def _run_layouts(self) -> list:
        """The layouts that `verify` runs, in JSON's types."""

    def _hash_of_run(self) -> str:
        return json_hash(self._run_layouts())[:16]

    @property
    def verified(self) -> Verified | None:
        """With what and where `verify` found that the plan computes what the model does; None where it was never marked so, or has other
        layouts now."""
        held = self.assumptions.get(VERIFIED)
        if not isinstance(held, Mapping) or set(held) != set(Verified.__dataclass_fields__) or held["layouts"] != self._hash_of_run():
            return None  # a file may hold anything here
        return Verified(**held)

    @property
    def unverified(self) -> tuple[str, ...]:
        return () if self.verified else ("",)

    def noting(self, **assumptions: Any) -> Self:
        """The same plan with more assumptions, by the keys that files have. (Both classes are dataclasses.)"""
        return replace(self, assumptions={**self.assumptions, **assumptions})  # type: ignore[type-var]

    def marked(self, report: Mapping[str, Any]) -> Self:
        if not report.get("ok"):
            raise ValueError("the plan can't be marked as verified: the report says that it does not compute what the model computes")
        rows = report.get("plans", [report])
        error = max(float(row[f"max_relative_error_{of}"]) for row in rows for of in ("outputs", "gradients"))
        fact = Verified(report["ranks"], report["device"], report["torch"], report["inputs"], error, self._hash_of_run())
        return self.noting(**{VERIFIED: asdict(fact)})


# -- methods of a plan that other packages implement ---------------------------------------------------------------------------------

_PROVIDED: dict[str, Callable[..., Any]] = {}


def provide(name: str, function: Callable[..., Any]) -> None:
    """Registers the code of a method. A plan and a frontier can be drawn, but import no reports, so
    `autoshard.api` calls this when it is imported; every function that creates a plan imports it."""
    _PROVIDED[name] = function


def provided(name: str) -> Callable[..., Any]:
    """The function of that name. ValueError where none is registered."""
    if name not in _PROVIDED:
        raise ValueError(f"{name} is provided by autoshard.api; import autoshard.api first")
    return _PROVIDED[name]

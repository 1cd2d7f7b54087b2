"""What plans of one program, of several programs and of stages have in common: parts, a certificate, a file, and the mark of `verify`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

from autoshard.solution.files import digest, write
from autoshard.solution.plan_format import packed
from autoshard.solution.verified import Verified, marking, verified_of


class PlanPart(Protocol):
    """What a Solution and a stage of a Pipeline have."""

    @property
    def layouts(self) -> Mapping[str, Any]: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


class Plan(ABC):
    """A Solution, of one program; a ProgramsSolution, of several on one set of weights; or a Pipeline, of stages."""

    status: str
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
    def digest(self) -> str:
        """A hash of what ranks run of this plan, by which they see that they have the same one."""
        return digest(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path`, completely or not at all: `.pkl` and `.dill` as a pickle of plain containers, anything else as JSON."""
        write(packed(self.to_dict()), path)


class ModelPlan(Plan):
    """A plan of one model: a Solution, or a Pipeline."""

    assumptions: dict[str, Any]

    @abstractmethod
    def _run_layouts(self) -> list:
        """The layouts that `verify` runs, in JSON's types."""

    @property
    def model(self) -> Any:
        """`file.py:function` of the planned model; None where the plan was not made from a file. A file may hold anything here."""
        return self.assumptions.get("model")

    @property
    def model_settings(self) -> Any:
        """Keyword arguments of the function `model`; None without any. A file may hold anything here."""
        return self.assumptions.get("set")

    @property
    def verified(self) -> Verified | None:
        """With what and where `verify` found that the plan computes what the model does; None where it was never marked so, or has other
        layouts now."""
        return verified_of(self.assumptions, self._run_layouts())

    @property
    def unverified(self) -> tuple[str, ...]:
        return () if self.verified else ("",)

    def noting(self, **assumptions: Any) -> Self:
        """The same plan with more assumptions, by the keys that files have. (Both classes are dataclasses.)"""
        return replace(self, assumptions={**self.assumptions, **assumptions})  # type: ignore[type-var]

    def marked(self, report: Mapping[str, Any]) -> Self:
        return self.noting(**marking(report, self._run_layouts()))

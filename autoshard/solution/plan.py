"""What plans of one program, of several programs and of stages have in common: parts, a certificate, a file, and the mark of `verify`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from autoshard.solution.files import digest, write
from autoshard.solution.plan_format import packed


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

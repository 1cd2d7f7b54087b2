"""A plan from a file, of format 2 or 1."""

import json
import os
from dataclasses import replace

from autoshard.reading import checked, file_and_program, parsed, refuse_other
from autoshard.solution.files import read
from autoshard.solution.plan import Plan
from autoshard.solution.plan_format import FORMAT, is_pipeline, is_programs, packed, unpacked
from autoshard.solution.programs import ProgramsSolution
from autoshard.solution.record import Solution
from autoshard.solution.stage_records import Pipeline

AnyPlan = Solution | ProgramsSolution | Pipeline


def load(path: str | os.PathLike[str]) -> AnyPlan:
    """Read a plan: of one program, of several, or of stages; `FILE#NAME` is one program of a plan of several. ValueError in one sentence on
    anything that isn't one."""
    file, program = file_and_program(path)
    plan = _plan_of(read(file), file)
    if not program:
        return plan
    if not isinstance(plan, ProgramsSolution):
        raise ValueError(f"{file} is no plan of several programs, so there is no {program!r} in it; leave out #{program}")
    return plan[program]


def to_text(plan: AnyPlan) -> str:
    """The content of a plan's file."""
    return json.dumps(packed(plan.to_dict()), ensure_ascii=False, allow_nan=False)


def from_text(text: str, name: str) -> Solution:
    """The plan of one program in such a content; ValueError, which calls it `name`, where it isn't sound."""
    plan = _plan_of(parsed(text, name, "plan"), name)
    if not isinstance(plan, Solution):
        raise ValueError(f"{name} is no plan of one program")
    return plan


def load_one(path: str | os.PathLike[str]) -> Solution:
    """As `load`; ValueError where the plan is not of one program."""
    plan = load(path)
    if isinstance(plan, ProgramsSolution):
        raise ValueError(f"{path} is a plan of several programs; name one of them, as {path}#{plan.home}")
    if isinstance(plan, Pipeline):
        raise ValueError(f"{path} is a pipeline; expected a plan without stages, as `autoshard plan --out` writes it")
    return plan


def save_over(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan to where `load` read it: with `FILE#NAME` as that program of the plan in FILE."""
    file, program = file_and_program(path)
    if not program:
        plan.save(path)
        return
    several = load(file)
    assert isinstance(several, ProgramsSolution) and isinstance(plan, Solution)
    replace(several, programs={**several.programs, program: plan}).save(file)


def _plan_of(data: dict, path: str | os.PathLike[str]) -> AnyPlan:
    """The plan in a file's data, of format 2 or 1. ValueError, with the file's name, where it isn't sound."""
    if not (is_programs(data) or is_pipeline(data)):
        refuse_other(data, path, "plan")
        if "format" not in data:
            keys = ", ".join(repr(str(key)[:30]) for key in list(data)[:3]) or "nothing"
            raise ValueError(f"{path} is not a plan: it holds {keys} and no 'format'; expected a file that `autoshard plan --out` wrote")
    _check_format(data.get("format", 1), path)
    file = checked(data if data.get("format") == FORMAT else packed(data), path, "plan")
    kind = ProgramsSolution if "programs" in file else Pipeline if "pipeline" in file else Solution
    try:
        return kind.from_dict(unpacked(file))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a sound plan: {error}; expected what `autoshard plan --out` wrote, so plan again") from None


def _check_format(number: object, path: str | os.PathLike[str]) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{path} has format {_word(number)}; expected a whole number from 1 to {FORMAT}, so plan again")
    if number > FORMAT:
        raise ValueError(f"{path} has format {str(number)[:40]}, this autoshard reads up to {FORMAT}; update autoshard or plan again")


def _word(value: object) -> str:
    """A value as part of a sentence; a list or an object, which may hold anything, as its type."""
    return repr(value)[:40] if isinstance(value, (str, int, float)) or value is None else f"of type {type(value).__name__}"

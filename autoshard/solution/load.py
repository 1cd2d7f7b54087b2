"""A plan from a file: our own formats, or an old plan of `{node: {"args": {...}, "results": {...}}}` with torch placements."""

import json
import math
import os
from dataclasses import replace

from autoshard.mesh import Mesh, shape_text
from autoshard.reading import checked, parsed, refuse_other
from autoshard.solution.files import read
from autoshard.solution.pickles import Inert
from autoshard.solution.plan import Plan
from autoshard.solution.plan_format import FORMAT, is_pipeline, is_programs, packed, unpacked
from autoshard.solution.programs import ProgramsSolution
from autoshard.solution.record import Placed, Solution
from autoshard.solution.stage_records import Pipeline

AnyPlan = Solution | ProgramsSolution | Pipeline


def load(path: str | os.PathLike[str], mesh: Mesh | None = None) -> AnyPlan:
    """Read a plan: of one program, of several, or of stages. ValueError in one sentence on anything that isn't one.

    `FILE#NAME` is one program of a plan of several. mesh: for old plans, whose files don't name their mesh. Their layouts are returned with
    status "unjudged", cost inf and bound 0, under the node names in the file. A plan of our own formats has its mesh; it is an error if
    the argument has another shape.
    """
    file, program = _file_and_program(path)
    data = read(file)
    if program is None and _is_old(data):
        return _from_old(data, path, mesh)
    plan = _plan_of(data, file)
    if mesh is not None and not isinstance(plan, Solution):
        raise ValueError(f"{path} says itself for which devices it was planned; leave out the mesh")
    if mesh is not None and mesh.shape != plan.mesh.shape:
        planned, given = shape_text(plan.mesh.shape), shape_text(mesh.shape)
        raise ValueError(f"{path} was planned for mesh {planned}, not for {given}; leave out the mesh or plan again")
    if program is None:
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


def load_one(path: str | os.PathLike[str], mesh: Mesh | None = None) -> Solution:
    """As `load`; ValueError where the plan is not of one program."""
    plan = load(path, mesh)
    if isinstance(plan, ProgramsSolution):
        raise ValueError(f"{path} is a plan of several programs; name one of them, as {path}#{plan.home}")
    if isinstance(plan, Pipeline):
        raise ValueError(f"{path} is a pipeline; expected a plan without stages, as `autoshard plan --out` writes it")
    return plan


def save_over(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan to where `load` read it: with `FILE#NAME` as that program of the plan in FILE."""
    file, program = _file_and_program(path)
    if program is None:
        plan.save(path)
        return
    several = load(file)
    assert isinstance(several, ProgramsSolution) and isinstance(plan, Solution)
    replace(several, programs={**several.programs, program: plan}).save(file)


def _file_and_program(path: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """FILE and NAME of FILE#NAME; a file whose own name has a # is itself."""
    file, _, program = str(path).rpartition("#")
    return (file, program) if file and not os.path.exists(path) and os.path.exists(file) else (path, None)


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


def _is_old(data: dict) -> bool:
    return any(data.values()) and all(isinstance(entry, dict) and {"args", "results"} >= set(entry) for entry in data.values())


def _from_old(data: dict, path: str | os.PathLike[str], mesh: Mesh | None) -> Solution:
    if mesh is None:
        raise ValueError(
            f"{path} is an old plan ({len(data)} nodes), which does not say for which mesh; give it too, for example --mesh 2x4"
        )
    layouts = {}
    for node, entry in data.items():
        where = f"{path}: node {str(node)[:40]!r}"
        layouts[str(node)] = Placed(*(_old_layouts(where, entry.get(part, {}), mesh) for part in ("args", "results")))
    return Solution(
        layouts=layouts, results={}, mesh=mesh, cost=math.inf, bound=0.0, status="unjudged", solver="", peak_bytes=math.inf, training=False
    )


def _old_layouts(where: str, named: object, mesh: Mesh) -> tuple[str, ...]:
    if not isinstance(named, dict):
        raise ValueError(f"{where} holds a {type(named).__name__}; expected placements by name, so plan again")
    return tuple(_old_layout(where, value, mesh) for value in named.values())


def _old_layout(where: str, value: object, mesh: Mesh) -> str:
    placements = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(placements) != len(mesh.axes):
        axes = f"the mesh {shape_text(mesh.shape)} {len(mesh.axes)} axes"
        raise ValueError(f"{where} has {len(placements)} placements and {axes}; give the mesh it was made for")
    return ",".join(_old_placement(where, placement) for placement in placements)


def _old_placement(where: str, placement: object) -> str:
    dim, kind = getattr(placement, "dim", None), getattr(placement, "reduce_op", "sum")
    name = type(placement).__name__.lstrip("_") if isinstance(placement, Inert) else _word(placement)
    if name == "Replicate":
        return "R"
    if name == "Shard" and type(dim) is int and 0 <= dim < 16:
        return f"S({dim})"
    if name == "Partial" and kind in ("sum", "avg", "max", "min"):
        return "P" if kind == "sum" else f"P({kind})"
    raise ValueError(f"{where} has a placement {name} that can't be read; expected Replicate, Shard(dim) or Partial, so plan again")


def _word(value: object) -> str:
    """A value as part of a sentence; a list or an object, which may hold anything, as its type."""
    return repr(value)[:40] if isinstance(value, (str, int, float)) or value is None else f"of type {type(value).__name__}"

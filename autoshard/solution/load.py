"""A Solution from a file: our own format, or an old plan of `{node: {"args": {...}, "results": {...}}}` with torch placements."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from autoshard.mesh import Mesh
from autoshard.reading import checked, refuse_other
from autoshard.solution.files import read
from autoshard.solution.pickles import Inert
from autoshard.solution.programs import ProgramsSolution, load_programs, programs_of
from autoshard.solution.record import FORMAT, Placed, Solution


def load(path: str | os.PathLike[str], mesh: Mesh | None = None) -> Solution:
    """Read a plan; ValueError in one sentence on anything that isn't one. `FILE#NAME` is one program of a plan of several.

    mesh: for old plans, whose files don't name their mesh. Their layouts are returned with status "unjudged", cost inf and bound 0,
    under the node names in the file. A plan of our own format has its mesh; it is an error if the argument has another shape.
    """
    solution = load_any(path, mesh)
    if isinstance(solution, ProgramsSolution):
        first = next(iter(solution), "NAME")
        raise ValueError(f"{path} is a plan of several programs; load it with autoshard.load_programs, or one of them as {path}#{first}")
    return solution


def save_over(solution: Solution, path: str | os.PathLike[str]) -> None:
    """Writes a plan to where `load` read it: with `FILE#NAME` as that program of the plan in FILE."""
    file, _, program = str(path).rpartition("#")
    if not file or os.path.exists(path) or not os.path.exists(file):
        solution.save(path)
        return
    several = load_programs(file)
    replace(several, programs={**several.programs, program: solution}).save(file)


def load_any(path: str | os.PathLike[str], mesh: Mesh | None = None) -> Solution | ProgramsSolution:
    """As `load`; a plan of several programs as it is."""
    file, _, program = str(path).rpartition("#")
    one_of_several = file and not os.path.exists(path) and os.path.exists(file)
    data = {} if one_of_several else read(path)
    if mesh is not None and (one_of_several or ("programs" in data and "weights" in data)):
        raise ValueError(f"{path} says itself for which mesh it was planned; leave out the mesh")
    if one_of_several:
        return load_programs(file)[program]
    if "programs" in data and "weights" in data:
        return programs_of(data, path)
    if _is_old(data):
        return _from_old(data, path, mesh)
    refuse_other(data, path, "plan")
    if "format" not in data:
        keys = ", ".join(repr(str(key)[:30]) for key in list(data)[:3]) or "nothing"
        raise ValueError(f"{path} is not a plan: it holds {keys} and no 'format'; expected a file that `autoshard plan --out` wrote")
    _check_format(data["format"], path)
    data = checked(data, path, "plan")
    try:
        solution = Solution.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path} is not a sound plan: {error}; expected what `autoshard plan --out` wrote, so plan again") from None
    if mesh is not None and mesh.shape != solution.mesh.shape:
        raise ValueError(f"{path} was planned for mesh {_shape(solution.mesh)}, not for {_shape(mesh)}; leave out the mesh or plan again")
    return solution


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
        raise ValueError(
            f"{where} has {len(placements)} placements and the mesh {_shape(mesh)} {len(mesh.axes)} axes; give the mesh it was made for"
        )
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


def _shape(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))

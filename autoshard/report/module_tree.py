"""The model as a tree: modules by the dots in the names of parameters (and of ops, where the model is known).

A module shows the elements and bytes per device of all parameters below it (a tied parameter counts under its first name), and the seconds
of the blocks below it as the plan prices them. A module that holds a single module and nothing else is joined with it: `model.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autoshard.graph import grouped
from autoshard.mesh import shape_text
from autoshard.report.blocks import family_of, sections, split
from autoshard.solution import Solution

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

MANY_OPS = 6000  # more would make the file too large


@dataclass
class Module:
    """One node of the tree."""

    name: str  # as shown, below its parent
    path: str
    modules: dict[str, Module] = field(default_factory=dict)
    parameters: list[dict] = field(default_factory=list)
    ops: list[dict] = field(default_factory=list)
    seconds: float | None = None
    same_as: str = ""  # the first block with the same layouts
    same_ops_as: str = ""  # the first block whose ops are the same
    elements: int = 0
    local_bytes: float = 0.0
    num_parameters: int = 0
    num_ops: int = 0


def tree(solution: Solution, picture_of: Mapping[str, int], ops: Sequence[Mapping] = ()) -> Module:
    """The root. ops: rows with name, module, target, layout, seconds, backward; of equal blocks those of the first."""
    root = Module("", "")
    for name, row in solution.parameters.items():
        path, _, leaf = name.rpartition(".")
        shown = {"name": leaf, "full": name, "picture": picture_of.get(name), **_said(row)}
        _at(root, path).parameters.append(shown)
    kept, same = ops_once(ops)
    for op in kept if len(kept) <= MANY_OPS else ():
        _at(root, op["module"]).ops.append(dict(op))
    for block, first in same.items():
        _at(root, block).same_ops_as = first
    for path, parts in solution.breakdown.get("blocks", {}).items():
        known = _find(root, path)
        if known is not None:
            known.seconds = math.fsum(x for x in parts.values() if x) if isinstance(parts, Mapping) else parts
    for section in sections(solution.parameters, {}):
        for path in section.blocks[1:]:
            if (module := _find(root, path)) is not None:
                module.same_as = section.blocks[0]
    return _summed(_joined(root))


def op_rows(solution: Solution, timeline: Timeline) -> list[dict]:
    """Every op of the program that is no parameter, buffer or input: module, target, output layouts, its kernel's seconds."""
    kernel: dict[int, float] = {}
    for task in timeline.tasks:
        if task.kind == "compute":
            kernel[task.op] = kernel.get(task.op, 0.0) + task.seconds
    rows = []
    for i, op in enumerate(timeline.program.graph.ops):
        if not op.is_placeholder and op.name in solution.layouts:
            outputs = [layout for layout in solution.layouts[op.name].outputs if layout is not None]
            row = {"name": op.name, "module": op.module, "target": op.target.removeprefix("aten.").removesuffix(".default")}
            layout = " and ".join(dict.fromkeys(outputs)) or "no tensor"
            rows.append({**row, "layout": layout, "seconds": kernel.get(i), "backward": op.backward})
    return rows


def ops_once(ops: Sequence[Mapping]) -> tuple[list[Mapping], dict[str, str]]:
    """The ops without those of blocks whose ops equal those of an earlier block of the family; and for each such block the earlier one."""
    blocks = grouped((split(f"{op['module']}.")[0], op) for op in ops)
    first: dict[tuple, str] = {}
    same: dict[str, str] = {}
    for block, rows in blocks.items():
        does = tuple((op["module"].removeprefix(block), op["target"], op["layout"], op["backward"], op["seconds"]) for op in rows)
        leader = first.setdefault((family_of(block), does), block)
        if leader != block:
            same[block] = leader
    return [op for block, rows in blocks.items() if block not in same for op in rows], same


def _said(row: Mapping) -> dict:
    shape = row.get("shape") or ()
    return {
        "layout": row["layout"],
        "shape": shape_text(shape) or "scalar",
        "dtype": row.get("dtype", ""),
        "elements": 0 if "tied_to" in row else math.prod(shape),
        "local_bytes": row.get("local_bytes"),
        "tied_to": row.get("tied_to", ""),
    }


def _at(root: Module, path: str) -> Module:
    """The module of this path, made where it is missing."""
    node = root
    for part in path.split(".") if path else ():
        node = node.modules.setdefault(part, Module(part, f"{node.path}.{part}" if node.path else part))
    return node


def _find(root: Module, path: str) -> Module | None:
    node: Module | None = root
    for part in path.split("."):
        node = node.modules.get(part) if node else None
    return node


def _joined(node: Module) -> Module:
    modules = {key: _joined(child) for key, child in node.modules.items()}
    if node.path and len(modules) == 1 and not node.parameters and not node.ops and node.seconds is None:
        (child,) = modules.values()
        same_as, same_ops_as = child.same_as or node.same_as, child.same_ops_as or node.same_ops_as
        return replace(child, name=f"{node.name}.{child.name}", same_as=same_as, same_ops_as=same_ops_as)
    return replace(node, modules=modules)


def _summed(node: Module) -> Module:
    children = {key: _summed(child) for key, child in node.modules.items()}
    below = list(children.values())
    known = [child.seconds for child in below if child.seconds is not None]
    return replace(
        node,
        modules=children,
        elements=sum(row["elements"] for row in node.parameters) + sum(child.elements for child in below),
        local_bytes=sum(row["local_bytes"] or 0 for row in node.parameters if not row["tied_to"]) + sum(c.local_bytes for c in below),
        num_parameters=len(node.parameters) + sum(child.num_parameters for child in below),
        num_ops=len(node.ops) + sum(child.num_ops for child in below),
        seconds=node.seconds if node.seconds is not None else math.fsum(known) if known else None,
    )

"""The parts of a plan's file that `--keep` holds fixed: the layouts of its parameters, and whatever else was edited by hand.

    packed    all layouts as they were planned, in the order of the file: 500 characters for GPT-2, in the plan's fingerprint   (`packed`)
    edited    an op whose row in `layouts` differs from that: its output layout is kept. Where its input layouts were edited, too, or
              it has several outputs, all of its layouts are kept, as `inputs -> outputs`                             (`kept_layouts`)

Parameters are edited in the table `parameters`, which lists all of them, or in `layouts` like any op. A plan from before its layouts were
packed can be edited in `parameters` only.
"""

import base64
import bz2
import hashlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from autoshard.planning.demands import ROW, near_names
from autoshard.reading import checked, parsed
from autoshard.solution import Placed, Solution

MOST_BYTES = 10**8  # that a file's packed layouts may become; those of Llama 405B are 2 MB


def packed(layouts: Mapping[str, Placed], results: Mapping[str, str]) -> str:
    """A hash of the layouts, a colon, and the layouts themselves without names, compressed: layers repeat."""
    written = json.dumps([[[row.inputs, row.outputs, row.hubs] for row in layouts.values()], list(results.values())]).encode()
    return f"{hashlib.sha256(written).hexdigest()[:16]}:{base64.b64encode(bz2.compress(written)).decode()}"


def _unpacked(solution: Solution) -> tuple[dict[str, Placed], dict[str, str]]:
    """The layouts as they were planned; those that the file has now where it does not hold the planned ones."""
    written = solution.fingerprint.get("layouts")
    if written is None:
        return solution.layouts, solution.results
    try:
        letters = bz2.BZ2Decompressor().decompress(base64.b64decode(written.partition(":")[2]), MOST_BYTES)
        rows, results = checked(parsed(letters, "it", "layouts"), "it", "layouts")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"the plan's packed layouts can't be read ({error}); write it again with `autoshard plan --out`") from None
    planned = [Placed(*row) for row in rows]
    if (len(planned), len(results)) != (len(solution.layouts), len(solution.results)):
        now, then = f"{len(solution.layouts)} layouts and {len(solution.results)} results", f"{len(planned)} and {len(results)}"
        raise ValueError(f"the plan has {now}, it was planned with {then}; edit layouts, but leave their rows in place")
    return dict(zip(solution.layouts, planned)), dict(zip(solution.results, results))


def kept_layouts(solution: Solution, free: Sequence[str] = ()) -> dict[str, str]:
    """The layouts to keep of a plan, for `plan(..., keep=)`: of all parameters, and of inputs, buffers and ops that were edited.

    Those whose names match one of the globs in `free` are left out. ValueError where `parameters` is empty, where a glob matches nothing
    that would be kept, where a tensor has two layouts, and on edits that can't be kept: of hubs and results.
    """
    rows, planned = solution.parameters, _unpacked(solution)
    if not rows:
        raise ValueError("the plan to keep has no parameters; expected one that `autoshard plan --out` wrote")
    written = {**_parameters(solution, planned[0]), **_other_edits(solution, *planned)}
    for glob in free:
        if not any(fnmatchcase(name, glob) for name in written):
            raise ValueError(f"free {glob!r}: no parameter of the plan matches" + near_names(glob, written))
    for name, row in rows.items():
        owner = row.get("tied_to")
        if owner in rows and written[owner] != written[name]:
            other = f"but {owner}, the same tensor, has {written[owner]}"
            raise ValueError(f"{name} has layout {written[name]}, {other}; give both the same")
    held = {name: layout for name, layout in written.items() if not any(fnmatchcase(name, glob) for glob in free)}
    return {name: layout for name, layout in held.items() if rows.get(name, {}).get("tied_to") not in held}


def edited_layouts(solution: Solution) -> dict[str, list[str | None]]:
    """The edited layouts by name: [the planned layout, the one in the file]; of some ops all layouts, `inputs -> outputs`."""
    planned = _unpacked(solution)
    before = {name: row.outputs[0] for name, row in planned[0].items() if row.outputs}
    edits = {name: now for name, now in _parameters(solution, planned[0]).items() if name in before and now != before[name]}
    return {name: [_as_written(now, planned[0][name]), now] for name, now in {**edits, **_other_edits(solution, *planned)}.items()}


def _parameters(solution: Solution, planned: Mapping[str, Placed]) -> dict[str, str]:
    """The parameters' layouts, from whichever of the two tables was edited."""
    layouts = {}
    for name, row in solution.parameters.items():
        layouts[name] = row["layout"]
        in_layouts = solution.layouts[name].outputs[0] if name in solution.layouts else None
        if in_layouts is not None and planned[name].outputs[0] not in (in_layouts, layouts[name]) and in_layouts != layouts[name]:
            raise ValueError(f"{name} has layout {layouts[name]} in parameters, but {in_layouts} in layouts; give both the same")
        if in_layouts is not None and planned[name].outputs[0] != in_layouts:
            layouts[name] = in_layouts
    return layouts


def _other_edits(solution: Solution, planned: Mapping[str, Placed], results: Mapping[str, str]) -> dict[str, str]:
    """Inputs, buffers and ops whose rows aren't the planned ones: their output layout now, or all of their layouts."""
    changed = {name: row for name, row in solution.layouts.items() if row != planned[name]}
    refused = [f"the hubs of {name}" for name, row in changed.items() if row.hubs != planned[name].hubs]
    refused += [f"result {name}" for name, written in solution.results.items() if written != results[name]]
    if refused:
        raise ValueError(f"the edit of {refused[0]} can't be kept; take it back, and edit input or output layouts of ops")
    edits = {}
    for name, row in changed.items():
        if name not in solution.parameters:
            inputs = "" if row.inputs == planned[name].inputs else ";".join(row.inputs)
            several = inputs or len(row.outputs) > 1
            edits[name] = f"{inputs} {ROW} {';'.join(map(str, row.outputs))}".strip() if several else str(row.outputs[0])
    return edits


def _as_written(now: str, planned: Placed) -> str | None:
    """The planned layouts, in the form of those in the file."""
    if ROW not in now:
        return planned.outputs[0]
    inputs = ";".join(planned.inputs) if now.partition(ROW)[0].strip() else ""
    return f"{inputs} {ROW} {';'.join(map(str, planned.outputs))}".strip()

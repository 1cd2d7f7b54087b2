"""What of a plan's file is kept: its parameters' layouts, and whatever else was edited by hand.

    packed    all layouts as they were planned, in the order of the file: 500 letters for GPT-2, in the plan's fingerprint    (`packed`)
    edited    an op whose row in `layouts` is another now: what it gives is kept; where what it takes was edited, too, or it gives
              several tensors, all of that is, as `inputs -> outputs`                                                 (`kept_layouts`)

Parameters are edited in `parameters`, where all of them stand; or in `layouts`, as any op. A plan from before its layouts were packed can
be edited in `parameters` only.
"""

from __future__ import annotations

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
    """A hash of the layouts, and after a colon they themselves, names left out; layers repeat, so that most of it is said once."""
    written = json.dumps([[[row.inputs, row.outputs, row.hubs] for row in layouts.values()], list(results.values())]).encode()
    return f"{hashlib.sha256(written).hexdigest()[:16]}:{base64.b64encode(bz2.compress(written)).decode()}"


def _unpacked(solution: Solution) -> tuple[dict[str, Placed], dict[str, str]]:
    """The layouts of a plan as it was made; those that the file has now where nothing else is known."""
    written = solution.fingerprint.get("layouts")
    if written is None:
        return solution.layouts, solution.results
    try:
        letters = bz2.BZ2Decompressor().decompress(base64.b64decode(written.partition(":")[2]), MOST_BYTES)
        rows, results = checked(parsed(letters, "it", "layouts"), "it", "layouts")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"the plan's packed layouts can't be read ({error}); write it again with `autoshard plan --out`") from None
    made = [Placed(*row) for row in rows]
    if (len(made), len(results)) != (len(solution.layouts), len(solution.results)):
        now, then = f"{len(solution.layouts)} layouts and {len(solution.results)} results", f"{len(made)} and {len(results)}"
        raise ValueError(f"the plan has {now}, it was made with {then}; edit layouts, but leave their rows in place")
    return dict(zip(solution.layouts, made)), dict(zip(solution.results, results))


def kept_layouts(solution: Solution, free: Sequence[str] = ()) -> dict[str, str]:
    """The layouts to keep of a plan, for `plan(..., keep=)`: of all parameters, and of inputs, buffers and ops that were edited.

    Those whose names match one of the globs in `free` are left out. ValueError where `parameters` is empty, where a glob matches nothing
    that would be kept, where a tensor was given two layouts, and on edits that can't be kept: of hubs and results.
    """
    rows, made = solution.parameters, _unpacked(solution)
    if not rows:
        raise ValueError("the plan to keep has no parameters; expected one that `autoshard plan --out` wrote")
    written = {**_parameters(solution, made[0]), **_other_edits(solution, *made)}
    for glob in free:
        if not any(fnmatchcase(name, glob) for name in written):
            raise ValueError(f"free {glob!r}: no parameter of the plan matches" + near_names(glob, written))
    for name, row in rows.items():
        owner = row.get("tied_to")
        if owner in rows and written[owner] != written[name]:
            other = f"but {owner}, the same tensor, as {written[owner]}"
            raise ValueError(f"{name} is laid out as {written[name]}, {other}; give both the same")
    held = {name: layout for name, layout in written.items() if not any(fnmatchcase(name, glob) for glob in free)}
    return {name: layout for name, layout in held.items() if rows.get(name, {}).get("tied_to") not in held}


def edited_layouts(solution: Solution) -> dict[str, list[str | None]]:
    """What was edited in the file: by name [what the plan had, what the file says now]; of an op perhaps its row, `inputs -> outputs`."""
    made = _unpacked(solution)
    had = {name: row.outputs[0] for name, row in made[0].items() if row.outputs}
    edits = {name: now for name, now in _parameters(solution, made[0]).items() if name in had and now != had[name]}
    return {name: [_as_written(now, made[0][name]), now] for name, now in {**edits, **_other_edits(solution, *made)}.items()}


def _parameters(solution: Solution, made: Mapping[str, Placed]) -> dict[str, str]:
    """The parameters' layouts, from whichever of the two tables was edited."""
    found = {}
    for name, row in solution.parameters.items():
        found[name] = row["layout"]
        in_layouts = solution.layouts[name].outputs[0] if name in solution.layouts else None
        if in_layouts is not None and made[name].outputs[0] not in (in_layouts, found[name]) and in_layouts != found[name]:
            raise ValueError(f"{name} is laid out as {found[name]} in parameters, but as {in_layouts} in layouts; give both the same")
        if in_layouts is not None and made[name].outputs[0] != in_layouts:
            found[name] = in_layouts
    return found


def _other_edits(solution: Solution, made: Mapping[str, Placed], results: Mapping[str, str]) -> dict[str, str]:
    """Inputs, buffers and ops whose rows aren't those that were planned: what they give now, or the whole row."""
    changed = {name: row for name, row in solution.layouts.items() if row != made[name]}
    refused = [f"the hubs of {name}" for name, row in changed.items() if row.hubs != made[name].hubs]
    refused += [f"result {name}" for name, written in solution.results.items() if written != results[name]]
    if refused:
        raise ValueError(f"the edit of {refused[0]} can't be kept; take it back, and edit what ops give or take")
    found = {}
    for name, row in changed.items():
        if name not in solution.parameters:
            takes = "" if row.inputs == made[name].inputs else ";".join(row.inputs)
            several = takes or len(row.outputs) > 1
            found[name] = f"{takes} {ROW} {';'.join(map(str, row.outputs))}".strip() if several else str(row.outputs[0])
    return found


def _as_written(now: str, had: Placed) -> str | None:
    """What was planned, in the form in which it is said what is now."""
    if ROW not in now:
        return had.outputs[0]
    takes = ";".join(had.inputs) if now.partition(ROW)[0].strip() else ""
    return f"{takes} {ROW} {';'.join(map(str, had.outputs))}".strip()

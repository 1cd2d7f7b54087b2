"""Pictures of layouts: the tensor divided into its shards, and the mesh with the shard that each device holds.

    part of a device on dim d   = [lo_d, hi_d) / shape_d                    layout.rank_bounds, as fractions
    rectangle                   = part on the vertical dim  x  part on the horizontal dims, one inside the other

Two parameters share a picture when the texts of their layouts and their fractions are equal, whatever their sizes. The first sharded dim is
vertical, the others are horizontal; the dim of a vector is horizontal. Parts are numbered by the first device that holds them; the number
selects the hue.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from autoshard.layout import Layout, Partial, Shard, rank_bounds
from autoshard.mesh import Mesh
from autoshard.report.blocks import sections
from autoshard.solution import Solution, parsed

Rect = tuple[float, float, float, float]  # left, top, width, height; fractions of the tensor
SHOWN_PER_AXIS, SHOWN = 8, 64  # devices drawn
FINE = 0.05  # of the tensor
KINDS = ("scalars", "vectors", "matrices", "tensors")  # by the number of dims
MANY_PARTS = 256  # more are drawn in one colour
BOX, LOW, LINE_HEIGHT = (40, 30), 18, 10  # the tensor within a device's cell; its height where rows are many; of a tensor of one dim
FEW_ROWS, LEAST = 4, 1.5  # a part is drawn at least so wide and high
GAP, LABEL = 8, 11  # between cells; above each of them, for its number


@dataclass(frozen=True)
class Picture:
    """One layout on the mesh, with all that a template needs to draw it. Lengths of `devices` are SVG units."""

    number: int
    layout: str
    kind: str  # scalars, vectors, matrices, tensors
    words: str  # what each axis does, and what that comes to
    down: str  # the dim drawn downwards; empty for one dim
    across: str
    parts: tuple[dict, ...]  # of the tensor: x, y, width, height in percent, hue
    devices: tuple[dict, ...]  # rank, x, y of the cell; left, top, width, height of the part in it; hue; what it holds
    size: tuple[int, int]  # of the drawing of the mesh
    box: tuple[int, int]  # of the tensor in a cell
    shown: str  # empty, or which devices are drawn
    fine: bool  # some part is too thin for a line around it


def pictures(solution: Solution) -> tuple[list[Picture], dict[str, int]]:
    """The distinct pictures, in the order of the parameters, and per parameter the number of its own."""
    known: dict[tuple, Picture] = {}
    of: dict[str, int] = {}
    for name, row in solution.parameters.items():
        shape, layout = _shape(row), parsed(row["layout"])
        if shape is None or any(isinstance(p, Shard) and p.dim >= len(shape) for p in layout):
            continue  # a file made by hand; the tree shows its layout in words
        down, across = _dims(shape, layout, solution.mesh)
        rects = _rects(shape, layout, solution.mesh, down, across)
        key = (row["layout"], KINDS[min(len(shape), 3)], down, across, tuple(rects.values()))
        if key not in known:
            known[key] = _picture(len(known), row["layout"], layout, solution.mesh, len(shape), (down, across), rects)
        of[name] = known[key].number
    return list(known.values()), of


def _shape(row: Mapping) -> tuple[int, ...] | None:
    shape = row.get("shape")
    known = isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)
    return tuple(shape) if known else None  # type: ignore[arg-type]


def _dims(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims drawn downwards and across."""
    sharded = sorted({p.dim for p, axis in zip(layout, mesh.axes, strict=True) if isinstance(p, Shard) and axis.size > 1})
    if len(shape) < 2:
        return (), tuple(range(len(shape)))
    if len(sharded) < 2:
        sharded = sorted({*sharded, 0, 1}) if not sharded or sharded[0] < 2 else [0, *sharded]
    return (sharded[0],), tuple(sharded[1:])


def _rects(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, down: tuple[int, ...], across: tuple[int, ...]
) -> dict[tuple[int, ...], Rect]:
    """By coordinate the part that the device holds."""
    rects = {}
    for coordinate in mesh.coordinates():
        bounds = rank_bounds(shape, layout, mesh, coordinate)
        (top, bottom), (left, right) = (_nested([(*bounds[d], shape[d]) for d in dims]) for dims in (down, across))
        rects[coordinate] = tuple(round(x, 6) for x in (left, top, right - left, bottom - top))
    return rects  # type: ignore[return-value]


def _nested(bounds: list[tuple[int, int, int]]) -> tuple[float, float]:
    """[lo, hi) of sizes, each inside the one before, as fractions of the first."""
    low, high = 0.0, 1.0
    for lo, hi, size in bounds:
        span = high - low
        low, high = low + span * lo / max(size, 1), low + span * (hi / size if size else 1.0)
    return low, high


def _picture(
    number: int, written: str, layout: Layout, mesh: Mesh, ndim: int, dims: tuple[tuple[int, ...], tuple[int, ...]], rects: dict
) -> Picture:
    part_of = {rect: k for k, rect in enumerate(dict.fromkeys(rects.values()))}
    drawn = _shown(mesh.shape)
    heads = list(product(*(range(n) for n in drawn[:-1])))
    box = (BOX[0], LINE_HEIGHT if ndim < 2 else BOX[1] if len(heads) <= FEW_ROWS else LOW)
    across, height = box[0] + GAP, box[1] + LABEL + GAP
    devices = (
        _device(mesh, (*head, c), rects[*head, c], (c * across, r * height + LABEL), box, part_of)
        for r, head in enumerate(heads)
        for c in range(drawn[-1])
    )
    down, beside = (" inside ".join(f"dim {d}" for d in reversed(some)) for some in dims)
    return Picture(
        number=number,
        layout=written,
        kind=KINDS[min(ndim, 3)],
        words=_words(layout, mesh, rects),
        down=down,
        across=beside,
        parts=tuple(_part(rect, k, len(part_of)) for rect, k in part_of.items()) if len(part_of) <= MANY_PARTS else (),
        devices=tuple(devices),
        size=(drawn[-1] * across - GAP, len(heads) * height - GAP + 1),
        box=box,
        shown=", ".join(f"{n} of {axis.size} along {axis.name}" for n, axis in zip(drawn, mesh.axes) if n < axis.size),
        fine=min(min(rect[2:]) for rect in part_of) < FINE,
    )


def _shown(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many coordinates per axis are drawn."""
    shown = [min(n, SHOWN_PER_AXIS) for n in shape]
    while math.prod(shown) > SHOWN:
        widest = shown.index(max(shown))
        shown[widest] //= 2
    return tuple(shown)


def _part(rect: Rect, k: int, of: int) -> dict:
    return dict(zip(("x", "y", "width", "height"), (round(100 * part, 3) for part in rect)), hue=_hue(k, of))


def _hue(k: int, of: int) -> int:
    return round(250 + 360 * k / of) % 360


def _device(mesh: Mesh, coordinate: tuple[int, ...], rect: Rect, corner: tuple[int, int], box: tuple[int, int], part_of: dict) -> dict:
    rank, (x, y) = 0, corner
    for c, n in zip(coordinate, mesh.shape):
        rank = rank * n + c
    (left, width), (top, height) = (_visible(rect[k], rect[k + 2], box[k]) for k in (0, 1))
    part = {"part": part_of[rect], "hue": _hue(part_of[rect], len(part_of)), "width": width, "height": height}
    at = ", ".join(f"{name} {c}" for name, c in zip(mesh.axis_names, coordinate))
    return {"rank": rank, "at": at, "x": x, "y": y, "left": round(x + left, 2), "top": round(y + top, 2), **part}


def _visible(start: float, length: float, side: int) -> tuple[float, float]:
    """Fractions to lengths of a box, widened where they would be too thin to see."""
    drawn = round(max(length * side, LEAST), 2) if length else 0.0
    return min(start * side, side - drawn), drawn


def _words(layout: Layout, mesh: Mesh, rects: Mapping[tuple[int, ...], Rect]) -> str:
    """`axis0 shards dim 0 into 2; axis1 keeps 4 copies; each device holds 1/2 of it, 4 devices hold the same`."""
    parts, devices = len(set(rects.values())), mesh.num_devices
    said = list(_axis_words(layout, mesh))
    areas = {round(rect[2] * rect[3], 5) for rect in rects.values()}
    holds = f"1/{parts} of it" if len(areas) == 1 else f"one of {parts} parts of unequal size"
    holds = "all of it" if parts == 1 else holds
    copies = "" if parts == devices or devices == 1 else f", {devices // parts} devices hold the same" if parts > 1 else ""
    return "; ".join([*said, f"each device holds {holds}{copies}"])


def _axis_words(layout: Layout, mesh: Mesh) -> Iterator[str]:
    for placement, axis in zip(layout, mesh.axes, strict=True):
        if axis.size == 1:
            yield f"{axis.name} has one device"
        elif isinstance(placement, Shard):
            yield f"{axis.name} shards dim {placement.dim} into {axis.size}"
        elif isinstance(placement, Partial):
            yield f"the sum over {axis.name}'s {axis.size} devices is the value"
        else:
            yield f"{axis.name} keeps {axis.size} copies"


def users(solution: Solution, picture_of: Mapping[str, int]) -> dict[int, dict]:
    """Per picture the parameters with this layout: count, bytes per device, and names, blocks of equal layouts folded into one."""
    drawn: dict[int, dict] = {}
    for name, number in picture_of.items():
        row, user = solution.parameters[name], drawn.setdefault(number, {"count": 0, "bytes": 0.0, "names": []})
        user["count"] += 1
        user["bytes"] += 0 if "tied_to" in row else row.get("local_bytes") or 0
    for section in sections(solution.parameters, {}):
        title, first = section.title.removesuffix(": same"), section.blocks[0]
        for rest in section.rows:
            full = f"{first}.{rest}" if first else rest
            if full in picture_of:
                drawn[picture_of[full]]["names"].append(f"{title}: {rest}" if title else rest)
    return drawn

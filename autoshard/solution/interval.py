"""The interval in which the true seconds of a plan are expected, from the errors of the prices that its cost is computed from.

    c    = sum_j c_j                                   parts of the cost: compute, a collective on an axis     (`parts`)
    low  = sum_j c_j / (1 + e_j)
    high = sum_j c_j (1 + e_j)                         e_j = mean relative error of the price of part j        (`interval`)

Where the device's kernels have constants that published training steps have tested (mesh.Kernels.serial, and overlapped for plans of the
shortest time line), the interval is theirs instead:

    low, high = c times the ends between which 80 % of measured / predicted seconds were, of steps that the constants were not fitted to

Otherwise errors are not averaged: all prices are assumed to be wrong in the same direction. The error of a measured price is its error on
sizes to which it was not fitted; any other price has an error that is usual for its kind (mesh.UNMEASURED_LINK, UNMEASURED_DEVICE).
"""

from collections.abc import Mapping
from dataclasses import asdict

from autoshard.mesh import UNMEASURED_DEVICE, UNMEASURED_LINK, Mesh


def price_errors(mesh: Mesh, objective: str = "serial") -> dict:
    """{"device": error, "links": {axis: {collective: error}}}, relative, None or absent where it is unknown; "steps": mesh.TestedSteps of
    the objective."""
    links = {axis.name: {curve.collective: curve.error or None for curve in axis.curves} for axis in mesh.axes}
    kernels = mesh.device.kernels
    tested = None if kernels is None or mesh.device.error is not None else getattr(kernels, objective)
    return {"device": mesh.device.error, "links": links, **({} if tested is None else {"steps": asdict(tested)})}


def parts(breakdown: Mapping, errors: Mapping) -> list[dict]:
    """Each part of a plan's cost: {"what", "seconds", "error", "measured"}, in the order of the breakdown."""
    usual = errors.get("steps", {}).get("error", UNMEASURED_DEVICE)
    compute = sum(seconds for _, seconds in flat(breakdown.get("compute", {})))
    rows = [_row("compute", compute, errors.get("device"), usual)] if compute else []
    for what, seconds in flat(breakdown.get("communication", {})):
        collective, _, axis = what.partition(" ")
        if collective == "split":  # a copy on the device itself
            rows.append(_row(what, seconds, errors.get("device"), usual))
        else:
            rows.append(_row(what, seconds, errors.get("links", {}).get(axis, {}).get(collective), UNMEASURED_LINK))
    return rows


def interval(cost: float, breakdown: Mapping, errors: Mapping) -> tuple[float, float] | None:
    """Least and most seconds, for a cost of these parts, or the seconds of their time line; None where the parts are unknown, and nothing
    was tested."""
    if "steps" in errors and 0 < cost < float("inf"):
        return cost * errors["steps"]["low"], cost * errors["steps"]["high"]
    rows = parts(breakdown, errors)
    total = sum(row["seconds"] for row in rows)
    if not total > 0 or not cost < float("inf"):
        return None
    low = sum(row["seconds"] / (1 + row["error"]) for row in rows)
    high = sum(row["seconds"] * (1 + row["error"]) for row in rows)
    return cost * low / total, cost * high / total


def _row(what: str, seconds: float, measured: float | None, usual: float) -> dict:
    return {"what": what, "seconds": seconds, "error": usual if measured is None else measured, "measured": measured is not None}


def flat(tree: object, path: str = "") -> list[tuple[str, float]]:
    """`{"all_reduce": {"axis0": 1.0}}` -> [("all_reduce axis0", 1.0)]."""
    if isinstance(tree, Mapping):
        return [row for key, item in tree.items() for row in flat(item, f"{path} {key}".strip())]
    return [(path or "all", float(tree))] if isinstance(tree, (int, float)) else []

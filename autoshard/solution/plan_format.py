"""Format 2 of a plan's file: a certificate, and parts by program and stage. Everything is plain data here.

    {"format": 2, "status", "solver", "cost", "bound", "peak_bytes", ..., "parts": [{"layouts", "parameters", ...}, ...]}

    one program        one part, with layouts, results and parameters; the rest is the file's
    several programs   a part per program: `program`, the `devices` it has if not all, and all facts of a plan of one program;
                       `programs` has what they share
    stages             a part per stage: `stage`, `devices`, the prices of its `mesh`, and seconds of a microbatch; `pipeline` has the
                       schedule and what else was considered

Format 1 had a kind of file for each of the three, which are the records' own `to_dict`: `packed` makes a file of format 2 from one, and
`unpacked` is its inverse. A value of another type than expected stays where it is, for the schema to complain about.
"""

from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 2  # raised when an older reader would misread a newer file
CERTIFICATE = ("status", "solver", "cost", "bound", "peak_bytes")  # first in a file, as readers look for them
PLACED = ("layouts", "results", "parameters")  # of the one part of a plan of one program
SHARED = ("home", "weights", "families", "switches", "best", "peaks", "keeps_state", "copies")
SCHEDULED = (
    "schedule", "microbatches", "way", "bubble", "exposed_communication_seconds", "configurations", "speed_up", "budgets", "seconds_spent",
    "assumptions",
)  # fmt: skip
STEP = {"seconds": "cost", "bound_seconds": "bound"}  # what a pipeline's record calls them

Data = dict[str, Any]


def is_programs(data: Mapping) -> bool:
    """Whether a record of format 1 is of several programs."""
    return "programs" in data and "weights" in data


def is_pipeline(data: Mapping) -> bool:
    """Whether a record of format 1 is of stages."""
    return "stages" in data and "configurations" in data


def packed(record: Data) -> Data:
    """The file of a record: of `Solution.to_dict`, `ProgramsSolution.to_dict` or `Pipeline.to_dict`."""
    if is_programs(record):
        data = {**_without(record, "programs", "devices", *SHARED), "programs": _of(record, SHARED)}
        devices = record.get("devices")
        parts = _rows(record["programs"], lambda name, row: _part_of_program(name, row, devices))
    elif is_pipeline(record):
        renamed = {STEP.get(key, key): value for key, value in record.items()}
        data = {"solver": "", **_without(renamed, "stages", "gap", *SCHEDULED), "pipeline": _of(record, SCHEDULED)}
        parts = _rows(record["stages"], _part_of_stage)
    else:
        data, parts = _without(record, *PLACED), [_of(record, PLACED)]
    return {"format": FORMAT, **_of(data, CERTIFICATE), **_without(data, "format", *CERTIFICATE), "parts": parts}


def unpacked(data: Data) -> Data:
    """The record in a file that follows the schema."""
    parts = data["parts"]
    rest = _without(data, "format", "parts")
    if "programs" in data:
        programs = {part["program"]: _without(part, "program", "devices") for part in parts}
        devices = {part["program"]: part["devices"] for part in parts if "devices" in part}
        return {**_without(rest, "programs"), **data["programs"], "devices": devices, "programs": programs}
    if "pipeline" in data:
        names = {new: old for old, new in STEP.items()}
        renamed = {names.get(key, key): value for key, value in _without(rest, "pipeline", "solver", "mesh").items()}
        return {**renamed, **data["pipeline"], "stages": [_stage_of(part) for part in parts]}
    return {**rest, **parts[0]}


def _part_of_program(name: Any, row: Data, devices: Any) -> Data:
    own = {"devices": devices[name]} if isinstance(devices, Mapping) and name in devices else {}
    return {"program": name, **own, **_without(row, "format")}


def _part_of_stage(number: Any, row: Data) -> Data:
    parameters = row.get("parameters")
    if isinstance(parameters, Mapping):
        parameters = {name: {"layout": layout} for name, layout in parameters.items()}
    prices = {} if row.get("prices") is None else {"mesh": row["prices"]}
    named = {"shape" if key == "mesh" else key: value for key, value in row.items() if key != "prices"}
    return {"stage": number, **named, "parameters": parameters, **prices}


def _stage_of(part: Data) -> Data:
    parameters = {name: row["layout"] for name, row in part["parameters"].items()}
    return {**_without(part, "stage", "shape"), "mesh": part["shape"], "prices": part.get("mesh"), "parameters": parameters}


def _rows(of: Any, part: Callable[[Any, Data], Data]) -> Any:
    """A part per row; what is no table or list of records as it is."""
    named = list(of.items() if isinstance(of, Mapping) else enumerate(of)) if isinstance(of, Mapping | list) else []
    return [part(name, row) for name, row in named] if named and all(isinstance(row, Mapping) for _, row in named) else of


def _of(data: Mapping, keys: tuple[str, ...]) -> Data:
    return {key: data[key] for key in keys if key in data}


def _without(data: Mapping, *keys: str) -> Data:
    return {key: value for key, value in data.items() if key not in keys}

"""`autoshard tables`: plans the sharding and placement of embedding tables so that the slowest device is as fast as possible."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_device, load_report
from autoshard.cli.output import Output, finite
from autoshard.cli.verbs import Asked
from autoshard.mesh import Mesh
from autoshard.reading import data_of, rows_of, text_of
from autoshard.units import size
from autoshard.writing import write_atomically

if TYPE_CHECKING:
    from autoshard.tables import Table


@app.command()
def tables(asked: Asked, output: Output) -> int:
    """Shard and place embedding tables so that the slowest device is as fast as can be.

    \b
    autoshard tables tables.csv --devices 2x8 --hbm 80GB --host-memory 512GB --reserve 0.15
    CSV columns: name, rows, columns, and any of item_size, pooling, features, optimizer, skew.
    JSON: {"tables": [{"name": "user", "rows": 1000000, "columns": 64}]}; a table may bring its own options:
    {"name": "t", "options": [{"sharding": "table_wise", "seconds": 1e-3, "hbm_bytes": 1e9}]}.
    """
    from autoshard.tables import plan_tables  # here, like the report: other verbs shouldn't wait for what they import

    mesh = Mesh.from_bandwidths(asked.devices, **asked.links, device=load_device(asked.device))
    options = {name: getattr(asked, name) for name in ("hbm", "host_memory", "reserve", "batch", "host_bandwidth", "effort", "seed")}
    plan = plan_tables(read_tables(asked.spec), mesh, progress=output.progress, **options)
    record = plan.to_dict()
    output.write(asked.out, lambda path: write_atomically(json.dumps(finite(record), indent=1) + "\n", path))
    output.write(asked.plot if plan.devices else None, lambda path: load_report().tables.draw(path, record))
    assumed = Text(f"{mesh_line(mesh)}\n{limits_line(asked.hbm, asked.host_memory, asked.reserve)}\n")
    output.answer(record, lambda: Group(assumed, load_report().tables.table_of(record, asked.every)))
    return OK if plan.devices else NO


def mesh_line(mesh: Mesh) -> str:
    """The device and the links that times are computed from, written as in the report of `autoshard plan`."""
    from autoshard.report import axis_line

    return "; ".join([f"mesh {'x'.join(map(str, mesh.shape))} of {mesh.device.name}", *map(axis_line, mesh.axes)])


def limits_line(hbm: float, host_memory: float | None, reserve: float) -> str:
    """The limits that the column `of limit` refers to, and how they follow from the arguments."""
    given = [(hbm, "device")] if host_memory is None else [(hbm, "device"), (host_memory, "host")]
    less = [f" ({size(limit)} less {100 * reserve:g} % reserve)" if reserve and limit else "" for limit, _ in given]
    limits = ", ".join(f"{size(limit * (1 - reserve))} per {what}{how}" for (limit, what), how in zip(given, less))
    return f"limits {limits}"


def read_tables(path: str) -> list[Table]:
    """Tables of a .csv or .json file."""
    from autoshard.tables import tables_of_json, tables_of_rows

    if path.lower().endswith(".csv"):
        header, rows = rows_of(text_of(path, "tables"), path)
        return tables_of_rows([row for _, row in rows], header)
    return tables_of_json(data_of(path, "tables"))

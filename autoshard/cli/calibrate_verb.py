"""`autoshard calibrate fit | measure | show`: measured and published prices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autoshard import report
from autoshard.cli.app import INTERRUPTED, OK, app
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked, Verbs
from autoshard.reading import text_of

if TYPE_CHECKING:
    from autoshard.calibrate import Fitted

calibrate = Verbs(name="calibrate", help="Measure a cluster, fit what was measured, show published prices.", rich_markup_mode=None)
app.add_typer(calibrate)

MANY = 24  # curves; more are shown by collective
SAVED_EVERY = 1.0  # seconds


@calibrate.command()
def fit(asked: Asked, output: Output) -> int:
    """Fit a curve to each collective measured, and say how far each is from sizes that it has not seen.

    \b
    autoshard calibrate fit all_reduce_perf.txt all_gather_perf.txt --out curves.json --plot curves.png
    autoshard calibrate fit measured.csv --table
    """
    from autoshard.calibrate import fitted, parse
    from autoshard.cost import save

    said = {"collective": asked.collective, "devices": asked.devices, "system": asked.system}
    series = [one for path in asked.files for one in parse(text_of(path, "measurements"), path, **said)]  # type: ignore[arg-type]
    curves = []
    for k, one in enumerate(series):
        output.progress(f"fitting: {one.name}", k / len(series))
        curves.append(fitted(one, () if asked.alone else series))
    output.write(asked.out, lambda path: save(path, [one.to_dict() for one in curves]))
    output.write(asked.plot, lambda path: report.calibration.draw(path, [_drawn(one) for one in curves]))
    rows = [one.to_dict() for one in curves]
    record = {"curves": [{key: value for key, value in row.items() if key != "parameters"} for row in rows]}
    shown = [_row(one) for one in curves] if asked.table or len(curves) <= MANY else []
    output.answer(record, lambda: report.calibration.errors_table(shown, _by_collective(curves)))
    return OK


def _row(one: Fitted) -> dict:
    return {**one.to_dict(), "sizes": len(set(one.series.sizes)), "held_out": one.unseen._asdict()}


def _by_collective(curves: Sequence[Fitted]) -> list[dict]:
    """Errors over the points of all curves of a collective, and of all."""
    from autoshard.calibrate import pooled

    names = sorted({one.series.collective for one in curves})
    groups = [(name, [one for one in curves if one.series.collective == name]) for name in names]
    groups += [("all", list(curves))] if len(names) > 1 else []
    return [
        {"collective": name, "curves": len(members), **pooled([one.errors for one in members])._asdict(),
         "held_out": pooled([one.unseen for one in members])._asdict()}
        for name, members in groups
    ]  # fmt: skip


def _drawn(one: Fitted) -> dict:
    """Plain data for a figure: points, the fitted line."""
    points = sorted(zip(one.series.sizes, one.series.seconds))
    first, last = points[0][0], points[-1][0]
    grid = [first * (last / first) ** (k / 200) for k in range(201)]
    return {
        "name": one.series.name,
        "collective": one.series.collective,
        "points": points,
        "line": list(zip(grid, one.curve.seconds(grid).tolist())),  # type: ignore[arg-type]
        "errors": [float(p / t - 1) for p, (_, t) in zip(one.curve.seconds([x for x, _ in points]), points)],  # type: ignore[arg-type]
    }


@calibrate.command()
def measure(asked: Asked, output: Output) -> int:
    """Measure this cluster: every collective on every axis of a mesh, and its devices. Start it with torchrun, a process per device;
    one device, --mesh 1, needs none.

    \b
    torchrun --nproc-per-node 4 -m autoshard calibrate measure --mesh 2x2 --out cluster.json
    autoshard plan models/gpt2.py:small --cluster cluster.json
    """
    from autoshard import api  # here: torch takes seconds to import
    from autoshard.cost import save_cluster

    shape, out = asked.mesh, asked.out
    record: dict = {}
    saved, began = -SAVED_EVERY, time.perf_counter()
    steps = api.measure_this_cluster(shape, clock=time.perf_counter, seconds=asked.seconds, backend=asked.backend, largest=asked.largest)
    try:
        for rank, about, what, fraction, measured in steps:
            if rank != 0:
                output.progress_shown.stop()
                continue
            output.progress(f"measuring: {what}", fraction)
            now = time.perf_counter()
            if measured.complete or now - saved > SAVED_EVERY:
                record = _record(shape, about, measured, now - began) or record
                saved = now
                if record:
                    save_cluster(out, record)
    except KeyboardInterrupt:
        output.note(f"interrupted; {out} holds what was measured so far" if record else "interrupted before anything was known")
        return INTERRUPTED
    if record:
        output.note(f"wrote {out}")
        output.answer(record, lambda: report.calibration.cluster_table(record))
    return OK


def _record(shape: tuple[int, ...], about: dict, measured: Any, elapsed: float) -> dict:
    """The content of the file; {} while too little is measured."""
    from autoshard.calibrate import cluster

    if not any(sample.op == "memory" for sample in measured.device):
        return {}
    if not all(any(len(t) >= 2 for (axis, _), t in measured.collectives.items() if axis == k) for k, n in enumerate(shape) if n > 1):
        return {}
    known = {key: times for key, times in measured.collectives.items() if len(times) >= 2}
    about_it = {key: about[key] for key in ("backend", "device", "memory")} | {"assumptions": {**about, "seconds": elapsed}}
    alone = {axis: times for axis, times in measured.alone.items() if (axis, "all_gather") in known}
    return cluster(shape, known, measured.device, complete=measured.complete, alone=alone, **about_it)


@calibrate.command()
def show(asked: Asked, output: Output) -> int:
    """Show the prices that come with autoshard: of each device its links, where the numbers are from, and how far they are off.

    \b
    autoshard calibrate show
    autoshard calibrate show h100
    """
    from autoshard.cost import presets

    chosen = [presets.preset(asked.name)] if asked.name is not None else presets.all_presets()
    rows = [asdict(one) for one in chosen]
    output.answer({"prices": rows}, lambda: report.calibration.prices_table(rows))
    return OK

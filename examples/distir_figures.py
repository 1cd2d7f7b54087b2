"""Figures 3 and 4 of DistIR (Santhanam et al. 2021) under its published rules and constants, and beside them with correct units.

    python examples/distir_figures.py [FOLDER]

Writes figure3.png and figure4.png. The published links are 64 times too fast (docs/simulate.md): most of what figure 3 shows goes away
when 200 Gbps are taken as 2.5e10 bytes per second.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from autoshard.simulate.degrees import Parallel
from autoshard.simulate.distir import DISTIR_83D7FC3, DISTIR_3386EDC, MLP, Constants, step_seconds

DEVICES, DATA = (2, 4, 8, 16, 32), Path(__file__).parent.parent / "tests/data/distir/figure4_grid.json"


def speed_ups(batch: int, grids: list[Parallel], constants: Constants) -> list[float]:
    """Of an MLP of 64 weights of 4096 x 4096, against one device."""
    mlp = MLP(64, 4096, batch)
    alone = step_seconds(mlp, Parallel(), constants)
    return [alone / step_seconds(mlp, grid, constants, moved="inputs") for grid in grids]


def draw_figure_3(path: Path) -> None:
    figure = Figure(figsize=(10, 7), layout="tight")
    lines = ((DISTIR_3386EDC, "published constants"), (DISTIR_83D7FC3, "correct units"))
    for row, (constants, said) in zip(figure.subplots(2, 2), lines, strict=True):
        for batch in (512, 1024, 2048, 4096):
            row[0].semilogx(DEVICES, speed_ups(batch, [Parallel(data=n) for n in DEVICES], constants), "o-", base=2, label=f"batch {batch}")
        for k in (4, 8, 16, 32):
            stages = [Parallel(pipeline=n, microbatches=k) for n in DEVICES]
            row[1].semilogx(DEVICES, speed_ups(4096, stages, constants), "o-", base=2, label=f"{k} microbatches")
        for axes, what in zip(row, ("data parallel", "pipeline parallel, batch 4096"), strict=True):
            axes.set(title=f"{what}, {said}", xlabel="devices", ylabel="speed-up", ylim=(0, None))
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def draw_figure_4(path: Path) -> None:
    rows = sorted(json.loads(DATA.read_text()), key=lambda r: (r["d"] * r["h"] * r["p"], r["ref"]))
    names = [f"{r['d']}/{r['h']}/{r['p']}/{r['k']}" for r in rows]
    found = [8192 / step_seconds(MLP(64, 8192, 8192), Parallel(r["d"], r["h"], r["p"], r["k"]), moved="everything") for r in rows]
    axes = Figure(figsize=(14, 4.5), layout="tight").subplots()
    axes.bar(names, found, color="#4c78a8", label="simulated under the published constants")
    axes.plot(names, [r["ref"] for r in rows], "k_", markersize=5, label="published")
    axes.tick_params(axis="x", rotation=90, labelsize=5)
    axes.set(title="MLP of 64 weights of 8192 x 8192, batch 8192", xlabel="data / tensor / pipeline / microbatches", ylabel="samples/s")
    axes.legend(fontsize=8)
    axes.figure.savefig(path, dpi=130)


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    draw_figure_3(out / "figure3.png")
    draw_figure_4(out / "figure4.png")

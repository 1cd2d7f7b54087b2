"""Figures 3 and 4 of DistIR (Santhanam et al. 2021) under its published rules and constants, and beside them with correct units.

    python examples/distir_figures.py OUT_FOLDER [--data tests/data/distir]

Writes figure3.png and figure4.png. The published links are 64 times too fast (docs/simulate.md): most of what figure 3 shows goes away
when 200 Gbps are taken as 2.5e10 bytes per second.
"""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from autoshard.simulate.distir import DISTIR_83D7FC3, DISTIR_3386EDC, MLP, Constants, step_seconds
from autoshard.simulate.parallel import Parallel

DEVICES = (2, 4, 8, 16, 32)
BATCHES, MICROBATCHES = (512, 1024, 2048, 4096), (4, 8, 16, 32)


def data_parallel(batch: int, constants: Constants) -> list[float]:
    """Speed-ups over DEVICES of an MLP of 64 weights of 4096 x 4096."""
    alone = step_seconds(MLP(64, 4096, batch), Parallel(), constants)
    return [alone / step_seconds(MLP(64, 4096, batch), Parallel(data=n), constants, moved="inputs") for n in DEVICES]


def pipelined(microbatches: int, constants: Constants) -> list[float]:
    """The same for n stages and a batch of 4096."""
    mlp = MLP(64, 4096, 4096)
    alone = step_seconds(mlp, Parallel(), constants)
    grids = [Parallel(pipeline=n, microbatches=microbatches) for n in DEVICES]
    return [alone / step_seconds(mlp, grid, constants, moved="inputs") for grid in grids]


def draw_figure_3(path: Path) -> None:
    figure = Figure(figsize=(10, 7))
    for row, (constants, said) in enumerate(((DISTIR_3386EDC, "published constants"), (DISTIR_83D7FC3, "correct units"))):
        left, right = figure.add_subplot(2, 2, 2 * row + 1), figure.add_subplot(2, 2, 2 * row + 2)
        for batch in BATCHES:
            left.plot(DEVICES, data_parallel(batch, constants), marker="o", label=f"batch {batch}")
        for microbatches in MICROBATCHES:
            right.plot(DEVICES, pipelined(microbatches, constants), marker="o", label=f"{microbatches} microbatches")
        for axes, what in ((left, "data parallel"), (right, "pipeline parallel, batch 4096")):
            axes.set_title(f"{what}, {said}", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xticks(DEVICES, [str(n) for n in DEVICES])
            axes.set_xlabel("devices")
            axes.set_ylabel("speed-up")
            axes.axhline(1, color="grey", linewidth=0.6)
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_figure_4(rows: list[dict], path: Path) -> None:
    """Throughput of every configuration, the simulator's beside the published one."""
    rows = sorted(rows, key=lambda r: (r["d"] * r["h"] * r["p"], r["ref"]))
    found = [8192 / step_seconds(MLP(64, 8192, 8192), Parallel(r["d"], r["h"], r["p"], r["k"]), moved="everything") for r in rows]
    figure = Figure(figsize=(14, 4.5))
    axes = figure.subplots()
    axes.bar(range(len(rows)), found, color="#4c78a8", label="simulated under the published constants")
    axes.plot(range(len(rows)), [r["ref"] for r in rows], "k_", markersize=5, label="published")
    names = [f"{r['d']}/{r['h']}/{r['p']}/{r['k']}" for r in rows]
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=5)
    axes.set_xlim(-1, len(rows))
    axes.set_xlabel("data / tensor / pipeline / microbatches")
    axes.set_ylabel("samples per second")
    axes.set_title("MLP of 64 weights of 8192 x 8192, batch 8192", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "tests" / "data" / "distir")
    arguments = parser.parse_args()
    if not arguments.out.is_dir():
        sys.exit(f"there is no folder {arguments.out}; make it first")
    grid = arguments.data / "figure4_grid.json"
    if not grid.is_file():
        sys.exit(f"there is no file {grid}; expected the published grid, as in tests/data/distir")
    draw_figure_3(arguments.out / "figure3.png")
    draw_figure_4(json.loads(grid.read_text()), arguments.out / "figure4.png")
    print(f"wrote {arguments.out / 'figure3.png'} and {arguments.out / 'figure4.png'}")


if __name__ == "__main__":
    main()

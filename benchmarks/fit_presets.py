"""Fit the curves that come with autoshard to public measurements, and write them.

    python benchmarks/fit_presets.py MEASURED.csv --out autoshard/cost/presets/measured.json

Which system of the file stands for which preset is in SYSTEMS. One dtype (half) is kept: a planner prices bytes.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from autoshard.calibrate import fit, held_out, summary
from autoshard.calibrate.importers import parse
from autoshard.cost.curves import Series

LICENCE = "nccl-tests runs of ai-dynamo/aiconfigurator (Apache-2.0), {}"
SYSTEMS = {"a100": "a100_sxm@nccl-2.27.3", "h100": "h100_sxm@nccl-2.27.3", "l40s": "l40s@nccl-2.27.3"}


def digits(value: float) -> float:
    return float(f"{value:.6g}")


def link(series: Series) -> dict:
    x, t = np.array(series.sizes), np.array(series.seconds)
    curve = fit(x, t)
    return {
        "devices": series.devices,
        "collective": series.collective,
        "sizes": list(curve.sizes),
        "seconds": [digits(v) for v in curve.times],
        "tail": digits(curve.tail),
        "error": digits(summary(*held_out(x, t, fit)).mean),
    }


def prices(curves: list[Series]) -> dict:
    """Latency and bandwidth for what has no curve, from the largest all_gather: t = a + (n-1)/n x / bandwidth, rounds log2 n."""
    widest = max((s for s in curves if s.collective == "all_gather"), key=lambda s: s.devices)
    large = widest.sizes[-1]
    seconds = float(fit(widest.sizes, widest.seconds).seconds(large))
    n = widest.devices
    latency = min(widest.seconds) / (n - 1).bit_length()
    return {"intra_node_bandwidth": digits((n - 1) / n * large / seconds), "intra_node_latency": digits(latency)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = parse(arguments.file.read_text(), arguments.file.name)
    written = {}
    for name, system in SYSTEMS.items():
        chosen = [s for s in found if s.system == system and s.dtype == "half"]
        if chosen:
            links = sorted((link(s) for s in chosen), key=lambda row: (row["collective"], row["devices"]))
            written[name] = {"source": LICENCE.format(system), "alpha_beta": prices(chosen), "links": links}
    arguments.out.write_text(json.dumps(written, separators=(",", ":")) + "\n")
    print(f"{', '.join(written)}: {sum(len(one['links']) for one in written.values())} curves to {arguments.out}")


if __name__ == "__main__":
    main()

"""Plan on measured links: read the log of nccl-tests, fit a curve, say how far off it is, and plan with it.

    python examples/calibrate_links.py [all_reduce.txt]

The log is what `all_reduce_perf -b 512 -e 512M -f 2 -g 8` prints; without one, that of a node of 8 A100 is read. To measure all
collectives on your own cluster: torchrun --nproc-per-node N -m autoshard calibrate measure --mesh 2x4 --out cluster.json
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import autoshard
from autoshard.calibrate import fit, held_out, importers
from autoshard.calibrate.cluster import mesh_of
from autoshard.mesh import DEVICES

LOG = Path(__file__).parent.parent / "tests" / "data" / "collectives" / "nccl_tests_all_reduce.txt"


def measured_mesh(path: Path) -> tuple[autoshard.Mesh, float]:
    """A mesh whose axis has the measured curve, and the curve's mean relative error on sizes that were held out of the fit."""
    series = importers.parse(path.read_text(), path.name)[0]
    sizes, seconds = np.array(series.sizes), np.array(series.seconds)
    predicted, measured = held_out(sizes, seconds, fit)
    error = float(np.mean(np.abs(predicted / measured - 1)))
    times = {(0, series.collective): dict(zip(series.sizes, series.seconds, strict=True))}
    return mesh_of((series.devices,), times, DEVICES["a100"], "nccl"), error


def net(width: int = 2048) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


if __name__ == "__main__":
    mesh, error = measured_mesh(Path(sys.argv[1]) if len(sys.argv) > 1 else LOG)
    print(f"all_reduce over {mesh.num_devices} devices: {error:.1%} off on sizes held out")
    nominal = autoshard.Mesh.from_bandwidths(mesh.shape, device="a100")
    with torch.device("meta"):
        model, inputs = net(), (torch.empty(4096, 2048),)
    for name, priced in (("data sheet", nominal), ("measured", mesh)):
        plan = autoshard.plan(model, inputs, priced, training=True, baselines=False)
        low, high = plan.interval or (plan.objective_seconds,) * 2
        print(f"{name}: {plan.objective_seconds * 1e3:.3f} ms, between {low * 1e3:.3f} and {high * 1e3:.3f} as far as the prices are known")
        print("    " + ", ".join(f"{weight} {row['layout']}" for weight, row in plan.parameters.items()))

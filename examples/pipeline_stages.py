"""Cut a model into pipeline stages: stages, devices, layouts, schedule and microbatches searched together.

    python examples/pipeline_stages.py [1f1b.png]

The cluster is two nodes of two small devices with a slow link between them. With a file's name, the schedule that won is drawn.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from autoshard.mesh import Device
from autoshard.pipeline import run, schedule_of
from autoshard.report.timeline import draw_run
from models import mlp

SMALL = Device("small", flops=1e12, flops32=1e12, memory_bandwidth=1e11, memory=8e9)
CLUSTER = autoshard.Cluster.of(4, devices_per_node=2, device=SMALL, intra_node_bandwidth=5e9, inter_node_bandwidth=5e8)


def planned():
    model, inputs = mlp.mlp(batch=1024, width=256, hidden=1024, layers=4)
    return autoshard.plan(model, inputs, CLUSTER, microbatches=(8,), schedules=("gpipe", "1f1b"))


if __name__ == "__main__":
    best = planned()
    print(f"{best.seconds * 1e3:.2f} ms per step: {len(best.stages)} stages, {best.schedule}, {best.microbatches} microbatches")
    print(f"bubble {best.bubble:.0%}; {best.peak_bytes / 1e6:.0f} MB on the fullest device; kernels alone {best.bound * 1e3:.2f} ms")
    for stage in best.stages:
        print(f"  layers {stage.first} to {stage.last - 1} on devices {list(stage.devices)}, a mesh of {stage.mesh}")
    for row in [row for row in best.configurations if row["way"] == "grid"][:3]:
        grid = f"data {row['data']} x tensor {row['tensor']} x pipeline {row['pipeline']}"
        print(f"{row['seconds'] * 1e3:.2f} ms with {grid}, {row['microbatches']} microbatches, {row['schedule']}")
    if len(sys.argv) > 1:
        forward, backward = ([getattr(stage, key) for stage in best.stages] for key in ("forward_seconds", "backward_seconds"))
        transfer = [stage.send_seconds for stage in best.stages]
        drawn = run(schedule_of(best.schedule, len(best.stages), best.microbatches), forward=forward, backward=backward, transfer=transfer)
        draw_run(drawn, sys.argv[1])

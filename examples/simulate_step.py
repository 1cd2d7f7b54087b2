"""What a step of a plan will take: how much communication hides behind compute, what a device holds when, what to shorten.

    python examples/simulate_step.py [trace.json]

With a file's name, the time line is written for ui.perfetto.dev or chrome://tracing.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from autoshard import api
from autoshard.report.timeline import save_trace, trace_of
from models import mlp


def simulated():
    """A plan, and its step with collectives beside the kernels."""
    model, inputs = mlp.mlp(batch=8192, width=2048, hidden=8192, layers=2, dtype="bfloat16")
    mesh = autoshard.Mesh.from_bandwidths((2, 4), intra_node_bandwidth=50e9, inter_node_bandwidth=25e9)
    plan = autoshard.plan(model, inputs, mesh, training=True, baselines=False)
    return plan, api.simulate(model, inputs, plan)


def critical_seconds(timeline) -> Counter:
    """What the step waits for: seconds on the critical path, by kind of task."""
    found: Counter = Counter()
    for i in timeline.critical_path:
        found[timeline.tasks[i].kind] += timeline.times.end[i] - timeline.times.begin[i]
    return found


if __name__ == "__main__":
    plan, timeline = simulated()
    print(f"one after the other {plan.cost * 1e3:.2f} ms, with overlap {timeline.seconds * 1e3:.2f} ms")
    exposed = timeline.exposed_communication_seconds
    print(f"collectives {timeline.communication_seconds * 1e3:.2f} ms, of which nothing hides {exposed * 1e3:.2f} ms")
    for kind, seconds in critical_seconds(timeline).most_common():
        print(f"  on the critical path: {kind} {seconds * 1e3:.2f} ms")
    kinds = {kind: held.max() for kind, held in timeline.memory.items() if kind not in ("seconds", "total")}
    print(f"peak {timeline.peak_bytes / 1e6:.0f} MB; the most held of " + ", ".join(f"{k} {b / 1e6:.0f} MB" for k, b in kinds.items()))
    if len(sys.argv) > 1:
        save_trace(trace_of(timeline), sys.argv[1])

"""How much slower is a step in less memory? The fastest plans for less and less of it, each with its proof.

    python examples/memory_frontier.py [FOLDER]

With a folder, the plan of every point is written there, and the frontier as frontier.json (docs/formats.md).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from autoshard.api import Frontier
from models import mlp


def swept() -> Frontier:
    """Points by growing memory; `proven` and `optimal` ones are within a thousandth of the best that fits in theirs."""
    model, inputs = mlp.mlp(batch=1024, width=1024, hidden=4096, layers=1)
    mesh = autoshard.Mesh.from_bandwidths((2, 4), device="a100")
    return autoshard.frontier(model, inputs, mesh, training=True, points=5, gap=1e-3)


if __name__ == "__main__":
    found = swept()
    fastest = found.points[-1]
    for point in found.points:
        slower = f"{point.seconds / fastest.seconds - 1:.1%} slower"
        print(f"{point.memory_bytes / 1e6:7.1f} MB  {point.seconds * 1e3:.3f} ms, {slower}  {point.status}, gap {point.gap:.1g}")
    limit = 1.1 * found.points[0].memory_bytes
    within = found.within(limit)
    print(f"in {limit / 1e6:.1f} MB: {within.seconds * 1e3:.3f} ms is known, and no plan takes less than {found.bound(limit) * 1e3:.3f} ms")
    if len(sys.argv) > 1:
        for i in range(len(found.points)):
            found.solution(i).save(Path(sys.argv[1]) / f"plan{i}.json")
        found.save(Path(sys.argv[1]) / "frontier.json")

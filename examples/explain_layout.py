"""Ask a plan about one weight: what would my layout cost, what does a pin change, and the whole as a page for others to read.

    python examples/explain_layout.py [report.html]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from autoshard import api
from autoshard.solution import changes
from models import mlp

WEIGHT = "layers.0.up.weight"
MODEL, INPUTS = mlp.mlp(batch=16384, width=1024, hidden=4096)
MESH = autoshard.Mesh.from_bandwidths((2, 4))


def planned(**options) -> autoshard.Solution:
    return autoshard.plan(MODEL, INPUTS, MESH, training=True, objective="serial", **options)


if __name__ == "__main__":
    plan = planned()
    about = autoshard.explain(MODEL, INPUTS, plan, WEIGHT, why_not="S(1),R", most=2)
    print(f"{WEIGHT} is {about.layout}")
    for other in about.alternatives:
        print(f"  {other.label} would make the step {other.extra * 1e6:.1f} us dearer, everything else planned anew")
    mine = about.why_not
    print(f"  S(1),R, which was asked about: {mine.extra * 1e6:.1f} us; elsewhere {len(mine.changed)} layouts would change")

    pinned = planned(pins={WEIGHT: "S(1),R"})  # the same question as a plan of its own: exactly as dear
    assert abs(pinned.cost / mine.cost - 1) < 1e-9
    for name, (now, then) in changes(plan, pinned)["parameters"].items():
        print(f"  {name}: {now} -> {then}")
    for name, row in plan.baselines.items():
        print(f"{name}: {row['cost_seconds'] / plan.cost:.2f} times as long as the plan")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(api.html_report(plan, MODEL, INPUTS))

"""Small graphs and plans, made by hand, for the tests of what is done with a plan."""

import math
from functools import partial

from autoshard import exports
from autoshard.graph import Graph, Op, Result, Tensor
from autoshard.mesh import Mesh
from autoshard.solution import Placed, Solution

export_anyway = partial(exports.export, within=math.inf)  # steps of tiny plans take much longer as exported
MESH = Mesh.from_bandwidths((2, 4))


def linear_graph(width: int = 8, batch: int = 16) -> Graph:
    """x @ w for one weight and one input."""
    w, x, y = (Tensor(shape, "float32") for shape in ((width, width), (batch, width), (batch, width)))
    ops = (
        Op("w", "parameter", (), ((), ()), (w,), kind="parameter"),
        Op("x", "input", (), ((), ()), (x,), kind="input"),
        Op("mm", "aten.mm.default", ((1, 0), (0, 0)), ((), ()), (y,)),
    )
    return Graph(ops, (Result("output", "0", (2, 0)),))


def linear_solution(**changes) -> Solution:
    """A plan for `linear_graph` on `MESH`."""
    layouts = {"w": Placed((), ("R,S(1)",)), "x": Placed((), ("S(0),R",)), "mm": Placed(("S(0),R", "R,S(1)"), ("S(0),S(1)",), ("S(0),R",))}
    fields = {
        "layouts": layouts,
        "results": {"output:0": "S(0),R"},
        "mesh": MESH,
        "cost": 2e-3,
        "bound": 2e-3,
        "status": "optimal",
        "solver": "ilp",
        "peak_bytes": 1e9,
        "training": False,
        "baselines": {"fsdp": {"cost_seconds": 3e-3, "peak_bytes": 5e8, "status": "optimal", "matched": "1 of 1"}},
        "parameters": {"w": {"layout": "R,S(1)", "shape": (8, 8), "dtype": "float32", "local_bytes": 64}},
        "breakdown": {"compute": {"matmul": 1.5e-3}, "communication": {"all_gather": {"axis1": 5e-4}}, "blocks": {}},
        "counts": {"nodes": 3, "choices": 20, "edges": 2, "distinct_signatures": 3},
        "fingerprint": {"graph": "a", "structure": "b", "mesh": "c", "prices": "d", "options": "e"},
        "assumptions": {"optimizer": "adamw", "memory_limit": 8e10, "torch": "2.13.0"},
        "seconds": {"cpu": {"total": 1.0}, "wall": {"total": 1.0}},
    }
    return Solution(**{**fields, **changes})

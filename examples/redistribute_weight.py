"""Bring a weight from the layout it was trained in to the one it is served in: the cheapest route, and carried out.

    python examples/redistribute_weight.py

A mesh of 2 x 2 x 2 devices. The rows were cut over axes 0 and 1; the columns are to be cut over axes 2 and 0. No device may ever hold
more than twice a part, so gathering the whole weight first is no way. The ranks are simulated here; on a cluster each of them calls
`autoshard.relayout.execute.BlockGroups.of(mesh).run(route, part)` under torchrun.
"""

import torch

import autoshard
from autoshard.relayout import BlockRoute, MeshPrices, astar, naive, read_problem
from autoshard.relayout.execute import shard_blocks, simulate

PROBLEM = {
    "id": "up.weight",
    "shape": [2048, 1024],
    "itemsize": 4,
    "mesh": [2, 2, 2],
    "src": [[0, 1], []],  # per dim the mesh axes that cut it, major to minor
    "src_bs": [512, -1],  # and the size of a block
    "dst": [[], [2, 0]],
    "dst_bs": [-1, 256],
}


def routes() -> tuple[BlockRoute, BlockRoute]:
    """The cheapest route within twice a part's memory, and the usual one, which keeps no limit."""
    problem = read_problem(PROBLEM)
    prices = MeshPrices(autoshard.Mesh.from_bandwidths(problem.mesh), problem.itemsize)
    part = problem.elements(problem.source)
    return astar(problem, prices, 2 * part, count="buffers"), naive(problem, prices)


def deliver(route: BlockRoute) -> list[torch.Tensor]:
    """Every rank's part at the end, checked against the target's cut of the whole."""
    problem = route.problem
    weight = torch.randn(problem.shape)
    parts, sent = simulate(route, shard_blocks(weight, problem.source, problem.mesh))
    assert all(map(torch.equal, parts, shard_blocks(weight, problem.target, problem.mesh)))
    assert [max(some) for some in sent] == [step.bytes for step in route.steps]  # bytes as priced
    return parts


if __name__ == "__main__":
    for name, route in zip(("cheapest", "gather, then cut"), routes(), strict=True):
        deliver(route)
        print(f"{name}: {route.seconds * 1e6:.0f} us, {route.peak_bytes / 1e6:.1f} MB per device at the peak")
        for step in route.steps:
            print(f"    {step.collective} over axes {step.axes}: {step.bytes / 1e6:.1f} MB sent, {step.seconds * 1e6:.0f} us")

"""A reproduction of the published simulator DistIR, with its cost rules and constants unchanged, for `study.py simulate`.

An MLP of L weights (N, N), float32, batch b, trained on D x H x P devices with K microbatches. With F FLOP/s, M bytes/s of memory and
links of W bytes/s, seconds of an op on one device:

    MatMul (m,k)x(k,n)                   s (m k + k n)/M + 2 m k n/F       s: bytes of an item; the output is not counted
    MatMulGrad(x, w, dz)                 MatMul(dz, w^T) + MatMul(x^T, dz)
    Relu, ReluGrad, Loss, LossGrad, Add  B/F                               B: bytes of the first input, as if they were FLOPs
    Allreduce                            2 B (n - 1)/n / W                 on each of n participants
    Send                                 4 B/W on both ends                DistIR counts the item size twice
    Allgather                            2 * 4 B (n - 1)/n / W
    Split                                launch
    broadcast, scatter, concat, identity 0

Each device has one clock. An op begins when all devices that take part in it are ready, and adds its cost to the clocks of the devices
that the rule names. Nothing overlaps, and the order of the list is the schedule (`_timesteps`, DistIR's PipeDream scheduler). Weights
are sharded alternately by columns and by rows over H, with an Allreduce after every second MatMul and MatMulGrad; each of P stages has
L/P weights.

`DISTIR_3386EDC` takes links of 200 Gbps as 200 * 8e9 bytes/s, 64 times too fast, and float32 items as s = 2 bytes. `DISTIR_83D7FC3` has
2.5e10 bytes/s, which is 200 Gbps, and s = 4. The source was read and not copied: github.com/microsoft/dist-ir at 3386edcb4ba1
(dist_ir/executor/cost_model.py, simulator.py, dist_ir/transforms/mlp_dhp_transform.py, pipedream_scheduler.py, filter_transform.py,
examples/mlp.py), units at 83d7fc3963e8.
"""

from dataclasses import dataclass
from functools import lru_cache

from autoshard.pipeline import Parallel


@dataclass(frozen=True)
class Constants:
    """The constants of the cost rules."""

    flops: float  # F, FLOP/s
    memory_bandwidth: float  # M, bytes/s
    link_bandwidth: float  # W, bytes/s
    launch: float  # seconds of a Split
    item: int = 2  # s, bytes


DISTIR_3386EDC = Constants(1e14, 1.2e12, 200 * 8e9, 1e-6)
DISTIR_83D7FC3 = Constants(1e14, 1.2e12, 200e9 / 8, 1e-6, 4)


@dataclass(frozen=True)
class MLP:
    """L weights of N x N and a batch of b rows."""

    layers: int
    width: int
    batch: int


@dataclass(frozen=True)
class _Costs:
    """Seconds of the parts of a step on one device, for one microbatch."""

    forward: tuple[float, ...]  # by the weights of a stage
    backward: float  # of a stage
    accumulate: float  # the Adds of a stage's weight gradients, from the second microbatch on
    loss: float  # Loss and LossGrad
    send: float  # of an activation, or of the labels
    send_weight: float  # of the shard of a weight that a rank of H holds
    finish: float  # Allreduces of a stage's weight gradients over D
    gather: float  # Allgather over D of the step's outputs: the loss, the input's gradient


MOVED = ("nothing", "inputs", "everything")


def step_seconds(mlp: MLP, grid: Parallel, constants: Constants = DISTIR_3386EDC, *, moved: str = "nothing") -> float:
    """Seconds of a training step.

    moved: the values that have to be sent to their devices within the step. "inputs" (figure 3): x and the labels begin on one
    additional device; "everything" (figure 4): the weights too. With D > 1 they are scattered and broadcast, which costs nothing. Within a
    pipeline the first device forwards the labels of each microbatch, and weights at their first use.
    All ranks of D and H do the same at the same times, so one of each is simulated. ValueError where L, N or b don't divide.
    """
    _check(mlp, grid, moved)
    costs, P = _costs(mlp, grid, constants), grid.pipeline
    clocks = [0.0] * P
    root = 0.0  # the clock of the additional device
    if grid.data == 1:
        rows, weights = 16 * mlp.batch * mlp.width, 16 * mlp.layers * mlp.width**2  # bytes, item size counted twice
        sent = {"nothing": 0, "inputs": 2 * rows if P > 1 else 0, "everything": 2 * rows + weights}[moved]
        root = clocks[0] = sent / constants.link_bandwidth
    if P > 1 and moved != "nothing":
        clocks[0] += 2 * constants.launch  # Split x and the labels

    def send(a: int, b: int, seconds: float) -> None:
        clocks[a] = clocks[b] = max(clocks[a], clocks[b]) + seconds

    for units in _timesteps(P, grid.microbatches):
        for device, kind, i, late_sender in units:
            if late_sender is not None:  # its input, computed in this timestep, is sent now and a second time with the others
                send(late_sender, device, costs.send)
            if kind == "B":
                clocks[device] += costs.backward + (costs.accumulate if i else 0.0)
                continue
            for seconds in costs.forward:
                if device and i == 0 and moved == "everything":
                    send(0, device, costs.send_weight)
                clocks[device] += seconds
            if device == P - 1:
                if P > 1 and moved != "nothing":
                    send(0, device, costs.send)  # its labels
                clocks[device] += costs.loss
        for device, kind, _, _ in units:
            to, _ = _next(P, device, kind)
            if to not in (device, None):
                send(device, to, costs.send)
    if grid.data > 1:
        clocks = [clock + costs.finish for clock in clocks]
        clocks[-1] += costs.gather
        clocks[0] += costs.gather
    return max(root, *clocks)


def _check(mlp: MLP, grid: Parallel, moved: str) -> None:
    if moved not in MOVED:
        raise ValueError(f"moved is {moved!r}; expected one of {', '.join(MOVED)}")
    divided = {"layers": grid.pipeline, "width": grid.tensor, "batch": grid.data * grid.microbatches}
    for what, parts in divided.items():
        size = getattr(mlp, what)
        if parts < 1 or size < 1 or size % parts:
            raise ValueError(f"{size} {what} don't divide into {parts} parts; expected a number that does")
    if grid.tensor > 1 and mlp.layers // grid.pipeline % 2:
        raise ValueError(f"{mlp.layers // grid.pipeline} layers per stage; sharding by columns and by rows in turn needs an even number")


def _costs(mlp: MLP, grid: Parallel, c: Constants) -> _Costs:
    """Weights 1, 3, 5, .. are sharded by columns, the others by rows."""
    m, N, n = mlp.batch // (grid.data * grid.microbatches), mlp.width, mlp.width // grid.tensor
    layers = mlp.layers // grid.pipeline

    def matmul(m: int, k: int, n: int) -> float:
        return c.item * (m * k + k * n) / c.memory_bandwidth + 2 * m * k * n / c.flops

    def allreduce(size: float, ranks: int) -> float:
        return 2 * size * (ranks - 1) / ranks / c.link_bandwidth

    shapes = [(N, n) if j % 2 == 0 else (n, N) for j in range(layers)]
    forward = [matmul(m, k, j) + 4 * m * j / c.flops for k, j in shapes]
    backward = sum(matmul(m, j, k) + matmul(k, m, j) + 4 * m * j / c.flops for k, j in shapes)
    if grid.tensor > 1:
        synchronize = allreduce(4 * m * N, grid.tensor)
        forward[1::2] = [seconds + synchronize for seconds in forward[1::2]]
        backward += layers // 2 * synchronize
    rows, weight = 4 * m * N, 4 * N * n
    return _Costs(
        tuple(forward),
        backward,
        layers * weight / c.flops,
        2 * rows / c.flops,
        4 * rows / c.link_bandwidth,
        4 * weight / c.link_bandwidth,
        layers * allreduce(weight, grid.data),
        2 * 4 * rows * grid.microbatches * (grid.data - 1) / grid.data / c.link_bandwidth,
    )


Scheduled = tuple[int, str, int, int | None]  # device, kind, microbatch, the device that computed its input in the same timestep


@lru_cache(maxsize=256)
def _timesteps(P: int, K: int) -> tuple[tuple[Scheduled, ...], ...]:
    """DistIR's 1F1B: in each timestep each device runs a ready microbatch, forward and backward in turn, the lowest number first.

    The scheduler visits the devices in order, a device from the timestep after the one in which its first microbatch became ready. A
    later device can run a microbatch that became ready in the same timestep.
    """
    ready: list[dict[str, set[int]]] = [{"F": set(), "B": set()} for _ in range(P)]
    ready[0]["F"] |= set(range(K))
    turn = ["B"] * P
    known, left = 1, 2 * P * K
    steps = []
    while left:
        step: list[Scheduled] = []
        new: dict[tuple[int, str, int], int] = {}  # ready since this timestep, with the device that computed the input
        for device in range(known):
            if any(ready[device].values()):
                other = "B" if turn[device] == "F" else "F"
                turn[device] = kind = other if ready[device][other] else turn[device]
                i = min(ready[device][kind])
                ready[device][kind].remove(i)
                step.append((device, kind, i, new.get((device, kind, i))))
                to, what = _next(P, device, kind)
                if to is not None:
                    ready[to][what].add(i)
                    new[to, what, i] = device
        known = max([known, *(to + 1 for to, _, _ in new)])
        left -= len(step)
        steps.append(tuple(step))
    return tuple(steps)


def _next(P: int, device: int, kind: str) -> tuple[int | None, str]:
    """The device and kind that become ready once `kind` has run on `device`."""
    if kind == "F":
        return (device + 1, "F") if device + 1 < P else (device, "B")
    return (device - 1 if device > 0 else None), "B"

"""One rank: it joins the process group, then does what comes as JSON lines on stdin and answers on stdout.

    {"do": "measure", "seconds": 20, "largest": 4e6}      {"collectives": [[axis, name, size, seconds]], "alone": ..., "device": ...}
    {"do": "load", "plan": "plan.pkl", "key": "a"}        {"loaded": ...}: a step of a plan, kept under a key; runs it twice, so that all
                                                          is warm; with "model": "mlp" through `autoshard.parallelize`, which overlaps
    {"do": "pipeline", "plan": "plan.pkl", "model": "mlp", "key": "a"}    {"loaded": ...}: a step of a pipeline, kept under a key
    {"do": "fully_shard", "model": "mlp", "way": "ahead"} {"groups": ...}: a step of torch's FSDP2, kept under the model and the way
    {"do": "steps", "count": 5, "key": "a"}               {"seconds": [...]}: of the slowest rank, step by step, after one more; or
                                                          "idle": of small collectives only
    {"do": "stop"}
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from plans import IDLE, MIDDLE_PIPELINES, MODELS, OTHERS, PIPELINED, SLOW, TINY_PIPELINES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.calibrate.measure import agree_on, buffer_of, measure
from autoshard.graph import Graph
from autoshard.lower import lower
from autoshard.lower.collectives import CollectiveCall, Groups
from autoshard.lower.run import run_rank
from autoshard.runtime.distribute import Where
from autoshard.solution import Solution

HOURS = datetime.timedelta(hours=2)  # a rank waits for its orders


class Rank:
    def __init__(self, rank: int, shape: tuple[int, ...], address: str):
        torch.set_num_threads(1)
        size = torch.Size(shape).numel()
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=HOURS)
        self.device_mesh: DeviceMesh = init_device_mesh("cpu", shape)
        self.whole: DeviceMesh = init_device_mesh("cpu", (size,))
        self.rank, self.agree = rank, agree_on(torch.device("cpu"))
        self.kept: dict[str, Callable[[], None]] = {}  # steps by their keys

    def measure(self, seconds: float, largest: float) -> dict:
        for _, _, found in measure(self.device_mesh, clock=time.perf_counter, seconds=seconds, largest=largest):
            last = found
        rows = [[axis, name, size, t] for (axis, name), times in last.collectives.items() for size, t in times.items()]
        alone = [[axis, size, t] for axis, times in last.alone.items() for size, t in times.items()]
        return {"collectives": rows, "alone": alone, "device": [vars(op) for op in last.device]}

    def transfers(self, sizes: list[int], count: int = 9) -> dict:
        """The median seconds in which every rank of the first node sends so many bytes to the one beside it on the second."""
        node, k = self.device_mesh.get_coordinate()
        beside = (1 - node) * self.device_mesh.shape[1] + k
        found = []
        for size in sizes:
            data, seconds = torch.ones(size // 4), []
            for _ in range(count):
                dist.barrier()
                began = time.perf_counter()
                dist.recv(data, beside) if node else dist.send(data, beside)
                seconds.append(self.agree(time.perf_counter() - began))
            found.append(statistics.median(seconds))
        return {"seconds": found}

    def load(self, plan: str, key: str, model: str = "") -> dict:
        """The step of a plan on this rank: forward and backward, then AdamW on the parameters."""
        with open(plan, "rb") as file:
            graph, solution = pickle.load(file)
        return self.keep(key, self.module_step(solution, model) if model else self.program_step(graph, solution))

    def keep(self, key: str, step: Callable[[], None]) -> dict:
        """Run it twice, so that all is warm."""
        self.kept[key] = step
        step()
        step()
        dist.barrier()
        return {"loaded": key}

    def program_step(self, graph: Graph, solution: Solution) -> Callable[[], None]:
        """The plan's program, record by record: its collectives one after the other, as they are priced."""
        program, where = lower(graph, solution.layouts, solution.results, solution.mesh), Where.on(solution.mesh, self.device_mesh)
        kinds = {op.name: op.kind for op in graph.ops}
        generator = torch.Generator().manual_seed(self.rank)
        values = {load.name: part(load.slot, kinds[load.name], generator) for load in program.loads}
        parameters = {name: value.requires_grad_() for name, value in values.items() if kinds[name] == "parameter"}
        optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-4, foreach=True)

        def step() -> None:
            with torch.no_grad():
                local = {name: value.detach() for name, value in values.items()}
                results = run_rank(program, local, where.groups, where.position, where.coordinate)
            for name, parameter in parameters.items():
                parameter.grad = results.get(f"gradient:{name}")
            optimizer.step()

        return step

    def module_step(self, solution: Solution, model: str) -> Callable[[], None]:
        """What a user runs: the model parallelized, loss.backward(), the optimizer."""
        module, inputs = {**MODELS, **OTHERS}[model]()
        sharded = autoshard.parallelize(module, solution, self.device_mesh)
        generator = torch.Generator().manual_seed(self.rank)
        with torch.no_grad():
            for parameter in sharded.parameters():
                local = parameter.to_local()
                local.copy_(0.02 * torch.randn(local.shape, generator=generator))
        given = [torch.zeros(x.shape, dtype=x.dtype) for x in inputs]
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            sharded(*given).backward()
            optimizer.step()

        return step

    def fully_shard(self, model: str, way: str) -> dict:
        """A step of torch's own FSDP2 on this rank's half of the batch, kept under the model and the way (fully_shard.py)."""
        module, inputs = MODELS[model]()
        blocks = [block for part in module.children() if isinstance(part, torch.nn.ModuleList) for block in part]
        if way != "alone":
            for part in (*blocks, module):
                fully_shard(part, mesh=self.whole)
        module.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(0.02 * torch.randn(local.shape))
        if way == "ahead":
            module._set_unshard_async_op(True)
            for one, following in zip((module, *blocks), blocks):
                one.set_modules_to_forward_prefetch([following])
        given = [torch.zeros((len(x) // 2, *x.shape[1:]), dtype=x.dtype) for x in inputs]
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            module(*given).backward()
            optimizer.step()

        self.kept[f"{model} {way}"] = step
        return {"groups": len(blocks) + 1}

    def pipeline(self, plan: str, model: str, key: str) -> dict:
        """A step of a pipeline through `autoshard.parallelize`, as a user runs it: all microbatches, then AdamW on each rank's stages.
        It is kept under the key."""
        with open(plan, "rb") as file:
            planned = pickle.load(file)
        module, inputs = {**PIPELINED, **TINY_PIPELINES, **MIDDLE_PIPELINES}[model](loss=True)
        generator = torch.Generator().manual_seed(0)
        module = module.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        given = [torch.zeros(x.shape, dtype=x.dtype) for x in inputs]
        sharded = autoshard.parallelize(module, planned, self.device_mesh, example_inputs=tuple(given))
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            sharded.step(*given)
            optimizer.step()

        return self.keep(key, step)

    def steps(self, count: int, key: str = "", idle: dict[str, int] | None = None) -> dict:
        """After one more, which isn't timed. idle: instead of a step so many collectives of each kind over the slow axis with IDLE floats
        in the largest buffer."""
        groups, n = Groups.of(self.device_mesh), self.device_mesh.shape[SLOW]
        small = {kind: buffer_of(kind, IDLE, n, torch.device("cpu")) for kind in idle or {}}
        asks = [CollectiveCall(kind, SLOW, small[kind]) for kind, calls in (idle or {}).items() for _ in range(calls)]
        seconds = []
        for _ in range(count + 1):
            dist.barrier()
            began = time.perf_counter()
            if idle is None:
                self.kept[key]()
            for ask in asks:
                groups.answer(ask)
            seconds.append(self.agree(time.perf_counter() - began))
        return {"seconds": seconds[1:]}


def part(slot, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Some values for what a rank holds of a placeholder: small weights, ids that every table has."""
    dtype = getattr(torch, slot.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(slot.shape, dtype=dtype)
    if kind == "tangent":
        return torch.ones(slot.shape, dtype=dtype)
    return 0.02 * torch.randn(slot.shape, generator=generator, dtype=dtype)


def main() -> None:
    rank, shape, address = int(sys.argv[1]), tuple(map(int, sys.argv[2].split("x"))), sys.argv[3]
    os.sched_setaffinity(0, set(map(int, sys.argv[4].split(","))))
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        worker = Rank(rank, shape, address)
        print(json.dumps({"ready": rank}), file=answers, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            what = job.pop("do")
            if what == "stop":
                break
            print(json.dumps(getattr(worker, what)(**job)), file=answers, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

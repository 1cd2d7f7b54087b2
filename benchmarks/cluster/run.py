"""Predicted and measured training steps on an emulated cluster of two nodes with two gloo ranks each.

    sudo .venv/bin/python benchmarks/cluster/run.py FOLDER [--speeds 20,50,100,200] [--models mlp,gpt2,llama] [--json] [--plot FILE.png]

For each speed of the link between the nodes: measures every collective on both mesh axes and the devices, makes prices of that (as
`autoshard calibrate measure` does) and of steps of three other models (`Steps`), which take turns with what is measured, plans each model
as data parallel, FSDP, Megatron (with and without sequence parallelism) and as autoshard would within Megatron's memory, runs every plan,
and counts the bytes that leave a node.

    --runner program        the plan's program, one collective after the other, as plans are priced
    --runner parallelize    what users run: `autoshard.parallelize`, collectives overlapped; the simulator predicts that, and
                            objective="overlapped" plans for it

FOLDER gets prices, rows and the ranks' logs; rows that are in it already are not measured again. Half an hour for two
speeds on two cores. Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import statistics
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
from judge import OURS, judged, plot, table  # noqa: E402
from network import Network, why_not  # noqa: E402
from plans import IDLE, MODELS, OTHERS, SLOW, Planned, graph_of, plans  # noqa: E402
from ranks import Ranks  # noqa: E402
from scipy.optimize import nnls  # noqa: E402

from autoshard.calibrate.cluster import cluster  # noqa: E402
from autoshard.calibrate.rates import OpSample  # noqa: E402
from autoshard.graph import Graph  # noqa: E402
from autoshard.mesh import Axis, Mesh  # noqa: E402
from autoshard.simulate.timeline import timeline_of_solution  # noqa: E402

PER_NODE = 2
WAIT = 1e-3  # seconds: any at which time lines are about affine in it
SLOWED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
LONGEST = 40.0  # seconds that the timed steps of one plan may take
ROUNDS, MOST = 3, 45  # in which they are run and their bytes counted; and steps of all of them: one of .15 s varies by a third


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured_mesh(ranks: Ranks, seconds: float, largest: float) -> Mesh:
    """The cluster's prices."""
    found = ranks.do("measure", seconds=seconds, largest=largest, timeout=20 * seconds + 60)
    times: dict = {}
    for axis, name, size, t in found["collectives"]:
        times.setdefault((axis, name), {})[size] = t
    samples = [OpSample(one["op"], one["dtype"], one["flops"], one["bytes"], one["seconds"]) for one in found["device"]]
    alone: dict = {}
    for axis, size, t in found["alone"]:
        alone.setdefault(axis, {})[size] = t
    record = cluster(
        ranks.shape, times, samples, backend="gloo", device="cpu", memory=4e9, complete=True, assumptions={"emulated": True}, alone=alone
    )
    return Mesh.from_dict(record["mesh"])


def changed(mesh: Mesh, launch: float, ratio: float = 1.0) -> Mesh:
    """With kernels that are launched in so many seconds and take so many times their roofline."""
    device = mesh.device
    rates = {name: getattr(device, name) / ratio for name in ("flops", "flops32", "memory_bandwidth")}
    return replace(mesh, device=replace(device, launch=launch, **rates))


@dataclass(frozen=True)
class Job:
    """A plan whose steps are timed. model: its name, to run it through `parallelize`."""

    planned: Planned
    graph: Graph
    model: str = ""
    counted: bool = False  # the bytes that its steps send


class Taken(NamedTuple):
    """Seconds of steps, one by one, and bytes of data that left a node in each."""

    seconds: list[float]
    sent: float


def raised(mesh: Mesh, wait: float) -> Mesh:
    """With collectives that take so many seconds more."""

    def of(axis: Axis) -> Axis:
        return replace(axis, curves=tuple(replace(one, seconds=tuple(s + wait for s in one.seconds)) for one in axis.curves))

    return replace(mesh, axes=tuple(map(of, mesh.axes)))


class Steps:
    """Prices within a step, from steps of models that are none of the cells.

    l, r   a step of n kernels whose rooflines take t seconds takes n l + r t where every rank takes all of it: l is what Python takes to
           launch one, r how much longer it takes within a step, beside the other ranks' and with its data in no cache, than alone
    w      seconds by which a collective takes longer within a step than where all ranks do nothing else: they aren't in step, and the
           cores do other work
    s      how much longer kernels and collectives take beside each other, of the shorter one, where they overlap: the cores that run
           kernels move the bytes, too. A step of a plan with collectives takes t + w g seconds: t those of its time line, g their slope

    All are those of the least relative squares, s of SLOWED.
    """

    def __init__(self, alone: Mesh, ranks: Ranks, folder: Path, runner: str):
        self.alone, self.overlaps, self.whole, self.sharded = alone, runner == "parallelize", {}, {}
        graphs = {name: (graph_of(build), name if self.overlaps else "") for name, build in OTHERS.items()}
        for name, job in graphs.items():
            (one,) = [one for one in plans(job[0], single(alone), time_limit=5.0) if one.name == "data_parallel"]
            self.whole[f"{name} whole"] = Job(replace(one, solution=replace(one.solution, mesh=alone)), *job)
        mesh = self.kernels(in_turns(ranks, self.whole, folder))
        for name, job in graphs.items():
            for one in plans(job[0], mesh, time_limit=5.0, overlaps=self.overlaps):
                if one.name in OURS:
                    self.sharded[f"{name} {one.name}"] = Job(one, *job)
        self.mesh = self.fitted(in_turns(ranks, self.jobs, folder))

    @property
    def jobs(self) -> dict[str, Job]:
        return self.whole | self.sharded

    def kernels(self, taken: Mapping[str, Taken]) -> Mesh:
        """With l and r."""
        rows = []
        for key, job in self.whole.items():
            n, took = sum(not op.is_placeholder and op.alias is None for op in job.graph.ops), statistics.median(taken[key].seconds)
            rows.append([n / took, (job.planned.seconds - n * self.alone.device.launch) / took])
        launch, ratio = (float(x) for x in nnls(np.array(rows), np.ones(len(rows)))[0])
        return changed(self.alone, max(launch, self.alone.device.launch), max(ratio, 1.0))

    def fitted(self, taken: Mapping[str, Taken]) -> Mesh:
        """With l, r, w and s."""
        kernels, found = self.kernels(taken), []
        took = np.array([statistics.median(taken[key].seconds) for key in self.sharded])
        for slowed in SLOWED if self.overlaps else (0.0,):
            mesh = replace(kernels, device=replace(kernels.device, slowed=slowed))
            t, later = (
                np.array([simulated(job, one, self.overlaps) for job in self.sharded.values()]) for one in (mesh, raised(mesh, WAIT))
            )
            slopes, missing = (later - t) / WAIT / took, 1 - t / took
            wait = max(0.0, float(slopes @ missing / (slopes @ slopes)))
            found.append((float(((missing - wait * slopes) ** 2).sum()), slowed, wait, mesh))
        _, slowed, wait, mesh = min(found, key=lambda one: one[0])
        say(f"{1e6 * mesh.device.launch:.0f} us to launch a kernel, {1e3 * wait:.2f} ms more for a collective, slowed by {slowed:g}")
        return raised(mesh, wait)


def simulated(job: Job, mesh: Mesh, overlaps: bool) -> float:
    """Seconds of its time line."""
    return timeline_of_solution(job.graph, job.planned.solution, mesh, overlap=overlaps, join=overlaps).seconds


def single(mesh: Mesh) -> Mesh:
    return Mesh(tuple(replace(axis, size=1, curves=()) for axis in mesh.axes), mesh.device)


def in_turns(ranks: Ranks, jobs: Mapping[str, Job], folder: Path) -> dict[str, Taken]:
    """What some steps of each job take. Bytes are less what measuring and gloo's own words take, which are what as many small collectives
    send beyond their data.

    They take turns, so that what else the machine does reaches all of them alike. Of the bytes the median of ROUNDS counts, as what TCP
    sends again is no data.
    """
    path = folder / "plan.pkl"
    for key, job in jobs.items():
        path.write_bytes(pickle.dumps((job.graph, job.planned.solution)))
        ranks.do("load", plan=str(path), model=job.model, key=key, timeout=600)
    seconds: dict[str, list[float]] = {key: [] for key in jobs}
    sent: dict[tuple[str, bool], list[float]] = {(key, idle): [] for key in jobs for idle in (False, True)}
    for _, (key, job), idle in itertools.product(range(ROUNDS), jobs.items(), (True, False)):
        if idle and not job.counted:
            continue
        count = int(min(MOST, max(ROUNDS, LONGEST / max(job.planned.seconds, 1e-3) / 4))) // ROUNDS
        before = ranks.network.bytes_sent()
        what = {"idle": job.planned.link_calls} if idle else {"key": key}
        found = ranks.do("steps", count=count, timeout=600, **what)["seconds"]
        sent[key, idle].append(statistics.mean(b - a for a, b in zip(before, ranks.network.bytes_sent())) / (count + 1))
        seconds[key] += found if not idle else []

    def data(key: str, job: Job) -> float:
        words = statistics.median(sent[key, True]) - idle_bytes(job.planned.link_calls, ranks.shape) if job.counted else 0.0
        return statistics.median(sent[key, False]) - words

    return {key: Taken(seconds[key], data(key, job)) for key, job in jobs.items()}


def idle_bytes(calls: Mapping[str, int], shape: tuple[int, ...]) -> float:
    """Of data that leaves a node in these collectives of IDLE floats: (n - 1)/n of the largest buffer per rank, twice in an all_reduce."""
    n = shape[SLOW]
    times = sum(count * (2 if collective == "all_reduce" else 1) for collective, count in calls.items())
    return times * 4 * IDLE * (n - 1) / n * math.prod(shape) / n


def cell(ranks: Ranks, name: str, graph: Graph, steps: Steps, megabits: float, options: argparse.Namespace) -> list[dict]:
    """The rows of a model: planned with the prices so far, predicted with those of the steps that take turns with its plans."""
    rows, overlaps = [], steps.overlaps  # which joins small collectives, too
    found = list(plans(graph, steps.mesh, time_limit=options.time_limit, overlaps=overlaps))
    jobs = {one.name: Job(one, graph, name if overlaps else "", counted=True) for one in found}
    taken = in_turns(ranks, jobs | steps.jobs, options.folder)
    mesh = steps.fitted(taken)
    (options.folder / f"mesh-{megabits:g}-{name}.json").write_text(json.dumps(mesh.to_dict(), indent=1))
    for one in found:
        seconds, sent = taken[one.name]
        rows.append(
            {
                "model": name,
                "megabits": megabits,
                "plan": one.name,
                "runner": options.runner,
                "predicted_seconds": simulated(jobs[one.name], mesh, False),
                "measured_seconds": statistics.median(seconds),
                "predicted_link_seconds": one.link_seconds,
                "simulated_seconds": simulated(jobs[one.name], mesh, overlaps),
                "predicted_bytes": one.link_bytes,
                "measured_bytes": sent,
                "peak_bytes": one.solution.peak_bytes,
                "all_measured_seconds": seconds,
            }
        )
        predicted, measured = rows[-1]["simulated_seconds"], rows[-1]["measured_seconds"]
        say(f"{name} at {megabits:g} Mbit/s, {one.name}: predicted {predicted:.3f} s, measured {measured:.3f} s")
    return rows


def parser_of(description: str | None, *, speeds: str, models: Collection[str]) -> argparse.ArgumentParser:
    """The words that every script here takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--speeds", default=speeds, help="megabits per second, each way")
    parser.add_argument("--models", default=",".join(models), help=f"some of {', '.join(models)}")
    parser.add_argument("--calibrate", type=float, default=60.0, help="seconds to measure collectives in, at each speed")
    parser.add_argument("--largest", type=float, default=2.0**22, help="bytes of the largest collective measured")
    parser.add_argument("--json", action="store_true", help="one object instead of text")
    return parser


def asked(parser: argparse.ArgumentParser, models: Collection[str]) -> tuple[argparse.Namespace, list[str], list[float]]:
    """What was given, with the models' names and the speeds as lists; the program ends where a model is unknown."""
    options = parser.parse_args()
    names, speeds = options.models.split(","), [float(speed) for speed in options.speeds.split(",")]
    if unknown := [name for name in names if name not in models]:
        parser.error(f"unknown model {unknown[0]!r}; known are {', '.join(models)}")
    return options, names, speeds


def main() -> int:
    parser = parser_of(__doc__, speeds="20,50,100,200", models=MODELS)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for the solver of each plan")
    parser.add_argument(
        "--runner", choices=("program", "parallelize"), default="program", help="collectives in turn, as priced, or overlapped"
    )
    parser.add_argument("--plot", help="draw predicted against measured seconds here")
    options, names, speeds = asked(parser, MODELS)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows_file = options.folder / f"rows-{options.runner}.json"
    rows = json.loads(rows_file.read_text()) if rows_file.exists() else []
    done = {(row["model"], row["megabits"]) for row in rows if row["plan"] == "ours"}
    missing = {speed: [name for name in names if (name, speed) not in done] for speed in speeds}
    if any(missing.values()):
        if why := why_not():
            say(f"benchmarks/cluster: {why}")
            return 2
        graphs = {name: graph_of(MODELS[name]) for name in names}
        with Network() as network:
            ranks = Ranks(network, PER_NODE, options.folder)
            for speed, wanted in missing.items():
                if not wanted:
                    continue
                say(f"measuring collectives at {speed:g} Mbit/s")
                network.limit(speed * 1e6 / 8)
                alone = measured_mesh(ranks, options.calibrate, options.largest)
                steps = Steps(alone, ranks, options.folder, options.runner)
                for name in wanted:
                    rows += cell(ranks, name, graphs[name], steps, speed, options)
                    rows_file.write_text(json.dumps(rows, indent=1))
            ranks.stop()
    found = judged(rows)
    if options.plot:
        plot(rows, options.plot)
    orders = "\n".join(f"{cell}: {order}" for cell, order in found["order"].items())
    figures = "\n".join(f"{name}: {value}" for name, value in found.items() if name != "order")
    print(json.dumps({"rows": rows, **found}) if options.json else "\n\n".join(filter(None, [table(rows), orders, figures])))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predicted and measured training steps on an emulated cluster of two nodes with two gloo ranks each.

    sudo .venv/bin/python benchmarks/cluster/run.py FOLDER [--speeds 20,50,100,200] [--models mlp,gpt2,llama] [--json] [--plot FILE.png]

For each speed of the link between the nodes: measures every collective on both mesh axes and the devices, makes prices of that (as
`autoshard calibrate measure` does), plans each model as data parallel, FSDP, Megatron (with and without sequence parallelism) and as
autoshard would within Megatron's memory, runs every plan, and counts the bytes that leave a node.

    --runner program        the plan's program, one collective after the other, as plans are priced
    --runner parallelize    what users run: `autoshard.parallelize`, collectives overlapped; the simulator predicts that, and
                            objective="overlapped" plans for it

FOLDER gets prices, rows and the ranks' logs; rows that are in it already are not measured again. A quarter of an hour for the
defaults on two cores. Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
from judge import judged, plot, table  # noqa: E402
from network import Network, why_not  # noqa: E402
from plans import IDLE, MODELS, OTHERS, SLOW, Planned, graph_of, plans  # noqa: E402
from ranks import Ranks  # noqa: E402
from scipy.optimize import nnls  # noqa: E402

from autoshard.calibrate.cluster import cluster  # noqa: E402
from autoshard.calibrate.rates import OpSample  # noqa: E402
from autoshard.graph import Graph  # noqa: E402
from autoshard.mesh import Mesh  # noqa: E402
from autoshard.simulate.timeline import timeline_of_solution  # noqa: E402

PER_NODE = 2
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


def with_kernels(mesh: Mesh, graphs: Mapping[str, Graph], seconds: Callable[[str, Planned], float]) -> Mesh:
    """With kernels as steps of models of one device show them that are none of the cells. A step of n kernels whose rooflines take t
    seconds takes n l + r t: l is what Python takes to launch one, r how much longer it takes within a step, beside the other ranks' and
    with its data in no cache, than alone. Both are those of the least relative squares. seconds: of a plan's step.
    """
    rows = []
    for name, graph in graphs.items():
        (alone,) = [one for one in plans(graph, single(mesh), time_limit=5.0) if one.name == "data_parallel"]
        n, took = sum(not op.is_placeholder and op.alias is None for op in graph.ops), seconds(name, alone)
        rows.append([n / took, (alone.seconds - n * mesh.device.launch) / took])
    launch, ratio = (float(x) for x in nnls(np.array(rows), np.ones(len(rows)))[0])
    return changed(mesh, max(launch, mesh.device.launch), max(ratio, 1.0))


def within_steps(mesh: Mesh, ranks: Ranks, folder: Path, runner: str = "program") -> Mesh:
    """With what a kernel costs within the step of a rank, to launch and to run, by the runner whose steps are predicted."""
    graphs = {name: graph_of(build) for name, build in OTHERS.items()}

    def seconds(name: str, one: Planned) -> float:
        return statistics.median(timed(ranks, replace_mesh(one, mesh), graphs[name], folder, name if runner == "parallelize" else "")[0])

    return with_kernels(mesh, graphs, seconds)


def single(mesh: Mesh) -> Mesh:
    return Mesh(tuple(replace(axis, size=1, curves=()) for axis in mesh.axes), mesh.device)


def replace_mesh(one: Planned, mesh: Mesh) -> Planned:
    """The plan of one device, on all devices: everything is whole."""
    return replace(one, solution=replace(one.solution, mesh=mesh))


def timed(ranks: Ranks, one: Planned, graph: Graph, folder: Path, model: str = "") -> tuple[list[float], float]:
    """Seconds of some steps, and bytes of data that left a node in each: less what measuring and gloo's own words take, which are what as
    many small collectives send beyond their data.

    Of both the median of ROUNDS counts, as what TCP sends again is no data. model: its name, to run it through `parallelize`.
    """
    path = folder / "plan.pkl"
    path.write_bytes(pickle.dumps((graph, one.solution)))
    ranks.do("load", plan=str(path), model=model, timeout=600)
    count = int(min(MOST, max(ROUNDS, LONGEST / max(one.seconds, 1e-3) / 4))) // ROUNDS
    seconds: list[float] = []

    def sent(**job: dict[str, int]) -> float:
        before = ranks.network.bytes_sent()
        found = ranks.do("steps", count=count, timeout=600, **job)["seconds"]
        seconds.extend(found if not job else [])
        return statistics.mean(b - a for a, b in zip(before, ranks.network.bytes_sent())) / count

    words = statistics.median(sent(idle=one.link_calls) for _ in range(ROUNDS)) - idle_bytes(one.link_calls, ranks.shape)
    return seconds, statistics.median([sent() for _ in range(ROUNDS)]) - words


def idle_bytes(calls: Mapping[str, int], shape: tuple[int, ...]) -> float:
    """Of data that leaves a node in these collectives of IDLE floats: (n - 1)/n of the largest buffer per rank, twice in an all_reduce."""
    n = shape[SLOW]
    times = sum(count * (2 if collective == "all_reduce" else 1) for collective, count in calls.items())
    return times * 4 * IDLE * (n - 1) / n * math.prod(shape) / n


def cell(ranks: Ranks, name: str, graph: Graph, mesh: Mesh, megabits: float, options: argparse.Namespace) -> list[dict]:
    rows, overlaps = [], options.runner == "parallelize"  # which joins small collectives, too
    for one in plans(graph, mesh, time_limit=options.time_limit, overlaps=overlaps):
        seconds, sent = timed(ranks, one, graph, options.folder, name if options.runner == "parallelize" else "")
        rows.append(
            {
                "model": name,
                "megabits": megabits,
                "plan": one.name,
                "runner": options.runner,
                "predicted_seconds": one.seconds,
                "measured_seconds": statistics.median(seconds),
                "predicted_link_seconds": one.link_seconds,
                "simulated_seconds": timeline_of_solution(graph, one.solution, mesh, overlap=overlaps, join=overlaps).seconds,
                "predicted_bytes": one.link_bytes,
                "measured_bytes": sent,
                "peak_bytes": one.solution.peak_bytes,
                "all_measured_seconds": seconds,
            }
        )
        say(f"{name} at {megabits:g} Mbit/s, {one.name}: predicted {one.seconds:.3f} s, measured {rows[-1]['measured_seconds']:.3f} s")
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
                for name in wanted:  # measured again beside each: what else the machine does changes what kernels take
                    mesh = within_steps(alone, ranks, options.folder, options.runner)
                    (options.folder / f"mesh-{speed:g}-{name}.json").write_text(json.dumps(mesh.to_dict(), indent=1))
                    rows += cell(ranks, name, graphs[name], mesh, speed, options)
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

"""A step of a parallel module beside DTensor's interpreter and hand-written FSDP2; its memory beside the plan's figure.

    python benchmarks/parallelize.py TEXT [--steps 20] [--sizes 2x64x8x16,4x256x16x128] [--only speed|memory] [--json]

TEXT: any file, its bytes are the tokens. Four gloo ranks on this machine, no limit on the link.

speed     GPT-2 (layers x width x batch x sequence length) in the FSDP layout: parameters and batch cut over 4.
          ours: autoshard.parallelize with the `fsdp` baseline's plan. fsdp2: fully_shard on every block and the whole. They take
          turns, step by step, in the same processes, with the same weights and batches; a step is forward, backward and AdamW
          (`step`), or without the optimizer (`pass`). interpreter: every op of the same plan on DTensors, with a redistribute where
          layouts differ; forward and backward only. `pass_cpu`: CPU seconds of one rank, which other work disturbs less.
          The first size is the tests' tiny GPT-2; at the second, the same kernels are almost half of what the interpreter takes.
memory    Tiny models on 2x2, our plan. measured: parameters, gradients and optimizer state, and on top of them the largest
          sum of live allocations that torch's CPU allocator reports during a step; the largest rank. predicted: the plan's peak.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard.capture import capture
from autoshard.graph import replace_refs
from autoshard.lower import lower
from autoshard.lower.literals import by_name, overload, torch_constants
from autoshard.lower.program import LoadPlaceholder, Redistribute, ReturnResult, RunOp
from autoshard.lower.unsharded import materialized
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.plan import baseline_only
from autoshard.planning.question import ModelGraphs, Question
from models import bert, gpt2, llama

WORLD = 4
# as measured between processes of one machine: tens of microseconds, about 2 GB/s; only the order of collectives depends on it
GLOO = {"intra_node_bandwidth": 2e9, "inter_node_bandwidth": 2e9, "intra_node_latency": 5e-5, "inter_node_latency": 5e-5}


def gloo_mesh(shape: tuple[int, ...]) -> autoshard.Mesh:
    return autoshard.Mesh.from_bandwidths(shape, device="cpu", backend="gloo", **GLOO)


def batches(text: bytes, rows: int, length: int, vocab: int):
    """Endless tokens and the ones that follow."""
    generator = torch.Generator().manual_seed(0)
    while True:
        begins = torch.randint(0, len(text) - length - 1, (rows,), generator=generator)
        windows = torch.tensor([list(text[b : b + length + 1]) for b in begins.tolist()]) % vocab
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# -- speed -----------------------------------------------------------------------------------------------------------------------


class Interpreter:
    """The plan op by op on DTensors."""

    def __init__(self, graph, program, device_mesh):
        self.graph, self.program, self.device_mesh, self.local = graph, program, device_mesh, set()

    def run(self, values: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        held, results = {}, {}
        for record in self.program.records:
            match record:
                case LoadPlaceholder():
                    held[record.slot.name] = values[record.name]
                case Redistribute():
                    held[record.target.name] = held[record.source.name].redistribute(placements=list(record.target.layout))
                case RunOp():
                    self._op(record, held)
                case ReturnResult():
                    results[record.key] = held[record.slot.name]
        return results

    def _op(self, record: RunOp, held: dict) -> None:
        op = self.graph.ops[record.op]
        inputs = tuple(held[slot.name] for slot in record.inputs)
        function = overload(op.target)
        if record.op not in self.local and inputs:
            try:
                arguments = {name: replace_refs(torch_constants(v, "cpu"), inputs) for name, v in by_name(op).items()}
                made = function(**arguments)
                made = tuple(made) if isinstance(made, (tuple, list)) else (made,)
                for k, slot in enumerate(record.outputs):
                    if slot is not None:
                        as_planned = tuple(made[k].placements) == slot.layout
                        held[slot.name] = made[k] if as_planned else made[k].redistribute(placements=list(slot.layout))
                return
            except (NotImplementedError, RuntimeError, AssertionError, ValueError, TypeError, AttributeError):
                self.local.add(record.op)  # no rule, or another layout than planned: on local tensors, which is quicker
        parts = [x.to_local().contiguous() for x in inputs]
        target = overload(record.target)
        made = target(**{name: replace_refs(v, tuple(parts)) for name, v in record.arguments.items()})
        made = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        for k, slot in enumerate(record.outputs):
            if slot is not None:
                held[slot.name] = DTensor.from_local(made[k], self.device_mesh, list(slot.layout), run_check=False)


def speed(rank: int, options: argparse.Namespace, solution, text: bytes) -> dict:
    device_mesh = init_device_mesh("cpu", (WORLD,))
    build = gpt2_of(options)
    inputs = batches(text, options.batch, options.seq, 256)
    ours = autoshard.parallelize(materialized(build()[0], 0), solution, device_mesh)
    theirs = materialized(build()[0], 0)
    for block in theirs.h:
        fully_shard(block, mesh=device_mesh, reshard_after_forward=options.reshard)
    fully_shard(theirs, mesh=device_mesh, reshard_after_forward=options.reshard)
    runs = {"ours": (ours, lambda x: x), "fsdp2": (theirs, lambda x: x.chunk(WORLD)[rank])}
    optimizers = {name: torch.optim.AdamW(module.parameters(), lr=1e-3) for name, (module, _) in runs.items()}
    passes: dict[str, list[float]] = {name: [] for name in runs}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(options.steps + 3):
        x, y = next(inputs)
        order = list(runs) if k % 2 else list(runs)[::-1]
        for name in order:
            module, part = runs[name]
            given = part(x), part(y)
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            loss = module(*given)
            loss.backward()
            worked = time.process_time() - worked
            dist.barrier()
            passed = time.perf_counter()
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.barrier()
            ended = time.perf_counter()
            total = loss.detach().clone()
            if name == "fsdp2":
                dist.all_reduce(total)
                total /= WORLD
            if k >= 3:
                passes[name].append(passed - began)
                cpu[name].append(worked)
                steps[name].append(ended - began)
                losses[name].append(total.item())
    timed = {"pass": passes, "step": steps, "pass_cpu": cpu}
    found = {name: {what: statistics.median(took[name]) for what, took in timed.items()} for name in runs}
    found["loss_gap"] = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["fsdp2"]))
    found["interpreter"] = interpreted(options, solution, device_mesh, next(inputs))
    found["timeline"] = ours.timeline()
    return found


def interpreted(options, solution, device_mesh, given) -> dict:
    module, example = gpt2_of(options)()
    graph = capture(module, example, training=True)
    program = lower(graph, solution.layouts, solution.results, solution.mesh)
    whole = dict(materialized(module, 0).named_parameters()) | {"input_0": given[0], "input_1": given[1], "tangent_0": torch.ones(())}
    values = {}
    for load in program.loads:
        x = whole[load.name].detach()
        values[load.name] = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False).redistribute(
            placements=list(load.slot.layout)
        )
    interpreter, took, worked = Interpreter(graph, program, device_mesh), [], []
    with torch.no_grad():
        interpreter.run(values)
        for _ in range(max(3, options.steps // 4)):
            dist.barrier()
            began, begun = time.perf_counter(), time.process_time()
            interpreter.run(values)
            worked.append(time.process_time() - begun)
            dist.barrier()
            took.append(time.perf_counter() - began)
    return {"pass": statistics.median(took), "pass_cpu": statistics.median(worked)}


def gpt2_of(options):
    def build():
        return gpt2.build(
            layers=options.layers, heads=8, width=options.width, positions=options.seq, vocab=256, batch=options.batch, seq=options.seq,
            loss=True, dtype="float32",
        )  # fmt: skip

    return build


def compared(size: str, options: argparse.Namespace, text: bytes) -> dict:
    """The slowest rank's medians at one size, and what they say."""
    options.layers, options.width, options.batch, options.seq = map(int, size.split("x"))
    graph = capture(*gpt2_of(options)(), training=True)
    plan = baseline_only(Question(ModelGraphs(graph), gloo_mesh((WORLD,)), Options(training=True), Stopwatch(None)), "fsdp")
    ranks = on_ranks(speed, options, plan, text)
    slowest = {k: {w: max(r[k][w] for r in ranks) for w in ranks[0][k]} for k in ("ours", "fsdp2", "interpreter")}
    found = {
        "seconds": slowest,
        "interpreter_over_ours": {w: slowest["interpreter"][w] / slowest["ours"][w] for w in slowest["interpreter"]},
        "overhead_over_fsdp2": {w: slowest["ours"][w] / slowest["fsdp2"][w] - 1 for w in ("pass", "step")},
        "loss_gap": ranks[0]["loss_gap"],
        "parameters": dict(list({n: row["layout"] for n, row in plan.parameters.items()}.items())[:4]),
    }
    if not options.json:
        print(f"GPT-2 {size}", ranks[0]["timeline"], sep="\n")
        for name, row in slowest.items():
            print(f"{name:12} " + "  ".join(f"{what} {seconds * 1e3:9.2f} ms" for what, seconds in row.items()))
        over = {w: f"{x:+.1%}" for w, x in found["overhead_over_fsdp2"].items()}
        ratio = {w: f"{x:.1f}" for w, x in found["interpreter_over_ours"].items()}
        print(f"interpreter / ours {ratio}, overhead over FSDP2 {over}, losses differ by {found['loss_gap']:.1e}")
    return found


# -- memory ----------------------------------------------------------------------------------------------------------------------


def memory_models(options):
    sizes = {"batch": 32, "seq": 64}
    return {
        "gpt2": lambda: gpt2.tiny(vocab=256, layers=4, **sizes),
        "llama": lambda: llama.tiny(vocab=256, layers=4, **sizes),
        "bert": lambda: bert.tiny(**sizes),
    }


def memory(rank: int, options: argparse.Namespace, solutions: dict, text: bytes) -> dict:
    return {name: peak_of(memory_models(options)[name], solution, text) for name, solution in solutions.items()}


def peak_of(build, solution, text: bytes) -> dict:
    """Bytes of this rank, in the third step."""
    module, example = build()
    sharded = autoshard.parallelize(materialized(module, 0), solution, init_device_mesh("cpu", solution.mesh.shape))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, foreach=False)
    inputs = batches(text, *example[0].shape, 64)

    def step():
        tokens, following = next(inputs)
        sharded(*((tokens, following) if len(example) == 2 else (tokens, tokens % 2, following))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    held = sum(p.to_local().numel() * p.element_size() for p in sharded.parameters())
    states = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, DTensor)]
    held += sum(s.to_local().numel() * s.element_size() for s in states)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return {"measured": held + peak, "predicted": solution.peak_bytes}


# -- together --------------------------------------------------------------------------------------------------------------------


def on_ranks(work, *args) -> list:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(folder, work, args), nprocs=WORLD, start_method="fork")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(WORLD)]


def _rank(rank: int, folder: str, work, args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(f"{folder}/store", WORLD))
    torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sizes", default="2x64x8x16,4x256x16x128", help="layers x width x batch x sequence length, of each GPT-2")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True, help="FSDP2 gathers again for the backward pass")
    parser.add_argument("--only", choices=("speed", "memory"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text, report = options.text.read_bytes(), {}
    if options.only != "memory":
        report["speed"] = {size: compared(size, options, text) for size in options.sizes.split(",")}
    if options.only != "speed":
        models = memory_models(options)
        plans = {name: autoshard.plan(*build(), gloo_mesh((2, 2)), training=True, baselines=False) for name, build in models.items()}
        ranks = on_ranks(memory, options, plans, text)
        report["memory"] = {n: {**row, "measured": max(r[n]["measured"] for r in ranks)} for n, row in ranks[0].items()}
        for name, row in report["memory"].items():
            row["error"] = row["predicted"] / row["measured"] - 1
            if not options.json:
                print(f"{name:8} measured {row['measured'] / 1e6:9.3f} MB  predicted {row['predicted'] / 1e6:9.3f} MB  {row['error']:+.1%}")
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()

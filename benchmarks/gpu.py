"""What one GPU says about autoshard's graphs, numbers, prices and memory: seven parts, the most valuable first; 45 minutes at most.

    python benchmarks/gpu.py [--stand-in] [--only PART ...] [--again] [--out build/gpu]

captures    is the graph that is captured from CUDA tensors the one that is captured here?                 fake_cuda.py --real
verify      plans of these models on one GPU against the unsharded module, forward, backward, bfloat16     autoshard.verify
kernels     matmul, attention, pointwise, normalisation and optimizer: measured over priced seconds
steps       a training step: seconds and peak, eager and compiled, over the predicted ones
allocator   bytes that the allocator reserves over those predicted and those allocated; and its simulation over what is recorded
ranks       ranks of gloo that share the GPU train as one process does: CUDA tensors, streams
launch      seconds in which the host launches a kernel, eager and from a compiled graph

Each part is a process of its own, ends after 9 minutes at most, and writes OUT/PART.json; one that is there is not run again. OUT/gpu.json
has all of them, OUT/gpu.md is a page for docs/gpu.md. --stand-in: the CPU and small sizes in place of the GPU, to try every part.
"""

# ruff: noqa: E402  (this folder must not hide packages)
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"]
sys.path.insert(0, str(ROOT))

import torch

PART_SECONDS, ALL_SECONDS = 540, 45 * 60
# links so fast that tiny models are sharded
FAST = {"intra_node_bandwidth": 1e14, "inter_node_bandwidth": 1e14, "intra_node_latency": 1e-9, "inter_node_latency": 1e-9}
MODELS = ("gpt2", "llama", "bert", "mlp", "moe", "resnet", "unet")
HF = ("beit", "convnext", "deberta_v2", "detr", "fnet", "gemma3", "mamba", "swin", "vit", "wav2vec2", "whisper", "xlnet")


class Device:
    """The GPU, or the CPU in its place."""

    def __init__(self, stand_in: bool):
        self.stand_in, self.name = stand_in, "cpu" if stand_in else "cuda"

    def wait(self) -> None:
        if not self.stand_in:
            torch.cuda.synchronize()

    def peak(self) -> dict[str, int]:
        """Bytes since `forget`; none on the CPU, whose allocator doesn't count."""
        if self.stand_in:
            return {"allocated": 0, "reserved": 0}
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def forget(self) -> None:
        if not self.stand_in:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, run, repeats: int = 10) -> float:
        """Median seconds of a call, after two that are not counted."""
        times = []
        for k in range(repeats + 2):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            times += [time.perf_counter() - begin] if k > 1 else []
        return statistics.median(times)

    def mesh(self):
        """One device at its own prices, where there are some."""
        import autoshard
        from autoshard.mesh import DEVICES

        named = "cpu" if self.stand_in else torch.cuda.get_device_name().lower()
        kind = next((name for name in DEVICES if name in named), "h100")
        return autoshard.Mesh.from_bandwidths((1,), device=kind)


def attempted(row: dict, run, *args) -> dict:
    """The row with what `run` adds, or with what went wrong: a part goes on after a row that fails."""
    try:
        return row | {"ok": True} | run(*args)
    except Exception as error:
        return row | {"ok": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}


def captures(device: Device) -> list[dict]:
    from benchmarks import coverage, fake_cuda

    rows = []
    for name in MODELS[:2] + MODELS[4:5] if device.stand_in else (*MODELS, *HF):
        for training in coverage.modes(name):
            rows.append(fake_cuda.compared(name, training, device.name, real=True))
            rows[-1]["ok"] = rows[-1]["equal"] is not False
    return rows


def verify(device: Device) -> list[dict]:
    import autoshard
    from benchmarks import fake_cuda

    def run(name: str, precision: str | None) -> dict:
        module, inputs = fake_cuda.built(name, True)
        mesh = autoshard.Mesh.from_bandwidths((2, 2), **FAST)
        solution = autoshard.plan(module, inputs, mesh, training=True, baselines=False, precision=precision)
        found = autoshard.verify(module, inputs, solution, device=device.name, random=1)
        worst = max(max(p["max_relative_error_outputs"], p["max_relative_error_gradients"]) for p in found["plans"])
        return {"ok": found["ok"], "worst_error": worst}

    names = MODELS[:1] if device.stand_in else (*MODELS, *HF)
    return [
        attempted({"model": name, "precision": precision or "float32"}, run, name, precision)
        for name in names for precision in (None, "bf16")
    ]  # fmt: skip


def kernels(device: Device) -> list[dict]:
    from autoshard.cost.compute import op_seconds

    where, price = device.name, device.mesh().device

    def measured(target: str, run, inputs, outputs) -> dict:
        described = [[(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in ts] for ts in (inputs, outputs)]
        priced, eager = op_seconds(target, *described, None, price), device.seconds(run)
        return {"eager_seconds": eager, "priced_seconds": priced, "ratio": eager / priced if priced else None}

    def group(a, b) -> dict:
        def pointwise():
            return torch.tanh(torch.nn.functional.gelu(a * b + a)) * b

        return {"eager_seconds": device.seconds(pointwise), "compiled_seconds": device.seconds(torch.compile(pointwise))}

    size, rows = (256,) if device.stand_in else (1024, 4096, 8192), []
    for n in size:
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.randn(n, n, device=where, dtype=dtype), torch.randn(n, n, device=where, dtype=dtype)
            q = torch.randn(2, 16, n // 4, 128, device=where, dtype=dtype)
            cases = {
                "aten.mm.default": (lambda a=a, b=b: a @ b, [a, b], [a]),
                "aten.gelu.default": (lambda a=a: torch.nn.functional.gelu(a), [a], [a]),
                "aten.add.Tensor": (lambda a=a, b=b: a + b, [a, b], [a]),
                "aten._softmax.default": (lambda a=a: torch.softmax(a, -1), [a], [a]),
                "aten._scaled_dot_product_flash_attention.default": (
                    lambda q=q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), [q, q, q], [q],
                ),
            }  # fmt: skip
            for target, case in cases.items():
                rows.append(attempted({"op": target, "dtype": str(dtype), "n": n}, measured, target, *case))
            rows.append(attempted({"op": "a group of pointwise ops", "dtype": str(dtype), "n": n}, group, a, b))
    weight = torch.nn.Parameter(torch.randn(size[-1], size[-1], device=where))
    weight.grad = torch.randn_like(weight)
    for options in ({"foreach": True}, {"fused": True}):
        step = torch.optim.AdamW([weight], **options).step
        rows.append(attempted({"op": f"AdamW {options}", "n": weight.numel()}, lambda run: {"eager_seconds": device.seconds(run)}, step))
    return rows


def vit(*, batch: int = 32, layers: int = 12, width: int = 768, loss: bool = True):
    """A vision transformer of transformers, with its loss."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 16 if width < 64 else width // 64, num_labels=1000
    )
    with torch.device("meta"):
        pixels, labels = torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)
        return ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}


STEPS = {  # file:function and settings; small ones for the stand-in
    "GPT-2 small": ("models/gpt2.py:small", {"batch": 8, "seq": 512}, ("models/gpt2.py:tiny", {})),
    "Llama-3 8B, 4 layers": (
        "models/llama.py:llama3_8b", {"layers": 4, "batch": 1, "seq": 2048, "loss": True}, ("models/llama.py:tiny", {"loss": True}),
    ),
    "ViT-Base": ("vit", {}, ("vit", {"layers": 1, "batch": 2, "width": 32})),
    "a mixture of experts": ("models/moe.py:moe", {}, ("models/moe.py:tiny", {})),
}  # fmt: skip


def step_of(device: Device, name: str):
    """The parallel module of a one-device plan, its inputs, its optimizer, and the plan."""
    import torch.distributed as dist

    import autoshard
    from autoshard.cli.model import load_model
    from autoshard.lower.unsharded import materialized

    large, settings, small = STEPS[name]
    path, options = small if device.stand_in else (large, settings)
    module, inputs = vit(**options) if path == "vit" else load_model(f"{ROOT}/{path}", options)
    solution = autoshard.plan(module, inputs, device.mesh(), training=True, baselines=False)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = materialized(module, 0)
    model = autoshard.parallelize(values, solution, torch.distributed.device_mesh.init_device_mesh(device.name, (1,)))
    del values
    generator = torch.Generator().manual_seed(0)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        value = torch.randn(x.shape, generator=generator) if x.is_floating_point() else torch.zeros(x.shape)
        return value.to(device.name, x.dtype)

    drawn_inputs = {name: drawn(x) for name, x in inputs.items()} if isinstance(inputs, dict) else tuple(map(drawn, inputs))
    return model, drawn_inputs, torch.optim.AdamW(model.parameters(), fused=True), solution


def one_step(model, inputs, optimizer) -> None:
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(device: Device) -> list[dict]:
    def run(name: str, compiled: bool) -> dict:
        device.forget()
        model, inputs, optimizer, solution = step_of(device, name)
        if compiled:
            model.compile()
        seconds = device.seconds(lambda: one_step(model, inputs, optimizer), 5)
        predicted = {"predicted_seconds": solution.cost, "predicted_bytes": solution.peak_bytes}
        return {"seconds": seconds, **device.peak(), **predicted, "ratio": seconds / solution.cost if solution.cost else None}

    return [attempted({"model": name, "compiled": c}, run, name, c) for name in STEPS for c in (False, True)]


def allocator(device: Device) -> list[dict]:
    def run(name: str) -> dict:
        device.forget()
        if not device.stand_in:
            torch.cuda.memory._record_memory_history(max_entries=10**6, stacks="python")
        model, inputs, optimizer, solution = step_of(device, name)
        for _ in range(3):
            one_step(model, inputs, optimizer)
        peak, predicted = device.peak(), solution.peak_bytes
        ratios = {"reserved_over_allocated": peak["reserved"] / max(peak["allocated"], 1)}
        return {
            **peak, "predicted_bytes": predicted, **ratios, "allocated_over_predicted": peak["allocated"] / predicted,
            **({} if device.stand_in else simulated(peak["reserved"])),
        }  # fmt: skip

    return [attempted({"model": name}, run, name) for name in list(STEPS)[:2]]


def simulated(reserved: int) -> dict:
    """The recorded allocations, given to the simulation: its peak over the one that was measured. It holds where it is within 1 %."""
    from autoshard.cost import replayed

    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    ours, recorded = replayed(snapshot, torch.cuda.current_device())
    ratio = ours.peak_reserved / max(recorded, 1)
    ratios = {"simulated_over_recorded": ratio, "recorded_over_reserved": recorded / reserved}
    return {"ok": abs(ratio - 1) < 0.01, "recorded": recorded, **ratios}


def ranks(device: Device) -> list[dict]:
    import tempfile

    import torch.multiprocessing as mp

    def run() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, args=(folder, device.name), nprocs=2, start_method="spawn")
            losses = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
            mp.start_processes(_rank, args=(folder, device.name, 1), nprocs=1, start_method="spawn")
            alone = torch.load(Path(folder) / "0.pt")
        error = max(abs(x - y) / abs(y) for one in losses for x, y in zip(one, alone, strict=True))
        return {"ok": error < 1e-4, "worst_error": error, "losses": alone}

    return [attempted({"model": "gpt2 tiny", "ranks": 2, "backend": "gloo"}, run)]


def _rank(rank: int, folder: str, device: str, world: int = 2) -> None:
    import torch.distributed as dist

    import autoshard
    from autoshard.lower.unsharded import materialized
    from models import gpt2

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world)
    module, inputs = gpt2.tiny()
    mesh = autoshard.Mesh.from_bandwidths((world,), **FAST)
    solution = autoshard.plan(module, inputs, mesh, training=True, baselines=False)
    device_mesh = torch.distributed.device_mesh.init_device_mesh(device, (world,), backend_override={0: "gloo"})
    model = autoshard.parallelize(materialized(module, 0), solution, device_mesh)
    optimizer, generator, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1), []
    for _ in range(3):
        given = [torch.randint(0, 100, x.shape, generator=generator).to(device) for x in inputs]
        loss = model(*given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()))
    torch.save(losses, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def launch(device: Device) -> list[dict]:
    x = torch.zeros(1, device=device.name)

    def many() -> None:
        for _ in range(1000):
            x.add_(1)

    compiled = torch.compile(lambda y: y * 2 + 1)
    return [
        attempted({"what": "an op in place, eager"}, lambda: {"seconds": device.seconds(many) / 1000}),
        attempted({"what": "a compiled call of one kernel"}, lambda: {"seconds": device.seconds(lambda: compiled(x), 100)}),
    ]


PARTS = {part.__name__: part for part in (captures, verify, kernels, steps, allocator, ranks, launch)}


def run_part(name: str, stand_in: bool, path: Path) -> None:
    """In this process: the part's rows, into a file."""
    device = Device(stand_in)
    begin = time.perf_counter()
    rows = PARTS[name](device)
    title = "CPU, in place of a GPU" if stand_in else torch.cuda.get_device_name()
    record = {"part": name, "device": title, "torch": torch.__version__, "seconds": time.perf_counter() - begin, "rows": rows}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, default=str))
    temporary.rename(path)


def page(records: list[dict]) -> str:
    """For docs/gpu.md."""
    lines = ["# Measured on one GPU", ""]
    for record in records:
        bad = [row for row in record["rows"] if not row.get("ok")]
        lines += [f"## {record['part']}", "", f"{record['device']}, torch {record['torch']}, {record['seconds']:.0f} s: "]
        lines[-1] += f"{len(record['rows']) - len(bad)} of {len(record['rows'])} rows hold."
        keys = list(dict.fromkeys(key for row in record["rows"] for key in row if key != "ok"))
        lines += ["", f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
        lines += [f"| {' | '.join(shown(row.get(key)) for key in keys)} |" for row in record["rows"]]
        lines.append("")
    return "\n".join(lines)


def shown(value) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", action="store_true", help="run parts that are there")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.stand_in and not torch.cuda.is_available():
        sys.exit("no GPU is visible to this torch; --stand-in tries every part on the CPU")
    if given.here:
        run_part(given.here, given.stand_in, given.out / f"{given.here}.json")
        return 0
    begin = time.monotonic()
    for name in given.only:
        left = ALL_SECONDS - (time.monotonic() - begin)
        if left < 60 or ((given.out / f"{name}.json").exists() and not given.again):
            print(f"{name}: {'no time is left; start again for it' if left < 60 else 'is there'}", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--here", name, "--out", str(given.out), *(["--stand-in"] if given.stand_in else [])]
        try:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=False, timeout=min(PART_SECONDS, left), env=environment)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {min(PART_SECONDS, left):.0f} s", file=sys.stderr)
    records = [json.loads(path.read_text()) for name in PARTS if (path := given.out / f"{name}.json").exists()]
    (given.out / "gpu.json").write_text(json.dumps(records, indent=1))
    (given.out / "gpu.md").write_text(page(records) + "\n")
    failed = [(record["part"], row) for record in records for row in record["rows"] if not row.get("ok")]
    for part, row in failed:
        print(part, row)
    print(f"{len(records)} of {len(PARTS)} parts are in {given.out / 'gpu.json'}; {len(failed)} rows don't hold")
    return int(len(records) < len(PARTS) or bool(failed))


if __name__ == "__main__":
    sys.exit(main())

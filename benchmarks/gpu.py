"""What one GPU says about autoshard's graphs, numbers, prices and memory: thirteen parts, the most valuable first; 45 minutes at most.

    python benchmarks/gpu.py [--stand-in] [--only PART ...] [--again] [--out build/gpu]
    python benchmarks/gpu.py --plans h100 h200 [--out build/gpu]

verify      plans of these models, all ranks on one GPU, against the unsharded module: forward, backward, bfloat16   autoshard.verify
captures    is the graph that is captured from CUDA tensors the one that is captured here?                           fake_cuda.py --real
fits        training as torchtitan does it on one GPU: the three figures of memory and the seconds beside those of autoshard.fits
profiles    kernels of such steps by class, by plan and by torch alone, and what the host takes to launch them
steps       a training step by plan and by torch alone, eager and compiled: seconds and peak beside the predicted ones
allocator   the simulation of the caching allocator beside what is recorded, under four settings
kernels     matmul, attention, pointwise, normalisation, optimizer beside their prices; OUT/kernels/*.csv are for benchmarks/kernels.py
links       copies between host and GPU, alone and beside matmuls; bytes of contexts, workspaces and communicators
launch      seconds in which the host launches a kernel, eager and from a compiled graph
one_rank    a rank of plans for several devices, its collectives made up (one_rank.py): seconds and bytes beside the plan's
inference   a prompt and a token by plan and by torch alone, as they are and as CUDA graphs; attention with masks by each kernel
beside      kernels beside one and two such collectives: how much longer they take

Each part is a process of its own, ends after 9 minutes at most, and writes OUT/PART.json; one that is there is not run again. The first
two run at the same time, since they measure no seconds. OUT/gpu.json has all of them, OUT/gpu.md is a page. --stand-in: the CPU and
small sizes in place of the GPU, to try every part. --plans: makes the plans and the predictions for devices of these kinds and ends; then
the machine with the GPU, whose torch may be older than what autoshard plans with, only runs them.
"""

# ruff: noqa: B023, E402, E501  (this folder must not hide packages; lambdas run at once; rows of cases are long)
import argparse
import gc
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
ONLY_32 = ("detr", "fnet", "resnet")  # the others compute in bfloat16, too
HF = ("beit", "convnext", "deberta_v2", "detr", "fnet", "gemma3", "mamba", "swin", "vit", "wav2vec2", "whisper", "xlnet")


class Device:
    """The GPU, or the CPU in its place. out: where the parts write."""

    def __init__(self, stand_in: bool, out: Path, kind: str = ""):
        from autoshard.mesh import DEVICES

        self.stand_in, self.name, self.out = stand_in, "cpu" if stand_in else "cuda", out
        named = kind or ("cpu" if stand_in else torch.cuda.get_device_name().lower())
        self.kind = max((name for name in DEVICES if name in named), key=len, default="h100")
        self.plans = out / "plans" / self.kind

    def wait(self) -> None:
        if not self.stand_in:
            torch.cuda.synchronize()

    def peak(self) -> dict[str, int]:
        """Bytes since `forget`; none on the CPU, whose allocator doesn't count."""
        if self.stand_in:
            return {"allocated": 0, "reserved": 0}
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def used(self) -> int:
        """Bytes of the device that are not free: of this process, where no other uses it."""
        free, all_of_it = (0, 0) if self.stand_in else torch.cuda.mem_get_info()
        return all_of_it - free

    def forget(self) -> None:
        gc.collect()
        if not self.stand_in:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, run, repeats: int = 10) -> float:
        """Median seconds of a call that is waited for, after two that are not counted."""
        times = []
        for k in range(repeats + 2):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            times += [time.perf_counter() - begin] if k > 1 else []
        return statistics.median(times)

    def heat(self, run, seconds: float = 3.0) -> None:
        """Runs it until the clock is that of a device that trains."""
        end = time.perf_counter() + (0 if self.stand_in else seconds)
        while time.perf_counter() < end:
            run()
            self.wait()

    def each(self, run, calls: int = 10, repeats: int = 5, warm: int = 2) -> float:
        """Seconds of a call among several that are started one after the other: the device's, unless the host takes longer."""
        for _ in range(warm):
            run()
        times = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            self.wait()
            times.append((time.perf_counter() - begin) / calls)
        return statistics.median(times)

    def mesh(self):
        """One device at its own prices."""
        import autoshard

        return autoshard.Mesh.from_bandwidths((1,), device=self.kind)


def chosen(names) -> list[str]:
    """Those of --models, or that begin with one of them; by default all."""
    return [name for name in names if not CHOSEN or any(name.startswith(given) for given in CHOSEN)]


def said(error: Exception) -> str:
    """Its first line, or the last where another process's is in it."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if lines[0].startswith("--") else 0][:300]


CHOSEN: list[str] = []  # models that `verify`, `profiles`, `steps` and `one_rank` are only asked for
RUNNING: list[dict] = []
WRITE: list = []


def attempted(row: dict, run, *args) -> dict:
    """The row with what `run` adds, or with what went wrong: a part goes on after a row that fails. So far a part that is stopped is kept."""
    begin = time.perf_counter()
    try:
        row = row | {"ok": True} | run(*args)
    except Exception as error:
        row = row | {"ok": False, "error": f"{type(error).__name__}: {said(error)}"}
    RUNNING.append(row)
    if WRITE:
        WRITE[0](RUNNING)
    print(f"{time.perf_counter() - begin:6.1f} s  {row}", file=sys.stderr, flush=True)
    return row


# -- plans --------------------------------------------------------------------------------------------------------------------------

LLAMA = "models/llama.py:llama3_8b"
SMALL = ("models/llama.py:tiny", {"batch": 1, "layers": 4})
STEPS = {  # a model, its settings, options of its plan (AdamW has moments of the parameters' dtype); a small one for the stand-in
    "GPT-2 small": ("models/gpt2.py:small", {"batch": 16, "seq": 1024, "dtype": "bfloat16"}, {"optimizer": 4}, ("models/gpt2.py:tiny", {})),
    "Llama-3 8B, 4 layers": (LLAMA, {"layers": 4, "batch": 1, "seq": 4096, "vocab": 32000}, {"optimizer": 4}, SMALL),
    "Llama-3 8B, 4 layers, recomputed": (LLAMA, {"layers": 4, "batch": 1, "seq": 4096, "vocab": 32000}, {"recompute": "all", "optimizer": 4}, SMALL),
    "GPT-2 small, recompute auto within 9 GB": (
        "models/gpt2.py:small", {"batch": 16, "seq": 1024, "dtype": "bfloat16"}, {"recompute": "auto", "memory_limit": 9e9, "optimizer": 4},
        ("models/gpt2.py:tiny", {}),
    ),
    "GPT-2 small, float32, precision bf16": (
        "models/gpt2.py:small", {"batch": 16, "seq": 1024}, {"precision": "bf16"}, ("models/gpt2.py:tiny", {}),
    ),
    "ViT-Base": ("vit", {}, {"optimizer": 4}, ("vit", {"layers": 1, "batch": 2, "width": 32})),
    "a mixture of experts": ("models/moe.py:moe", {"dtype": "bfloat16", "batch": 16}, {"optimizer": 4}, ("models/moe.py:tiny", {})),
}  # fmt: skip
FITS = {  # as torchtitan trains on one GPU: float32, autocast to bf16, checkpoints of blocks, fused AdamW
    f"{path.partition(':')[2]}, {layers} layers, {batch} x {seq}, {recompute}{', compiled' * compiled}": (
        path, {"layers": layers, "batch": batch, "seq": seq, "dtype": "float32"}, recompute, compiled,
    )
    for path, layers, batch, seq, recompute, compiled in (
        (LLAMA, 4, 1, 8192, "none", False),
        (LLAMA, 4, 1, 8192, "full", False),
        (LLAMA, 4, 1, 8192, "selective_op", False),
        (LLAMA, 4, 2, 4096, "none", False),
        (LLAMA, 2, 2, 8192, "full", False),
        ("models/gpt2.py:large", 36, 8, 1024, "none", False),
        ("models/gpt2.py:large", 36, 16, 1024, "full", False),
        (LLAMA, 4, 1, 8192, "none", True),
        (LLAMA, 4, 1, 8192, "full", True),
    )
}  # fmt: skip
SERVED = {"1 x 4096": (1, 4096, 0), "64 x 1 of 4096": (64, 1, 4096), "1 x 1 of 4096": (1, 1, 4096)}  # sequences, tokens, room in their cache
SCHEMES, LAYERS = (None, "fsdp", "megatron"), {"layers": 4, "seq": 4096, "vocab": 32000, "dtype": "float32"}
RANKS = {  # of several devices: a model, its settings, the mesh, what makes the plan
    f"{name} on {'x'.join(map(str, shape))} by {scheme or 'ours'}{', compiled' * compiled}": (path, settings, shape, scheme, small, compiled)
    for name, path, settings, shape, schemes, small, compiled in (
        ("Llama-3 8B, 4 layers", LLAMA, LAYERS | {"batch": 8}, (8,), SCHEMES, SMALL, False),
        ("Llama-3 8B, 4 layers", LLAMA, LAYERS | {"batch": 8}, (8,), (None, "fsdp"), SMALL, True),
        ("Llama-3 8B, 4 layers", LLAMA, LAYERS | {"batch": 16}, (2, 8), (None,), SMALL, False),
        ("GPT-2 small", "models/gpt2.py:small", {"batch": 128, "seq": 1024}, (8,), (None, "fsdp"), ("models/gpt2.py:tiny", {}), False),
        ("a mixture of experts", "models/moe.py:moe", {"batch": 128}, (8,), (None,), ("models/moe.py:tiny", {}), False),
    )
    for scheme in schemes
}  # fmt: skip


def vit(*, batch: int = 64, layers: int = 12, width: int = 768):
    """A vision transformer of transformers, with its loss."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 16 if width < 64 else width // 64, num_labels=1000
    )
    with torch.device("meta"):
        pixels, labels = torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)
        module = ViTForImageClassification(config)
    return (module if width < 64 else module.bfloat16()), {"pixel_values": pixels if width < 64 else pixels.bfloat16(), "labels": labels}


def model_of(device: Device, large: str, settings: dict, small: tuple[str, dict]):
    from autoshard.cli.model import load_model

    path, settings = small if device.stand_in else (large, settings)
    return vit(**settings) if path == "vit" else load_model(f"{ROOT}/{path}", settings)


def served(device: Device, name: str):
    """Llama-3 8B with 8 layers: of a prompt, or of one token each with a cache of so many."""
    from models import llama

    batch, tokens, room = SERVED[name]
    shape = {"batch": batch, "seq": min(room or tokens, 128 if device.stand_in else 4096), "loss": False}
    with torch.device("meta"):
        module, inputs = (llama.tiny if device.stand_in else llama.llama3_8b)(layers=2 if device.stand_in else 8, **shape)
        if not room:
            return module, inputs
        return llama.with_cache(module, batch, shape["seq"]), (torch.zeros(batch, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def plan_of(device: Device, name: str):
    """The plan of that name: from its file, or made and written there."""
    import autoshard
    from benchmarks import fake_cuda

    part, model, *others = name.split("; ")
    path = (device.plans if part in ("step", "rank", "served") else device.out / "plans") / f"{name}.json"
    if path.exists():
        return autoshard.load(str(path))
    options: dict = {"training": True, "baselines": False}
    if part == "verify":
        precision, scheme = others
        module, inputs = fake_cuda.built(model, True)
        mesh = autoshard.Mesh.from_bandwidths((2, 2), **FAST)
        options["precision"] = None if precision == "float32" else precision
        if scheme != "None":
            del options["baselines"]
            options |= {"algo": scheme, "mesh_shape": (2, 2), "intra_node_bandwidth": 1e14, "inter_node_bandwidth": 1e14}
    elif part == "served":
        module, inputs = served(device, model)
        mesh, options = device.mesh(), options | {"training": False, "compiled": others[0] == "compiled"}
    elif part == "rank":
        path_of_model, settings, shape, scheme, small, compiled = RANKS[model]
        module, inputs = model_of(device, path_of_model, settings, small)
        mesh, options = autoshard.Mesh.from_bandwidths(shape, device=device.kind), options | {"precision": "bf16", "compiled": compiled}
        if scheme:
            del options["baselines"]
            options |= {"algo": scheme, "mesh_shape": shape, "device": device.kind}
    else:
        path_of_model, settings, more, small = STEPS[model]
        module, inputs = model_of(device, path_of_model, settings, small)
        mesh, options = device.mesh(), options | more | {"compiled": others[0] == "compiled"}
    path.parent.mkdir(parents=True, exist_ok=True)
    if "algo" in options:
        solution = autoshard.autosharding_pass(module, example_inputs=inputs, **options)[1]["solution"]
    else:
        solution = autoshard.plan(module, inputs, mesh, **options)
    solution.save(str(path))
    return solution


def predicted_fit(device: Device, cell: str) -> dict:
    """What `autoshard fits` says of the launch, from its file or asked now."""
    path = device.plans / f"fits; {cell.replace('/', ' ')}.json"
    if not path.exists():
        model, settings, recompute, compiled = FITS[cell]
        if device.stand_in:
            model, settings = SMALL[0], SMALL[1] | {"seq": 64}
        given = {key: value for key, value in settings.items() if key not in ("batch", "seq", "dtype")}
        command = [sys.executable, "-m", "autoshard", "fits", f"{ROOT}/{model}", "--devices", "1", "--json", "--quiet"]
        command += ["--microbatch", str(settings["batch"]), "--seq", str(settings["seq"]), "--recompute", recompute]
        command += [
            "--device",
            "h100" if device.stand_in else device.kind,
            *(["--compile"] if compiled else []),
            *sum((["--set", f"{k}={v}"] for k, v in given.items()), []),
        ]
        made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        if made.returncode > 1:
            raise ValueError(made.stderr.strip()[-300:])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made.stdout)
    return json.loads(path.read_text())


def make_plans(kinds: list[str], out: Path) -> None:
    for kind in kinds:
        device = Device(False, out, kind)
        names = [f"step; {name}; {how}" for name in STEPS for how in ("eager", "compiled")]
        names += [f"verify; {name}; {how}; {scheme}" for name, how, scheme in verified_cases(device)]
        names += [f"rank; {name}" for name in RANKS] + [f"served; {name}; {how}" for name in SERVED for how in ("eager", "compiled")]
        for name in names:
            print(kind, attempted({"plan": name}, lambda name=name: {"cost": plan_of(device, name).cost}), file=sys.stderr, flush=True)
        for cell in FITS:
            print(
                kind,
                attempted({"fits": cell}, lambda cell=cell: {"verdict": predicted_fit(device, cell)["verdict"]}),
                file=sys.stderr,
                flush=True,
            )


# -- parts --------------------------------------------------------------------------------------------------------------------------


def captures(device: Device) -> list[dict]:
    from benchmarks import coverage, fake_cuda

    def run(name: str, training: bool) -> dict:
        row = fake_cuda.compared(name, training, device.name, real=True)
        return row | {"ok": row["equal"] is not False}

    names = MODELS[:2] + MODELS[4:5] if device.stand_in else (*MODELS, *HF)
    return [
        attempted({"name": name, "training": t}, run, name, t)
        for name in names
        for t in (coverage.modes(name) if name in MODELS else (True,))
    ]


def verified_cases(device: Device) -> list[tuple[str, str, str]]:
    names = chosen(MODELS[:1] if device.stand_in else (*MODELS, *HF))
    schemes = {name: SCHEMES if name in MODELS[:3] else SCHEMES[:1] for name in names}
    return [
        (name, precision, str(scheme))
        for name in names
        for scheme in schemes[name]
        for precision in (("float32",) if name in ONLY_32 else ("float32", "bf16"))
    ]


def verify(device: Device) -> list[dict]:
    import autoshard
    from benchmarks import fake_cuda

    def run(name: str, precision: str, scheme: str) -> dict:
        module, inputs = fake_cuda.built(name, True)
        found = autoshard.verify(module, inputs, plan_of(device, f"verify; {name}; {precision}; {scheme}"), device=device.name)
        worst = max(max(p["max_relative_error_outputs"], p["max_relative_error_gradients"]) for p in found["plans"])
        return {"ok": found["ok"], "worst_error": worst}

    return [
        attempted({"model": name, "precision": precision, "plan": "ours" if scheme == "None" else scheme}, run, name, precision, scheme)
        for name, precision, scheme in verified_cases(device)
    ]


def kernels(device: Device) -> list[dict]:
    from autoshard.cost.compute import op_seconds

    aten, functional = torch.ops.aten, torch.nn.functional
    where, price, rows = device.name, device.mesh().device, []
    b16 = torch.bfloat16

    def drawn(*shape: int, dtype: torch.dtype = b16) -> torch.Tensor:
        return torch.randn(*shape, device=where, dtype=torch.float32).to(dtype)

    def matmul(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
        if dtype is b16:
            a, b = drawn(m, k), drawn(n, k).t()
            return {"seconds": device.each(lambda: a @ b)}
        a, b, one = drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype).t(), torch.ones((), device=where)
        return {"seconds": device.each(lambda: torch._scaled_mm(a, b, one, one, out_dtype=b16))}

    def linear(tokens: int, out: int, k: int) -> dict[str, dict]:
        """The three matmuls of a linear layer, their operands stored as its forward and backward find them."""
        if device.stand_in:
            tokens, out, k = 64, 64, 64
        x, w, g = drawn(tokens, k), drawn(out, k), drawn(tokens, out)
        matmuls = {"forward": lambda: x @ w.t(), "input's gradient": lambda: g @ w, "weight's gradient": lambda: g.t() @ x}
        return {name: {"seconds": device.each(run)} for name, run in matmuls.items()}

    def attention(batch: int, seq: int, heads: int, kv: int, width: int) -> dict:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (drawn(batch, h, seq, width).requires_grad_() for h in (heads, kv, kv))
        given = torch.randn_like(q)

        def forward() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv)

        found = {}
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            if device.stand_in and name == "cudnn":
                continue
            with sdpa_kernel(backend):
                with torch.no_grad():
                    found[f"{name}_forward"] = device.each(forward)
                both = device.each(lambda: torch.autograd.grad(forward(), (q, k, v), given))
            found |= {f"{name}_backward": both - found[f"{name}_forward"]}
        return found | {"seconds": min(value for key, value in found.items() if "forward" in key)}

    tables: dict[str, list[tuple]] = {"gemm": [], "attention": []}
    weights = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (2304, 768), (3072, 768))
    for m in (128,) if device.stand_in else (512, 2048, 8192, 16384):
        for n, k in weights[-1:] if device.stand_in else weights:
            for dtype in (b16,) if device.stand_in else (b16, torch.float8_e4m3fn):
                rows.append(attempted({"op": "matmul", "dtype": short(dtype), "shape": (m, n, k)}, matmul, m, n, k, dtype))
                tables["gemm"] += [(m, n, k)] if rows[-1]["ok"] else [None]
    cases = ((1, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (4, 4096, 32, 8, 128), (1, 32768, 32, 8, 128), (8, 1024, 12, 12, 64),
             (2, 8192, 32, 32, 128), (4, 4096, 16, 16, 64))  # fmt: skip
    for case in ((2, 64, 4, 4, 16),) if device.stand_in else cases:
        rows.append(attempted({"op": "attention", "dtype": "bfloat16", "shape": case}, attention, *case))
    write_tables(device, rows)

    def other(target: str, run, inputs: list, outputs: list) -> dict:
        described = [[(tuple(t.shape), short(t.dtype)) for t in ts] for ts in (inputs, outputs)]
        priced, seconds = op_seconds(target, *described, None, price), device.each(run)
        moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        return {"seconds": seconds, "priced_seconds": priced, "ratio": seconds / priced, "bytes_per_second": moved / seconds}

    n = 256 if device.stand_in else 8192
    for dtype in (torch.float32, b16):
        a, b, weight = drawn(n, n, dtype=dtype), drawn(n, n, dtype=dtype), drawn(n, dtype=dtype)
        statistics_ = [torch.empty(n, 1, device=where, dtype=torch.float32)] * 2
        for target, run, ins, outs in (
            ("aten.gelu.default", lambda a=a: functional.gelu(a), [a], [a]),
            ("aten.add.Tensor", lambda a=a, b=b: a + b, [a, b], [a]),
            ("aten._softmax.default", lambda a=a: torch.softmax(a, -1), [a], [a]),
            ("aten.native_layer_norm.default", lambda a=a, w=weight: functional.layer_norm(a, (n,), w, w), [a, weight, weight], [a, *statistics_]),
            ("aten._to_copy.default", lambda a=a: a.to(torch.float64 if a.dtype is b16 else b16), [a], [a.to(torch.float64 if a.dtype is b16 else b16)]),
            ("aten.embedding.default", lambda a=a: functional.embedding(torch.arange(n, device=where), a), [a], [a]),
        ):  # fmt: skip
            rows.append(attempted({"op": target, "dtype": short(dtype), "shape": (n, n)}, other, target, run, ins, outs))
    for width in (64,) if device.stand_in else (768, 4096, 32000, 50257, 128256):
        tokens = max(n * n // width // 4, 1)
        x32, x16, targets = (
            drawn(tokens, width, dtype=torch.float32),
            drawn(tokens, width),
            torch.zeros(tokens, dtype=torch.long, device=where),
        )
        y32 = torch.log_softmax(x32, -1)
        rms, half = drawn(width), x16[:, : width // 2 * 2].unflatten(1, (2, -1))
        for target, run, ins, outs in (
            ("aten._log_softmax.default", lambda x=x32: torch.log_softmax(x, -1), [x32], [x32]),
            ("aten._log_softmax_backward_data.default", lambda x=x32, y=y32: aten._log_softmax_backward_data(x, y, -1, torch.float32), [x32, x32], [x32]),
            ("aten._softmax.default", lambda x=x16: torch.softmax(x, -1), [x16], [x16]),
            ("aten.nll_loss_backward.default", lambda x=y32, t=targets: aten.nll_loss_backward(x[0, 0], x, t, None, 1, -100, x[0, 0]), [], [x32]),
            ("aten.native_layer_norm.default", lambda x=x16, w=rms, k=width: functional.layer_norm(x, (k,), w, w), [x16], [x16]),
            ("aten.mean.dim", lambda x=x32: x.mean(-1, keepdim=True), [x32], []),
            ("aten.sum.dim_IntList", lambda x=x16: x.sum(0), [x16], []),
            ("aten.silu.default", lambda x=x16: functional.silu(x), [x16], [x16]),
            ("aten.gelu.default", lambda x=x16: functional.gelu(x), [x16], [x16]),
            ("aten.mul.Tensor", lambda x=x16, w=rms: x * w, [x16], [x16]),
            ("aten.clone.default", lambda x=half: x.transpose(0, 1).contiguous(), [half], [half]),
            ("aten.cat.default", lambda x=half: torch.cat((x[:, 1], x[:, 0]), 1), [half], [half]),
            ("aten._to_copy.default", lambda x=x16: x.float(), [x16], [x32]),
        ):  # fmt: skip
            rows.append(
                attempted(
                    {"op": target, "dtype": short(ins[0].dtype) if ins else "float32", "shape": (tokens, width)},
                    other,
                    target,
                    run,
                    ins,
                    outs,
                )
            )
    # odd rows beside even ones, of few and many tokens; and odd numbers of tokens
    layers = [(t, out, k) for t in (1024, 4096, 16384) for out in (50257, 50304, 6283, 6336) for k in (768,)]
    layers += [(t, out, 4096) for t in (1023, 1024, 8191, 8192) for out in (4095, 4096, 4100, 4104)]
    for layer in layers:
        rows.append(attempted({"op": "matmuls of a linear layer", "dtype": "bfloat16", "shape": layer}, linear, *layer))
    weight = torch.nn.Parameter(torch.randn(n, n, device=where))
    weight.grad = torch.randn_like(weight)
    for options in ({"foreach": True}, {"fused": True}):
        step = torch.optim.AdamW([weight], **options).step
        row = attempted({"op": f"AdamW {options}", "dtype": "float32", "shape": (n, n)}, lambda run: {"seconds": device.each(run)}, step)
        rows.append(row | ({"bytes_per_second": 28 * n * n / row["seconds"]} if row["ok"] else {}))

    def steady() -> dict:
        """A matmul alone, after a pause, and as the last of some seconds of them."""
        a, b = drawn(n, n), drawn(n, n)
        time.sleep(0 if device.stand_in else 1)
        alone = device.each(lambda: a @ b, calls=3, repeats=1)
        end = time.perf_counter() + (0.1 if device.stand_in else 4)
        while time.perf_counter() < end:
            last = device.each(lambda: a @ b, calls=50, repeats=1, warm=0)
        return {"seconds": alone, "steady_seconds": last, "ratio": last / alone}

    rows.append(attempted({"op": "matmul, alone and for 4 seconds", "dtype": "bfloat16", "shape": (n, n, n)}, steady))
    return rows


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_tables(device: Device, rows: list[dict]) -> None:
    """OUT/kernels/gemm.csv and attention.csv, of the form that benchmarks/kernels.py reads."""
    folder = device.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    names = {"bfloat16": "bfloat16", "float8_e4m3fn": "fp8"}
    for op, file, columns in (("matmul", "gemm", "m,n,k"), ("attention", "attention", "batch,seq,heads,kv_heads,head_dim")):
        found = [row for row in rows if row["op"] == op and row["ok"]]
        lines = [f"gpu,framework,dtype,{columns},ms"]
        lines += [f"{device.kind}_sxm,torch,{names[r['dtype']]},{','.join(map(str, r['shape']))},{r['seconds'] * 1e3:.6g}" for r in found]
        (folder / f"{file}.csv").write_text("\n".join(lines) + "\n")


def filled(module: torch.nn.Module, device: Device) -> torch.nn.Module:
    """The module of the meta device with memory, and values of no meaning: matrices of spread .02, ones."""
    module = module.to_empty(device=device.name)
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            if p.is_floating_point():
                p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1)
            else:
                p.zero_()
    return module


def drawn_inputs(inputs, device: Device):
    generator = torch.Generator().manual_seed(0)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        value = torch.randn(x.shape, generator=generator) if x.is_floating_point() else torch.randint(0, 100, x.shape, generator=generator)
        return value.to(device.name, x.dtype)

    return {name: drawn(x) for name, x in inputs.items()} if isinstance(inputs, dict) else tuple(map(drawn, inputs))


def one_step(model, inputs, optimizer) -> None:
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    out = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out[0]
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def parallel_of(device: Device, module, solution):
    """The parallel module of a one-device plan, on this device and filled."""
    import torch.distributed as dist

    import autoshard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.name, (1,), backend_override={0: "gloo"})
    return autoshard.parallelize(filled(module, device), solution, mesh)


def step_of(device: Device, name: str, how: str):
    """The parallel module of a one-device plan, its inputs, its optimizer, and the plan."""
    path, settings, _, small = STEPS[name]
    module, inputs = model_of(device, path, settings, small)
    solution = plan_of(device, f"step; {name}; {how}")
    model = parallel_of(device, module, solution)
    return model, drawn_inputs(inputs, device), torch.optim.AdamW(model.parameters(), fused=True), solution


def steps(device: Device) -> list[dict]:
    def measured(run) -> dict:
        found = {"seconds": device.seconds(run, 5), **device.peak()}
        device.heat(run)
        return found | {"steady_seconds": device.seconds(run, 5)}

    def ours(name: str, how: str) -> dict:
        device.forget()
        model, inputs, optimizer, solution = step_of(device, name, how)
        if how == "compiled":
            model.compile()
        found = measured(lambda: one_step(model, inputs, optimizer))
        return found | {
            "predicted_seconds": solution.cost, "predicted_bytes": solution.peak_bytes, "ratio": found["seconds"] / solution.cost,
            "bytes_ratio": found["allocated"] / solution.peak_bytes,
        }  # fmt: skip

    def alone(name: str, how: str) -> dict:
        device.forget()
        path, settings, options, small = STEPS[name]
        module, inputs = model_of(device, path, settings, small)
        module, inputs = filled(module, device), drawn_inputs(inputs, device)
        if how == "compiled":
            module.compile()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        return measured(lambda: one_step(module, inputs, optimizer))

    rows = []
    for how in ("eager", "compiled"):
        for name in chosen(list(STEPS) if how == "eager" else list(STEPS)[:3]):
            rows.append(attempted({"model": name, "how": how, "by": "plan"}, ours, name, how))
            if not {"recompute", "precision"} & set(STEPS[name][2]):
                rows.append(attempted({"model": name, "how": how, "by": "torch"}, alone, name, how))
    return rows


def inference(device: Device) -> list[dict]:
    def measured(model, inputs) -> dict:
        with torch.no_grad():
            model(*inputs)
            device.forget()
            found = {"seconds": device.seconds(lambda: model(*inputs), 9), **device.peak()}
            if not device.stand_in:
                with torch.cuda.graph(captured := torch.cuda.CUDAGraph()):
                    model(*inputs)
                found["graph_seconds"] = device.seconds(captured.replay, 9)
        return found

    def run(name: str, how: str, by: str) -> dict:
        device.forget()
        module, inputs = served(device, name)
        if by == "torch":
            model, solution = filled(module, device), None
        else:
            solution = plan_of(device, f"served; {name}; {how}")
            model = parallel_of(device, module, solution)
        del module
        if how == "compiled":
            model.compile()
        found = measured(model, drawn_inputs(inputs, device))
        if solution is None:
            return found
        return found | {"predicted_seconds": solution.cost, "bytes_ratio": found["allocated"] / solution.peak_bytes}

    def masked(shape: tuple[int, ...], dead: bool) -> dict:
        """Seconds of each kernel with a mask, and how far it is off what matmuls and a softmax give. dead: two queries see no key."""
        from autoshard.lower.kernels import attention as kernels_

        batch, heads, groups, queries, keys, width = (2, 4, 2, 8, 8, 16) if device.stand_in else shape
        q, grad = (torch.randn(batch, heads, queries, width, device=device.name).bfloat16() for _ in range(2))
        k, v = (torch.randn(batch, groups, keys, width, device=device.name).bfloat16() for _ in range(2))
        mask = torch.full((batch, 1, queries, keys), -torch.inf, device=device.name).triu(1 + keys - queries).bfloat16()
        mask[0, :, :2] = mask[0, :, :2] if not dead else -torch.inf
        call = kernels_.call_of(q, k, v, mask, False, None)
        out, of_out = kernels_.math_attention(call)
        expected, found = (out, *kernels_.math_attention_backward(call, grad, out, of_out)), {"taken": kernels_.kernel_of(call)}
        for kernel in ("flash for CPU",) if device.stand_in else ("cuDNN", "efficient"):
            forward, backward = kernels_.KERNELS_OF[kernel]
            got = forward(call)
            off = [float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip((got[0], *backward(call, grad, *got)), expected)]
            found |= {f"{kernel}_forward": device.each(lambda: forward(call)), f"{kernel}_backward": device.each(lambda: backward(call, grad, *got))}
            found[f"{kernel}_off"] = max(off, key=lambda x: (x != x, x))
        return found

    rows = [attempted({"model": name, "how": how, "by": by}, run, name, how, by) for name in SERVED for how in ("eager", "compiled") for by in ("plan", "torch")]
    shapes = ((64, 32, 8, 1, 4096, 128), (1, 32, 8, 1, 4096, 128), (4, 32, 8, 8, 2048, 128), (2, 16, 16, 2048, 2048, 64), (2, 16, 4, 1024, 1024, 128))
    return rows + [attempted({"masked": shape, "dead": dead}, masked, shape, dead) for shape in shapes for dead in (False, True) if shape[3] > 1 or not dead]


def ops_of(device: Device, step) -> list[tuple]:
    """Operators of a step by the shapes of their inputs: name, shapes, calls, seconds of their kernels on the GPU (on the CPU of the host)."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU] if device.stand_in else [kinds.CPU, kinds.CUDA], record_shapes=True) as profile:
        step()
        device.wait()
    found = profile.key_averages(group_by_input_shape=True)
    seconds = (lambda e: e.self_cpu_time_total) if device.stand_in else (lambda e: e.self_device_time_total)
    rows = [(e.key, [list(x) for x in e.input_shapes], e.count, seconds(e) / 1e6) for e in found if e.key.startswith(("aten::", "autoshard"))]
    return sorted((row for row in rows if row[-1] > 2e-6), key=lambda row: -row[-1])


def one_rank(device: Device) -> list[dict]:
    """Of each plan's first rank: seconds of kernels, with collectives that wait, and with those that move bytes, beside the predicted ones."""
    from benchmarks import one_rank as emulated

    emulation = emulated.Emulation(device.name)

    def run(name: str) -> dict:
        device.forget()
        path, settings, _, _, small, compiled = RANKS[name]
        module, inputs = model_of(device, path, settings, small)
        solution = plan_of(device, f"rank; {name}")
        model = emulated.model_of_rank(filled(module, device), solution, emulation)
        if compiled:
            model.compile()
        inputs, optimizer = drawn_inputs(inputs, device), torch.optim.AdamW(model.parameters(), fused=True)
        whole = sum(x.nbytes for x in (inputs.values() if isinstance(inputs, dict) else inputs))  # a rank of a launch has its part only
        predicted, found = solution.breakdown, {}
        del module
        one_step(model, inputs, optimizer)
        device.forget()
        emulation.asked.clear()
        found["eager_seconds"] = device.seconds(lambda: one_step(model, inputs, optimizer), 5)
        peak, asked = device.peak()["allocated"] - whole - (0 if device.stand_in else emulation.scratch.nbytes), [len(emulation.asked) // 7, sum(emulation.asked) / 7]
        begin = time.perf_counter()
        one_step(model, inputs, optimizer)
        found["host_seconds"] = time.perf_counter() - begin
        device.wait()

        def passes() -> None:
            out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            (out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out[0]).sum().backward()

        (device.out / "ops").mkdir(exist_ok=True)
        operators = ops_of(device, lambda: one_step(model, inputs, optimizer))
        (device.out / "ops" / f"{name}.json".replace(" ", "_").replace(",", "")).write_text(json.dumps(operators))
        passes()
        update = device.seconds(optimizer.step, 5)
        pool = None
        for how in () if device.stand_in else (emulated.MOVING, emulated.WAITING, emulated.IDLE):
            optimizer.zero_grad()
            try:
                graph = emulation.graph(how, passes, pool)
            except RuntimeError as error:
                found["not_captured"] = said(error)
                break
            pool = graph.pool()
            found[f"{how}_seconds"] = device.seconds(graph.replay, 9) + update
            device.heat(graph.replay)
            found[f"{how}_steady_seconds"] = device.seconds(graph.replay, 9) + update
        return found | {
            "collectives": asked[0], "collectives_seconds": asked[1], "predicted_collectives": sum(predicted["communication"].values()),
            "predicted_kernels": sum(predicted["compute"].values()), "predicted_seconds": solution.step_seconds,
            "ratio": found.get("moving_seconds", 0.0) / solution.step_seconds, "allocated": peak, "bytes_ratio": peak / solution.peak_bytes,
        }  # fmt: skip

    return [attempted({"plan": name}, run, name) for name in chosen(RANKS)]


def beside(device: Device) -> list[dict]:
    """Kernels alone, beside one collective's kernel and beside two, by how many blocks they have and the bytes per second that they write:
    420e9 as over NVLink, 50e9 as over a network. Ratios to alone."""
    if device.stand_in:
        return [{"what": "no streams on the CPU", "ok": True}]
    from benchmarks import one_rank as emulated

    emulation = emulated.Emulation(device.name)
    into = [torch.empty(2**28, device="cuda", dtype=torch.uint8) for _ in range(2)]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    a, b, large, norms, q = drawn(8192, 8192), drawn(8192, 8192), drawn(2**28), drawn(8192, 4096), drawn(1, 32, 8192, 128)
    small = drawn(4096, 4096)
    functional = torch.nn.functional
    works = {
        "matmul, 8192 x 8192 x 8192": (lambda: a @ b, 50), "matmul, 4096 x 4096 x 4096": (lambda: small @ small, 400),
        "attention": (lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True), 60),
        "pointwise": (lambda: large.mul_(1), 150), "layer norm": (lambda: functional.layer_norm(norms, (4096,)), 1000),
    }  # fmt: skip
    streams, other = [torch.cuda.Stream(priority=-1) for _ in range(2)], torch.cuda.Stream()

    def timed(work, times: int, blocks: list[int], rates: list[float]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for stream, count, rate, out in zip(streams, blocks, rates, into):
            emulation.run(0.13, stream, out, int(rate * 0.13), count)
        time.sleep(0.003)
        with torch.cuda.stream(other):
            begin.record()
            for _ in range(times):
                work()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    cases = {
        "alone": ([], []), "24 blocks": ([24], [420e9]), "16 blocks": ([16], [420e9]), "8 blocks": ([8], [200e9]), "1 block": ([1], [1e9]),
        "24 blocks, network": ([24], [50e9]), "8 blocks, network": ([8], [50e9]), "24 and 16": ([24, 16], [420e9, 50e9]),
        "24 and 8": ([24, 8], [420e9, 50e9]), "16 and 8": ([16, 8], [420e9, 50e9]),
    }  # fmt: skip

    def run(name: str) -> dict:
        work, times = works[name]
        timed(work, times, [], [])
        found: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(4):
            for case, (blocks, rates) in cases.items():
                found[case].append(timed(work, times, blocks, rates))
        seconds = {case: statistics.median(values) for case, values in found.items()}
        return {"alone_seconds": seconds["alone"]} | {case: value / seconds["alone"] for case, value in seconds.items() if case != "alone"}

    return [attempted({"kernel": name}, run, name) for name in works]


CLASSES = {  # of kernels, by what their names hold; the first that fits
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK"),
    "optimizer": ("multi_tensor", "FusedAdam", "adam"),
    "softmax and loss": ("softmax", "SoftMax", "nll"),
    "norm": ("layer_norm", "LayerNorm", "GammaBeta", "batch_norm"),
    "embedding": ("embedding", "index", "gather", "scatter"),
    "reduction": ("reduce",),
    "copy": ("Memcpy", "copy", "Cat", "Memset", "fill"),
    "pointwise": ("elementwise", "triton_poi", "vectorized"),
}


def kernel_class(name: str) -> str:
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def profiles(device: Device) -> list[dict]:
    """What kernels of a step take, by class, by plan and by torch alone; and what the host takes to launch them."""

    def run(make) -> dict:
        step = make()
        for _ in range(3):
            step()
        device.wait()
        begin = time.perf_counter()
        step()
        launched = time.perf_counter() - begin
        device.wait()
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU] if device.stand_in else [kinds.CUDA]) as profile:
            step()
            device.wait()
        events = [e for e in profile.key_averages() if device.stand_in or e.self_device_time_total]
        seconds: dict[str, float] = {}
        for e in events:
            kind = kernel_class(e.key)
            seconds[kind] = seconds.get(kind, 0) + e.self_device_time_total / 1e6
        longest = sorted(events, key=lambda e: -e.self_device_time_total)[:14]
        return {
            "host_seconds": launched, "kernels": sum(e.count for e in events), "kernel_seconds": sum(seconds.values()), **seconds,
            "longest": [(e.key[:90], e.count, round(e.self_device_time_total)) for e in longest],
        }  # fmt: skip

    def planned(name: str):
        model, inputs, optimizer, _ = step_of(device, name, "eager")
        return lambda: one_step(model, inputs, optimizer)

    def alone(name: str):
        path, settings, _, small = STEPS[name]
        module, inputs = model_of(device, path, settings, small)
        module, inputs = filled(module, device), drawn_inputs(inputs, device)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        return lambda: one_step(module, inputs, optimizer)

    rows = []
    for name in chosen(("GPT-2 small", "Llama-3 8B, 4 layers", "ViT-Base", "a mixture of experts")):
        for by, make in (("plan", planned), ("torch", alone)):
            rows.append(attempted({"model": name, "by": by}, run, lambda make=make, name=name: make(name)))
            device.forget()
    for cell in chosen(list(FITS)[:2]):
        rows.append(attempted({"model": cell, "by": "torch"}, run, lambda cell=cell: torchtitan_step(device, cell)))
        device.forget()
    return rows


def torchtitan_step(device: Device, cell: str):
    """A step as torchtitan takes it on one GPU: blocks are wrapped and compiled one by one, the loss is a function of its own."""
    path, settings, recompute, compiled = FITS[cell]
    module, inputs = model_of(device, path, settings, (SMALL[0], SMALL[1] | {"seq": 64}))
    module, (tokens, targets) = filled(module, device), drawn_inputs(inputs, device)
    blocks = module.layers if hasattr(module, "layers") else module.h
    for k, block in enumerate(blocks):
        blocks[k] = checkpointed(block, recompute)
        if compiled:
            blocks[k].compile()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, lr=1e-5)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))

    if compiled:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.name, torch.bfloat16):
            loss = loss_of(module(tokens), targets)
        loss.backward()
        optimizer.step()

    return step


def fits(device: Device) -> list[dict]:
    def run(cell: str) -> dict:
        device.forget()
        step = torchtitan_step(device, cell)
        found = {"seconds": device.seconds(step, 5), **device.peak(), "device_bytes": device.used()}
        said = predicted_fit(device, cell)
        figures = {name: said["fullest"][f"{name}_bytes"] for name in ("allocated", "reserved", "device")}
        return found | {
            "predicted_seconds": said["seconds"], **{f"predicted_{name}": value for name, value in figures.items()},
            "ratio": found["seconds"] / said["seconds"], "allocated_ratio": figures["allocated"] / max(found["allocated"], 1),
            "reserved_ratio": figures["reserved"] / max(found["reserved"], 1), "device_ratio": figures["device"] / max(found["device_bytes"], 1),
        }  # fmt: skip

    return [attempted({"cell": cell}, run, cell) for cell in (list(FITS)[:3] if device.stand_in else FITS)]


# What torchtitan's selective recomputation of ops keeps beside every second matmul (torchtitan 0.2, distributed/activation_checkpoint.py).
KEPT = ("mm.default", "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_cudnn_attention.default", "_flash_attention_forward.default", "max.default", "_scaled_mm.default")  # fmt: skip


def checkpointed(block: torch.nn.Module, recompute: str) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    if recompute == "none":
        return block
    if recompute == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False, early_stop=True)

    def contexts():
        seen = {False: 0, True: 0}

        def policy(context, function, *args, **kwargs):
            matmul = str(function) == "aten.mm.default"
            seen[context.is_recompute] += matmul
            keep = str(function).removeprefix("aten.") in KEPT and not (matmul and seen[context.is_recompute] % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False, early_stop=True)


SETTINGS = ("expandable_segments:False", "expandable_segments:True", "garbage_collection_threshold:0.6", "max_split_size_mb:64")


def allocator(device: Device) -> list[dict]:
    """What the simulation reserves beside what was recorded. The traces are kept in OUT/traces, as snapshots without their stacks."""
    import gzip

    def train(batches: list[int]) -> None:
        from models import gpt2

        for batch in batches:
            module, inputs = (gpt2.tiny if device.stand_in else gpt2.small)(batch=batch, seq=16 if device.stand_in else 512)
            module, inputs = filled(module, device), drawn_inputs(inputs, device)
            optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
            for _ in range(2):
                one_step(module, inputs, optimizer)

    def run(setting: str, batches: list[int]) -> dict:
        device.forget()
        if device.stand_in:
            train(batches)
            return device.peak()
        from autoshard.cost import replayed

        torch.cuda.memory._set_allocator_settings(setting if "expand" in setting else f"expandable_segments:False,{setting}")
        torch.cuda.memory._record_memory_history(max_entries=10**6, stacks="python", context=None)
        train(batches)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        peak, index = device.peak(), torch.cuda.current_device()
        kept = {
            "segments": [{k: s[k] for k in ("address", "total_size", "stream", "segment_type", "is_expandable", "device") if k in s}
                         | {"blocks": [{k: b[k] for k in ("size", "state", "address") if k in b} for b in s["blocks"]]} for s in snapshot["segments"]],
            "device_traces": [[{k: e[k] for k in ("action", "addr", "size", "stream") if k in e} for e in t] for t in snapshot["device_traces"]],
            "setting": setting, "peak": peak,
        }  # fmt: skip
        folder = device.out / "traces"
        folder.mkdir(exist_ok=True)
        (folder / f"{setting.replace(':', '_')}.json.gz").write_bytes(gzip.compress(json.dumps(kept).encode()))
        ours, recorded = replayed(snapshot, index, expandable=setting.endswith("True"), **({"max_split": 64 * 2**20} if "split" in setting else {}))
        return {
            **peak, "events": len(snapshot["device_traces"][index]), "recorded": recorded, "simulated": ours.peak_reserved,
            "ok": abs(ours.peak_reserved / max(recorded, 1) - 1) < 0.01, "simulated_over_recorded": ours.peak_reserved / max(recorded, 1),
        }  # fmt: skip

    return [attempted({"settings": setting}, run, setting, [4, 7, 3, 8]) for setting in SETTINGS]


def links(device: Device) -> list[dict]:
    size = 2**20 if device.stand_in else 2**30
    pinned = not device.stand_in
    on_host, back = (torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    pageable = torch.empty(size, dtype=torch.uint8)
    here, there = (torch.zeros(size, dtype=torch.uint8, device=device.name) for _ in range(2))
    rows = []

    def rate(name: str, run, moved: int = size) -> None:
        rows.append(attempted({"what": name}, lambda: {"bytes_per_second": moved / device.each(run, calls=3)}))

    rate("host to device, pinned", lambda: here.copy_(on_host, non_blocking=True))
    rate("device to host, pinned", lambda: back.copy_(there, non_blocking=True))
    rate("host to device, pageable", lambda: here.copy_(pageable))
    rate("device to device, read and written", lambda: here.copy_(there), 2 * size)
    if device.stand_in:
        return rows
    side, other = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        for stream, into, source in ((side, here, on_host), (other, back, there)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
        for stream in (side, other):
            torch.cuda.current_stream().wait_stream(stream)

    rate("both ways at once, sum", both, 2 * size)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    large = torch.empty(2**28, device="cuda", dtype=torch.float32)

    def beside(work, copy) -> dict:
        """Seconds of 30 calls of work alone, and while copies run on another stream all the time; rate of the copies alone and beside."""

        def timed(stream: torch.cuda.Stream, run, times: int):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record()
                for _ in range(times):
                    run()
                end.record()
            return lambda: begin.elapsed_time(end) / 1e3

        def measured(works: int, copies: int) -> tuple[float, float]:
            torch.cuda.synchronize()
            of_copies, of_work = timed(side, copy, copies), timed(other, work, works)
            torch.cuda.synchronize()
            return of_work(), of_copies()

        measured(5, 5)
        alone, copies = measured(30, 0)[0], measured(0, 10)[1]
        many = int(2 * alone / (copies / 10)) + 2
        together = measured(30, many)[0]
        return {"alone_seconds": alone, "copies_seconds": copies / 10, "beside_seconds": together, "slowed": together / alone}

    def from_host() -> None:
        here.copy_(on_host, non_blocking=True)

    for name, work, copy in (
        ("matmuls beside copies from the host", lambda: torch.mm(a, b), from_host),
        ("matmuls beside copies on the device", lambda: torch.mm(a, b), lambda: here.copy_(there)),
        ("pointwise beside copies from the host", lambda: large.add_(1), from_host),
    ):
        rows.append(attempted({"what": name}, beside, work, copy))
    return rows


def contexts(device: Device) -> list[dict]:
    """Bytes of the device that torch's allocator doesn't know, as libraries are first used, and bytes that it does."""
    if device.stand_in:
        return [{"what": "none on the CPU", "ok": True}]
    import torch.distributed as dist

    rows, before = [], [0, 0]

    def after(name: str, run) -> None:
        row = attempted({"what": name}, lambda: {"kept": run()} and {})
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        outside, inside = device.used() - torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        rows.append(row | {"outside_bytes": outside - before[0], "allocated_bytes": inside - before[1]})
        before[:] = outside, inside

    x = {}
    after("the CUDA context and an add", lambda: x.update(one=torch.zeros(1, device="cuda").add_(1)))
    half = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    before[1] = torch.cuda.memory_allocated()
    after("a matmul of bf16 (cuBLAS and its workspace)", lambda: half @ half)
    after("a linear layer with a bias (cuBLASLt)", lambda: torch.nn.functional.linear(half, half, half[0]))
    q = half.view(1, 32, 4096, 128)
    after("attention, forward", lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    after(
        "a convolution (cuDNN)",
        lambda: torch.nn.functional.conv2d(half.view(1, 256, 256, 256), half[:9].reshape(-1)[: 9 * 256 * 8].view(8, 256, 3, 3)),
    )
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"})
    after("an NCCL communicator of one rank", lambda: (dist.init_process_group("nccl", rank=0, world_size=1), dist.all_reduce(half)))
    after("a second one", lambda: dist.all_reduce(half, group=dist.new_group([0])))
    after("a compiled kernel", lambda: torch.compile(lambda y: torch.softmax(y.float(), -1) * 2)(half))
    dist.destroy_process_group()
    return rows


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


PARTS = {part.__name__: part for part in (verify, captures, fits, profiles, steps, allocator, contexts, kernels, links, launch, one_rank, inference, beside)}
AT_ONCE = ("verify", "captures")  # these measure no seconds


def run_part(name: str, stand_in: bool, path: Path) -> None:
    """In this process: the part's rows, into a file."""
    if torch.__version__ < "2.12":  # which takes builtins that transformers' code names for globals that are missing
        import builtins

        from torch._dynamo.convert_frame import GraphRuntimeEnv

        checked = GraphRuntimeEnv._check_external_refs
        GraphRuntimeEnv._check_external_refs = lambda self, given: checked(self, vars(builtins) | given)
    device = Device(stand_in, path.parent)
    begin = time.perf_counter()
    title = "CPU, in place of a GPU" if stand_in else torch.cuda.get_device_name()

    def write(rows: list[dict], final: bool = False) -> None:
        record = {"part": name, "device": title, "torch": torch.__version__, "seconds": time.perf_counter() - begin, "rows": rows}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1, default=str))
        temporary.rename(path if final else path.with_suffix(".part"))

    WRITE.append(write)
    write(PARTS[name](device), final=True)


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
    parser.add_argument("--plans", nargs="+", metavar="KIND", help="make plans and predictions for such devices, and end")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="*", default=[], help="that verify, profiles, steps and one_rank are asked for: how their names begin; by default all")
    parser.add_argument("--again", action="store_true", help="run parts that are there")
    parser.add_argument("--seconds", type=float, default=PART_SECONDS, help="that a part has")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.plans:
        make_plans(given.plans, given.out)
        return 0
    if not given.stand_in and not torch.cuda.is_available():
        sys.exit("no GPU is visible to this torch; --stand-in tries every part on the CPU")
    CHOSEN.extend(given.models)
    if given.here:
        run_part(given.here, given.stand_in, given.out / f"{given.here}.json")
        return 0
    end = time.monotonic() + ALL_SECONDS
    asked = [name for name in PARTS if name in given.only and (given.again or not (given.out / f"{name}.json").exists())]
    for names in ([name for name in asked if name in AT_ONCE], *([name] for name in asked if name not in AT_ONCE)):
        left = min(end - time.monotonic(), given.seconds)
        running = {}
        for name in names if left > 20 else ():
            print(f"{name} ...", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--here", name, "--out", str(given.out), "--models", *given.models]
            command += ["--stand-in"] if given.stand_in else []
            running[name] = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
        until = time.monotonic() + left
        for name, process in running.items():
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"{name}: stopped after {left:.0f} s", file=sys.stderr)
    files = [(given.out / f"{name}.json", given.out / f"{name}.part") for name in PARTS]
    records = [json.loads(next(file for file in two if file.exists()).read_text()) for two in files if any(file.exists() for file in two)]
    (given.out / "gpu.json").write_text(json.dumps(records, indent=1))
    (given.out / "gpu.md").write_text(page(records) + "\n")
    failed = [(record["part"], row) for record in records for row in record["rows"] if not row.get("ok")]
    for part, row in failed:
        print(part, row)
    print(f"{len(records)} of {len(PARTS)} parts are in {given.out / 'gpu.json'}; {len(failed)} rows don't hold")
    return int(len(records) < len(PARTS) or bool(failed))


if __name__ == "__main__":
    sys.exit(main())

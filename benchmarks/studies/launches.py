"""Studies of launches and of serving: predictions beside published rates, none of which was fitted to; and what a ranking costs."""

from __future__ import annotations

import csv
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from autoshard.cost import presets
from autoshard.launch import Launch, ModelSizes, Site, why_illegal
from autoshard.launch.blocks_of_stages import ENDS
from autoshard.launch.launch_prices import prices_of
from autoshard.launch.ranking import ranking
from autoshard.launch.runs import TrainingRuns
from autoshard.launch.torchtitan import FLAVORS
from autoshard.planning import ModelGraphs, Options, Question, Stopwatch
from autoshard.planning.instance import instance_of
from autoshard.serving import serve_plan
from autoshard.serving.projections import divided
from autoshard.serving.steps import steps_of
from benchmarks import published
from benchmarks.studies import Row, Study
from benchmarks.studies.commands import ROOT, cpu_seconds

# -- seconds per token -----------------------------------------------------------------------------------------------------------------

GPT_FAST = (
    "pytorch-labs/gpt-fast README.md, Tensor Parallelism: A100-80GB (330 W), bf16, batch 1, prompt of 5 tokens (200 new ones are assumed)"
)
VLLM_A100 = "johnmusgrave.com/p/vllm-throughput-latency-sweep-on: vLLM 0.23.0, A100 40GB, BF16, 1024 tokens in, 128 out, 1 request"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
SERVED = {
    "Llama-2-7B": (4096, 11008, 32, 32, 32, 32000),
    "Llama-2-70B": (8192, 28672, 80, 64, 8, 32000),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256),
}
A100_40GB = {"memory_bandwidth": 1.555e12, "memory": 40e9}  # bytes/s, bytes: NVIDIA A100 40GB SXM data sheet
FIGURES = (  # model, tensor, published tokens/s of one sequence, prompt, answer, what differs from the preset a100
    ("Llama-2-7B", 1, 104.9, 5, 200, {}), ("Llama-2-7B", 2, 168.84, 5, 200, {}), ("Llama-2-7B", 4, 254.02, 5, 200, {}),
    ("Llama-2-7B", 8, 328.43, 5, 200, {}), ("Llama-2-70B", 2, 21.32, 5, 200, {}), ("Llama-2-70B", 4, 38.01, 5, 200, {}),
    ("Llama-2-70B", 8, 62.50, 5, 200, {}), ("Llama-3.1-8B", 1, 75.0, 1024, 128, A100_40GB),
)  # fmt: skip


def serving(case: tuple, given) -> Row:
    """Predicted seconds per token beside published ones, none of which was fitted to.

    Predictions are at the prices of the device's file, whose constants were fitted to training steps: memory is read at the share of its
    bandwidth that those reach, and kernels are replayed from CUDA graphs. What a prediction leaves out (gaps between small kernels,
    sampling, the host) makes it too low, most where a token takes few milliseconds.
    """
    import transformers

    name, tensor, rate, prompt, answer, device = case
    with torch.device("meta"):
        config = transformers.LlamaConfig(**dict(zip(SIZES, SERVED[name])), max_position_embeddings=131072)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()

    def mesh_of(shape: tuple[int, int, int]):
        mesh = presets.mesh("a100", shape, 8)
        return replace(mesh, device=replace(mesh.device, **device))

    plan = serve_plan(model, tensor, max_tokens=prompt + answer, prompt=prompt, batch=1, mesh_of=mesh_of)
    seconds = next(row.seconds_per_token for row in plan.rows if row.tensor == tensor)
    return {"published_seconds": 1 / rate, "predicted_seconds": seconds, "error": seconds * rate - 1}


SERVING = Study(
    cases=lambda given: {f"{model}, tensor {tensor}": (model, tensor, *rest) for model, tensor, *rest in FIGURES}, measure=serving,
    alone=False, notes={"Llama-2": GPT_FAST, "Llama-3.1": VLLM_A100},
)  # fmt: skip


# -- latent attention ---------------------------------------------------------------------------------------------------------------------

MEASURED_LAYERS = ROOT / "tests" / "data" / "kernels" / "latent_decode.csv"


def measured_layers() -> list[tuple]:
    """(device, heads, sequences, tokens stored of each, seconds)"""
    with MEASURED_LAYERS.open(newline="") as file:
        return [(gpu, *map(int, sizes), float(ms) / 1e3) for gpu, *sizes, ms in list(csv.reader(file))[1:]]


def latent(case: tuple, given) -> Row:
    """Predicted seconds of a layer's latent attention in a decode of DeepSeek-V3, projections included, beside those measured in vLLM 0.20.

    Where little is stored, what is measured is mostly the time between small kernels, which is not priced: predictions are too low.
    """
    import transformers

    device, heads, batch, tokens, seconds = case
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    config = transformers.DeepseekV3Config(**sizes)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    mesh = presets.mesh(device, (1,))
    replayed = replace(mesh.device, launch=0.0, kernels=replace(mesh.device.kernels, host=0.0))
    graphs, options = ModelGraphs(divided(steps_of(model).decode(batch, tokens))), Options(baselines=False, compiled=True)
    question = Question(graphs, replace(mesh, device=replayed), options, Stopwatch(None))
    formulated = instance_of(question.stepped()).formulated
    costs = zip(formulated.graph.ops, formulated.problem.node_costs)
    predicted = sum(float(cost.min()) for op, cost in costs if op.module.startswith("model.layers.1.self_attn"))
    return {"measured_seconds": seconds, "predicted_seconds": predicted, "error": predicted / seconds - 1}


LATENT = Study(
    cases=lambda given: {f"{device}, {heads} heads, {batch} x {tokens}": (device, heads, batch, tokens, seconds)
                         for device, heads, batch, tokens, seconds in measured_layers()},
    measure=latent, alone=False,
)  # fmt: skip


# -- launches --------------------------------------------------------------------------------------------------------------------------

LLAMA70, LLAMA405, DEEPSEEK = FLAVORS["llama3", "70B"], FLAVORS["llama3", "405B"], FLAVORS["deepseek_v3", "671B"]
QWEN30, QWEN235 = FLAVORS["qwen3", "30B-A3B"], FLAVORS["qwen3", "235B-A22B"]
MIXTRAL22 = ModelSizes(56, 6144, 16384, 48, 8, 32000, experts=8, active=2, expert_ffn=16384)
NEMOTRON340 = ModelSizes(96, 18432, 73728, 96, 8, 256000, gated=False)
GPT3 = ModelSizes(96, 12288, 49152, 96, 96, 51200, tied=True, gated=False, learned_positions=True)


def launch(
    devices: int, seq: int, batch: int, tp: int, pp: int, *, vp: int = 1, ep: int = 1, cp: int = 1, mbs: int = 1, precision: str = "fp8",
    split: str = ENDS, zero: int = 1, hidden: bool = False, schedule: str = "", deepep: bool = True,
) -> Launch:  # fmt: skip
    data = devices // tp // pp // cp
    return Launch(
        devices, seq, batch, mbs, data, data, zero, tp, cp, ep, 1 if ep > 1 else tp, pp, vp,
        schedule or ("Interleaved1F1B" if vp > 1 else "1F1B"), "none", precision, tp > 1, async_expert=hidden, deepep=deepep,
        split=split if pp > 1 else "",
    )  # fmt: skip


FIRST = (LLAMA70, "h100", launch(32, 4096, 32, 4, 4, vp=5), 704)
POINTS = {  # kind: model TFLOP/s per GPU of the first two, tokens/s per GPU of the mixtures
    "tuning": {
        "TP4 PP4 VP5": FIRST,
        "PP8 VP5": (LLAMA70, "h100", launch(32, 4096, 32, 1, 8, vp=5), 668),
        "TP8": (LLAMA70, "h100", launch(32, 4096, 32, 8, 1), 509),
    },
    "one degree changed": {
        "TP4 PP4 VP5": FIRST,
        "TP4 PP8 VP5": (LLAMA70, "h100", launch(32, 4096, 32, 4, 8, vp=5), 668),
        "TP8 PP4 VP5": (LLAMA70, "h100", launch(32, 4096, 32, 8, 4, vp=5), 509),
    },
    "mixtures": {
        "DeepSeek-V3 1024 H100 TP2 PP8 VP4 EP64": (DEEPSEEK, "h100", launch(1024, 4096, 8192, 2, 8, vp=4, ep=64), 1297),
        "Qwen3 30B 16 H100 PP2 VP12 EP8": (QWEN30, "h100", launch(16, 4096, 1024, 1, 2, vp=12, ep=8), 5113),
        "Qwen3 235B 256 H100 TP2 PP8 VP4 EP32": (QWEN235, "h100", launch(256, 4096, 8192, 2, 8, vp=4, ep=32), 1633),
        "DeepSeek-V3 256 GB200 PP4 VP4 EP64 bf16": (
            DEEPSEEK, "gb200", launch(256, 4096, 4096, 1, 4, vp=4, ep=64, precision="bf16"), 3139,
        ),
        "Qwen3 30B 8 GB200 EP8 MBS4": (QWEN30, "gb200", launch(8, 4096, 512, 1, 1, ep=8, mbs=4), 26084),
        "Qwen3 235B 256 GB200 PP8 EP32": (QWEN235, "gb200", launch(256, 4096, 8192, 1, 8, ep=32), 5448),
    },
}  # fmt: skip


def launcher_points(case: tuple, given) -> Row:
    """Predicted against published rates of launches that no constant was fitted to: three ways to fine-tune a model, and mixtures of
    experts.

    Llama-3 70B fine-tuning on 32 H100, FP8: model TFLOP/s per GPU of TP4 PP4, PP8 and TP8. Sequences of 4096, a global batch of 32 and 5
    stages per device are those of NeMo's recipe for the first. The other degree of PP8 and of TP8 is not published, so both readings are
    printed: 1 (tuning; the states of 70.6e9 / 8 parameters alone take 79 GB there), and that of the first (one degree changed). Mixtures:
    tokens/s per GPU, from docs/performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge.
    """
    kind, (sizes, device, one, published) = case
    prices = prices_of(TrainingRuns.of([one]), sizes, Site(device, 72 if device == "gb200" else 8), "megatron")
    rate = float(prices.tokens_per_second[0])
    predicted = rate if kind == "mixtures" else float(sizes.flops_per_token(one.seq) * rate / 1e12)
    row = {"kind": kind, "predicted": predicted, "published": published, "error": predicted / published - 1}
    return {**row, "memory_bytes": float(prices.bytes[0]), "illegal": list(why_illegal(one, sizes, "megatron"))}


def launcher_totals(rows: list[Row]) -> Row:
    errors = {kind: [abs(row["error"]) for row in rows if row["kind"] == kind] for kind in POINTS}
    return {f"{kind}, median_error": float(np.median(some)) for kind, some in errors.items() if some}


LAUNCHER_POINTS = Study(
    cases=lambda given: {f"{kind}, {name}": (kind, one) for kind, rows in POINTS.items() for name, one in rows.items()},
    measure=launcher_points, totals=launcher_totals, alone=False,
)  # fmt: skip


# -- launches of large models, as published ------------------------------------------------------------------------------------------

META = "arXiv 2407.21783, table 4"
LARGE = {  # name: sizes, kind of GPU, launch, tokens/s (FLOP/s, MFU) per GPU, software, source
    "DeepSeek-V3, 2,048 H800": (
        DEEPSEEK, "h800", launch(2048, 4096, 15360, 1, 16, ep=64, vp=2, hidden=True, schedule="DualPipeV"), 14.8e12 / 2.664e6 / 3600,
        "bridge", "arXiv 2412.19437, table 1 and section 3.2: 14.8T tokens in 2.664M GPU hours"),
    "DeepSeek-V3, 1,024 H100": (
        replace(DEEPSEEK, mtp=1), "h100", launch(1024, 4096, 8192, 2, 8, vp=4, ep=64, hidden=True), 1297, "bridge", "Megatron-Bridge"),
    "Llama-3 405B, 8,192 H100": (
        LLAMA405, "h100", launch(8192, 8192, 2048, 8, 16, vp=4, zero=2, precision="bf16"), 430e12, "megatron", META),
    "Llama-3 405B, 16,384 H100": (
        LLAMA405, "h100", launch(16384, 8192, 2048, 8, 16, vp=4, zero=2, precision="bf16"), 400e12, "megatron", META),
    "Llama-3 405B, 16,384 H100, 131,072 tokens": (
        LLAMA405, "h100", launch(16384, 131072, 128, 8, 16, vp=4, cp=16, zero=2, precision="bf16"), 380e12, "megatron", META),
    "Qwen3 235B, 256 H100": (
        QWEN235, "h100", launch(256, 4096, 8192, 2, 8, vp=4, ep=32, hidden=True, deepep=False), 1712, "bridge", "Megatron-Bridge, archive"),
    "Qwen3 235B, 256 GB200": (
        QWEN235, "gb200", launch(256, 4096, 8192, 1, 8, vp=3, ep=32, hidden=True), 7360, "bridge", "Megatron-Bridge, archive"),
    "Mixtral 8x22B, 128 H100": (
        MIXTRAL22, "h100", launch(128, 4096, 256, 2, 8, vp=7, ep=8, split="", precision="bf16"), .493, "bridge",
        "arXiv 2504.14960: 49.3 % MFU; degrees of Megatron-LM's functional test"),
    "Nemotron-4 340B, 1,536 H100": (
        NEMOTRON340, "h100", launch(1536, 4096, 768, 8, 12, vp=8, split="", precision="bf16"), 768 * 4096 / 10.3 / 1536, "nemo",
        "Nemotron-4 340B report, table 2: 10.3 s"),
    "Nemotron-4 340B, 3,072 H100": (
        NEMOTRON340, "h100", launch(3072, 4096, 1536, 8, 12, vp=8, split="", precision="bf16"), 1536 * 4096 / 10.3 / 3072, "nemo",
        "Nemotron-4 340B report, table 2: 10.3 s"),
    "Nemotron-4 340B, 6,144 H100": (
        NEMOTRON340, "h100", launch(6144, 4096, 2304, 8, 12, vp=8, split="", precision="bf16"), 2304 * 4096 / 8.0 / 6144, "nemo",
        "Nemotron-4 340B report, table 2: 8.0 s"),
    "GPT-3 175B, 512 H100": (
        GPT3, "h100", launch(512, 2048, 2048, 4, 8, vp=6, mbs=2, split=""), 825, "nemo", "NeMo, performance summary: MLPerf's model"),
}  # fmt: skip


def large(case: tuple, given) -> Row:
    """Launches of large models as published: legal, predicted, and the best proposal of all launches of Megatron beside them.

    Predicted for the software that ran them. DeepSeek's own code hides experts' traffic as DualPipe does, which is priced as DualPipeV;
    Megatron has no such schedule. Where its extra prediction lies is not published: it is left out.
    """
    sizes, device, one, published, software, source = case
    site = Site(device, 72 if device == "gb200" else 8, 192e9 if device == "gb200" else 80e9)
    per_token = sizes.flops_per_token(one.seq)
    published = published / per_token if published > 1e9 else published * site.peak / per_token if published < 1 else published
    launcher = "torchtitan" if one.schedule == "DualPipeV" else "megatron"
    predicted = float(prices_of(TrainingRuns.of([one]), sizes, site, software).tokens_per_second[0])
    more = {}
    if not given.quick:
        ranked = ranking(one, sizes, site, "megatron")
        as_ranked = float(prices_of(TrainingRuns.of([one]), sizes, site, "megatron").tokens_per_second[0])
        best = float(ranked.prices.tokens_per_second[0])
        more = {"launches": len(ranked), "best": best, "above_published": best / published - 1, "above_itself": best / as_ranked - 1}
    illegal = list(why_illegal(one, sizes, launcher)) if launcher == "megatron" else []
    error = predicted / published - 1
    row = {"predicted": predicted, "published": published, "error": error, **more, "illegal": illegal}
    return {**row, "ok": not illegal and abs(error) <= 0.15}


LARGE_MODELS = Study(
    cases=lambda given: LARGE, measure=large, alone=False, options={"--quick": {"action": "store_true", "help": "without the ranking"}},
    totals=lambda rows: {"median_error": float(np.median([abs(row["error"]) for row in rows]))},
)  # fmt: skip


# -- seconds of a ranking --------------------------------------------------------------------------------------------------------------

LLAMAS = ("llama3_8b", "llama3_70b", "llama3_405b")
CLASSES = {"mixtral": ("MixtralConfig", "MixtralForCausalLM"), "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM")}


def degrees(case: tuple[str, int], given) -> Row:
    """CPU seconds of `autoshard degrees` with its bound, beside a limit: models x devices, each a command of its own.

    Configurations of Mixtral 8x7B and DeepSeek-V3 are the sizes of their classes in transformers, which are those of the models.
    For example: --only mixtral --devices 64 --more "--global-batch 256 --seq 8192"
    """
    name, devices = case
    defaults = [f"{word} {value}" for word, value in (("--seq", 4096), ("--global-batch", 1024)) if word not in given.more.split()]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(ROOT / "models")
        command = ["autoshard degrees", model_word(name, Path(folder)), f"--devices {devices}", *defaults, "--quiet", given.more]
        seconds, code = cpu_seconds(" ".join(command), folder)
    if code not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {code}")
    return {"cpu_seconds": seconds, "limit_seconds": given.limit, "fits": code == 0, "ok": seconds <= given.limit}


def model_word(name: str, folder: Path) -> str:
    """The model as the command takes it."""
    if name in LLAMAS:
        return f"models/llama.py:{name}"
    import transformers  # here: the Llamas don't need it

    config, architecture = CLASSES[name]
    sizes = {**getattr(transformers, config)().to_dict(), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(sizes))
    return f"hf:{folder}"


DEGREES = Study(
    cases=lambda given: {f"{name} on {n}": (name, n) for name in (*LLAMAS, *CLASSES) for n in given.devices}, measure=degrees, alone=False,
    options={
        "--devices": {"nargs": "*", "type": int, "default": [8, 64, 512, 1024]},
        "--limit": {"type": float, "default": 30.0, "help": "CPU seconds"},
        "--more": {"default": "", "help": "further words of the command"},
    },
)  # fmt: skip


# -- order of several launches of one model --------------------------------------------------------------------------------------------

SAME = ("arch", "gpus", "seq", "gbs", "prec", "gpu")  # columns of a table of published runs whose launches are alternatives
WORK = ("mbs", "ga", "dp", "tp", "sp", "pp", "vp", "cp", "rc", "fused", "asynctp", "rowwise")  # of twins: but the ZeRO stage
LIMIT = 0.15  # of a regret
DISTURBED = 1.5  # times its twin's seconds: both send the same bytes, so something else ran on the slower one's network
HOSTS = (
    "vTrain, width 2048: its blocks are bound by the host's launches. By the rows with tensor 4 these take 2.8 ms a block and\n"
    "microbatch, by those with tensor 2, and by those of width 1024 with tensor 4, 3.4, with tensor 8 3.7 to 5.0 (more with 1 sequence\n"
    "than with 4): no one host explains them. tensor 2 with 2 sequences takes 4.7 ms, with 4 sequences 6.4; twice 1 sequence without\n"
    "tensor parallelism 5.5."
)
GATHERS = (
    "nanotron, 3.57B on 128 and 8.86B on 256: with ZeRO 1 runs are 0.09 to 0.27 s slower than their twins without, wherever both are;\n"
    "0.05 to 0.08 are predicted. With data parallelism of 128 alone, or beside pipelines, only one of both is published."
)


def ranks(case: list, given) -> Row:
    """Published sets of three and more launches of one model, cluster and batch: is their order the predicted one, and what would it have
    cost to take the launch that is predicted to be the fastest?

    Runs that took over 1.5 times as long as their twins are counted as disturbed and left out of the regret; `regret_of_all` has them. A
    set whose twins differ by over 15 % in the middle (`twins`) can't show a regret of 15 %: it is unresolved, and printed as such.
    """
    measured, predicted = (np.array(column) for column in list(zip(*case))[:2])
    of: dict[tuple, list[float]] = {}
    for seconds, _, work in case:
        of.setdefault(work, []).append(seconds)
    calm = np.array([seconds <= DISTURBED * min(of[work]) for seconds, _, work in case])
    places = [np.argsort(np.argsort(column)) for column in (measured, predicted)]
    regret, of_all = (float(m[p.argmin()] / m.min() - 1) for m, p in ((measured[calm], predicted[calm]), (measured, predicted)))
    twins = float(np.median([max(pair) / min(pair) - 1 for pair in of.values() if len(pair) > 1] or [0.0]))
    row = {"launches": len(case), "spearman": float(np.corrcoef(*places)[0, 1]), "regret": regret, "regret_of_all": of_all}
    row |= {"spread": float(measured.max() / measured.min() - 1), "disturbed": int((~calm).sum()), "twins": twins}
    return {**row, "resolved": twins <= LIMIT, "ok": regret <= LIMIT or twins > LIMIT}


def published_sets(given) -> dict[str, list]:
    """source, model and so on: measured and predicted seconds and the work of a run; without suspect rows, and those of the older pipeline
    code."""
    table = published.read(given.data)
    seconds, sets = published.predicted_seconds(table.runs), {}
    for row, source, apart, measured, ours in zip(table.rows, table.source, table.apart, table.seconds, seconds):
        name = " ".join([source, *(str(row[column]) for column in SAME)])
        if not apart and np.isfinite(measured):
            sets.setdefault(name, []).append((float(measured), float(ours), tuple(row[column] for column in WORK)))
    return {name: rows for name, rows in sets.items() if len(rows) >= 3}


def rank_totals(rows: list[Row]) -> Row:
    resolved = [row["regret"] for row in rows if row["resolved"]]
    medians = {f"median_{key}": float(np.median([row[key] for row in rows])) for key in ("spearman", "regret")}
    figures = {"sets": len(rows), **medians, "mean_regret": float(np.mean([row["regret"] for row in rows]))}
    figures |= {"largest_resolved_regret": max(resolved, default=0.0), "missed": sum(not row["ok"] for row in rows)}
    return {**figures, "unresolved": len(rows) - len(resolved), "largest_regret_of_all": max(row["regret_of_all"] for row in rows)}


RANKS = Study(
    cases=published_sets, measure=ranks, alone=False, totals=rank_totals,
    notes={"h2048_a16": HOSTS, "nanotron nt_3.57B 128": GATHERS},
)  # fmt: skip

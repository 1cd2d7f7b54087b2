"""Launches that were published as running or as out of memory: what `autoshard fits` says of them.

    PYTHONPATH=. python benchmarks/fits.py [tests/data/launchers/published_fits.json] [--plans] [--json]

The table names each launch's source and what its figure means: torch's max_memory_allocated or max_memory_reserved. A launch is answered
rightly that ran and is said to fit (yes or tight), or was out of memory and is said not to.

--plans: 4 blocks on 8 devices, as `fits` has them and as the program of a plan with the launch's scheme pinned holds them. What a step
keeps is the same, where the launcher's kernels are the model's ops. The launcher's rules are in `fits` alone: FSDP keeps the ends' whole
parameters and fetches a block ahead; Megatron has all gradients in float32 from the first step on, gathers sequences again in the backward
where the plan keeps them, and fuses norms and gates, which then keep less.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from autoshard import Mesh
from autoshard.capture import capture
from autoshard.launch import Launch, LaunchConfig, ModelSizes, Site
from autoshard.launch.fitting import will_fit
from autoshard.precision import Precision
from models import gpt2, llama
from tests.helpers_models import scheme_plan

TABLE = Path(__file__).parent.parent / "tests" / "data" / "launchers" / "published_fits.json"


def answered(row: dict[str, Any]) -> dict[str, Any]:
    """One launch, with what is said of it."""
    began = time.process_time()
    model = {**row["model"], "latent": tuple(row["model"].get("latent", ()))}
    site = Site(row["device"], memory=row["memory_bytes"])
    answer = will_fit(LaunchConfig(Launch(**row["launch"]), ModelSizes(**model)), row["launcher"], site)
    told = answer.to_dict()
    predicted = None if row["figure"] is None or answer.memory is None else float(getattr(answer.memory, row["figure"])[0])
    return {
        **{key: row[key] for key in ("name", "source", "ran", "figure", "measured_bytes")}, "predicted_bytes": predicted,
        "verdict": told["verdict"], "chance": told["chance_to_fit"], "right": (told["verdict"] != "no") == row["ran"],
        "reasons": told["reasons"], "fullest": told["fullest"], "cpu_seconds": time.process_time() - began,
    }  # fmt: skip


WIDTH, HEADS, SEQ = 1024, 16, 1024
MODELS = {
    "gpt2": (gpt2.build, {"positions": SEQ}, ModelSizes(4, WIDTH, 4 * WIDTH, HEADS, HEADS, 50304, tied=True, gated=False)),
    "llama": (llama.build, {"kv_heads": 8, "hidden": 2816}, ModelSizes(4, WIDTH, 2816, HEADS, 8, 32000)),
}  # fmt: skip
SCHEMES = {  # of a plan: launcher, precision, degrees
    "fsdp": ("torchtitan", "bf16", {"data": 8, "shard": 8, "zero": 3}),
    "megatron_sp": ("megatron", None, {"data": 1, "tensor": 8, "sequence_parallel": True}),
}
SAME = {"parameters": "parameters", "optimizer": "optimizer_state", "gathered": "resharded_copies", "gradients": "gradients"}


def beside_a_plan(name: str, scheme: str, microbatch: int = 2) -> dict[str, dict[str, float]]:
    """Bytes by kind at the fullest moment: of the launch, and of the plan's program in training with AdamW."""
    (build, more, sizes), (launcher, precision, degrees) = MODELS[name], SCHEMES[scheme]
    batch, dtype = microbatch * degrees["data"], "float32" if precision else "bfloat16"
    shape = {"layers": sizes.layers, "heads": HEADS, "width": WIDTH, "vocab": sizes.vocab, "seq": SEQ, "loss": True}
    graph = capture(*build(**shape, **more, batch=batch, dtype=dtype), training=True, precision=Precision.of(precision))
    plan = scheme_plan(graph, Mesh.from_bandwidths((8,)), scheme, training=True, master_weights=precision is None)
    memory = will_fit(LaunchConfig(Launch(8, SEQ, batch, microbatch=microbatch, **degrees), sizes), launcher, Site()).memory
    assert memory is not None
    of_launch = {kind: float(bytes[0]) for kind, bytes in memory.fullest().kinds.items()}
    of_plan = {kind: plan.peak["parts"].get(theirs, 0.0) for kind, theirs in SAME.items()}
    step = ("activations", "logits", "temporaries", "transfers", "inputs")
    of_launch["step"], of_plan["step"] = (sum(of.get(kind, 0.0) for kind in step) for of in (of_launch, plan.peak["parts"]))
    return {"fits": {kind: of_launch[kind] for kind in of_plan}, "plan": of_plan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.plans:
        cells = {f"{name}, {scheme}": beside_a_plan(name, scheme) for name in MODELS for scheme in SCHEMES}
        lines = [
            f"{cell:20} {who:5} {sum(of.values()) / 1e9:7.3f} GB: " + ", ".join(f"{kind} {bytes / 1e9:.3f}" for kind, bytes in of.items())
            for cell, both in cells.items() for who, of in both.items()
        ]  # fmt: skip
        return print(json.dumps(cells) if arguments.json else "\n".join(lines))
    rows = [answered(row) for row in json.loads(arguments.table.read_text())]
    if arguments.json:
        return print(json.dumps({"rows": rows, "right": sum(row["right"] for row in rows)}))
    for row in rows:
        off = "" if row["measured_bytes"] is None else f"{row['predicted_bytes'] / row['measured_bytes'] - 1:+.1%} of {row['figure']}"
        device = row["fullest"] and f"{row['fullest']['device_bytes'] / 1e9:.1f} GB"
        said = f"{'ran' if row['ran'] else 'OOM':3} {row['verdict']:5} {row['chance']:4.0%} {device or '':9} {off:20}"
        print(said, row["name"], *row["reasons"])
        kinds = {} if row["fullest"] is None else row["fullest"]["bytes_by_kind"]
        print(" " * 14 + ", ".join(f"{kind} {bytes / 1e9:.1f}" for kind, bytes in kinds.items() if bytes))
    print(f"right: {sum(row['right'] for row in rows)} of {len(rows)}; {max(row['cpu_seconds'] for row in rows):.1f} CPU seconds at most")


if __name__ == "__main__":
    main()

"""CPU seconds and memory of planning, phase by phase, for large models and over depth; and of using a plan again.

    python benchmarks/planning_time.py [DIR] [--only NAME ...] [--small | --depths | --reuse | --grid [--every N] [--limits S ...]] [--json]

DIR holds the models' files (default: models/). Every case runs in a process of its own on one core with one thread; seconds are its CPU
seconds after the imports and with numba's functions compiled (they are cached on disk; the first run on a machine compiles). rss: the
process's largest, imports included. --small plans training steps of small models instead, baselines and offers of padding included; on
most of them dual ascent leaves a gap. --depths plans Llama-3 8B dims at 2 to 126 layers; --reuse puts a saved 32-layer plan onto the
captured graph, and reads layouts of parameters from the file alone. --grid plans the neighbours of these cases: five models on five meshes
(planning_grid.py); with --every N one in N of its 404 cells, a mixture: the first ones of an order in which neighbours
differ in everything (each Nth of that order would, for an even N, be all without recomputation). --limits 2 20 60 plans each of these
cells with these time limits in CPU seconds, gap 0, and prints by how much it took longer.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

from benchmarks import planning_grid
from benchmarks.own_process import in_own_process

LLAMA, GPT2 = "llama.py:llama3_8b", "gpt2.py:small"
CASES: dict[str, dict] = {  # limits are CPU seconds, GiB, and the largest gap
    "llama3-8b 8x8": {"model": LLAMA, "mesh": (8, 8), "limits": (12, 1.5, 1e-3)},
    "llama3-405b 16x8": {"model": "llama.py:llama3_405b", "mesh": (16, 8), "limits": (20, None, 1e-3)},
    "gpt2-small 2x4": {"model": GPT2, "mesh": (2, 4), "limits": (6, None, 1e-3)},
    "llama3-8b 4x4x8": {"model": LLAMA, "mesh": (4, 4, 8), "gap": 0.01, "limits": (60, None, 1e-2)},
}
FREE = (None, None, 1e-3)
SECONDS = (10, None, 1e-9)  # most of it is torch's capture
RESNET, GEMMA3 = "resnet.py:resnet18", {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6}
JAMBA = {
    "model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    "mamba_d_state": 8, "mamba_dt_rank": 8,
}  # fmt: skip
DETR = {"encoder_layers": 2, "decoder_layers": 2}
SMALL: dict[str, dict] = {
    "resnet18 2x4": {"model": RESNET, "mesh": (2, 4), "limits": SECONDS},
    "resnet18 16x8": {"model": RESNET, "mesh": (16, 8), "settings": {"batch": 32}, "limits": SECONDS},
    "resnet18 2x2x2": {"model": RESNET, "mesh": (2, 2, 2), "limits": SECONDS},
    "unet 2x4": {"model": "unet.py:base", "mesh": (2, 4), "limits": SECONDS},
    "unet batch 4 2x4": {"model": "unet.py:base", "mesh": (2, 4), "settings": {"batch": 4}, "limits": SECONDS},
    "gemma3 2x4": {"config": GEMMA3, "mesh": (2, 4), "settings": {"seq": 128}, "limits": SECONDS},
    "jamba 2x4": {"config": JAMBA, "mesh": (2, 4), "limits": SECONDS},
    "detr 2x4": {"detr": DETR, "mesh": (2, 4), "limits": SECONDS},
}  # fmt: skip
DEPTHS = (2, 4, 8, 16, 32, 64, 126)
MOST_GROWTH = 1.5  # from 8 layers to 126
REUSE_LIMITS = {"preload": 1.0, "sharding_map": 0.3}  # CPU seconds
PHASES = ("capture", "candidates", "formulate", "solve", "describe", "total")


def cases(depths: bool, small: bool) -> dict[str, dict]:
    if small:
        return {name: {**case, "baselines": True} for name, case in SMALL.items()}
    if not depths:
        return CASES
    return {f"llama3-8b {n} layers": {"model": LLAMA, "mesh": (8, 8), "settings": {"layers": n}, "limits": FREE} for n in DEPTHS}


# -- in the process that is measured ---------------------------------------------------------------------------------------------------


def plan_once(case: dict, folder: str, out: str | None = None) -> dict:
    """One plan, timed after the imports."""
    import torch

    from autoshard import api
    from autoshard.mesh import Mesh
    from autoshard.planning.options import Stopwatch
    from autoshard.planning.plan import plan

    torch.set_num_threads(1)
    warm_up(api, Mesh)
    module, example_inputs = built(case, folder)
    mesh = Mesh.from_bandwidths(tuple(case["mesh"]), devices_per_node=min(8, case["mesh"][-1]))
    options = {"baselines": case.get("baselines", False), "gap": case.get("gap", 0.0), **case.get("options", {})}
    watch = Stopwatch(None, time.process_time)
    began = time.process_time()
    try:
        solution = plan(module, example_inputs, mesh, training=True, watch=watch, **options)
    except api.Infeasible as error:
        total = time.process_time() - began
        none = {"status": error.status, "gap": math.inf, "message": str(error), "peak_rss_bytes": peak_rss()}
        return {**none, "cpu_seconds": {**watch.cpu, "total": total}}
    total = time.process_time() - began
    if out is not None:
        solution.save(out)
    return {
        "status": solution.status,
        "gap": solution.gap,
        "cost_seconds": solution.cost,
        "cpu_seconds": {**solution.seconds["cpu"], "total": total},
        "ops": len(solution.layouts),
        **solution.counts,
        "peak_rss_bytes": peak_rss(),
    }


def built(case: dict, folder: str):
    """(module, example inputs)"""
    from autoshard.cli.model import load_model

    settings = case.get("settings", {})
    if "detr" in case:
        return detr(case["detr"])
    if "config" not in case:
        return load_model(f"{folder}/{case['model']}", settings)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(case["config"]))
        return load_model(f"hf:{scratch}", settings, training=True)


def detr(config: dict):
    """DETR on transformers' ResNet, without the matching of its loss: that depends on the data."""
    import torch
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    class Means(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            backbone = ResNetConfig(out_features=["stage4"])
            self.model = DetrForObjectDetection(DetrConfig(backbone_config=backbone, use_timm_backbone=False, **config)).eval()

        def forward(self, images, mask):
            found = self.model(pixel_values=images, pixel_mask=mask)
            return found.logits.mean() + found.pred_boxes.mean()

    with torch.device("meta"):
        return Means(), (torch.empty(8, 3, 224, 224), torch.ones(8, 224, 224, dtype=torch.int64))


def warm_up(api, Mesh) -> None:
    """A plan of next to nothing: lazy imports (of torch, numba, HiGHS) happen now."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    api.plan(module, (torch.zeros(8, 8),), Mesh.from_bandwidths((2,)), baselines=False)


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reuse_once(folder: str, path: str) -> dict:
    """Seconds to put a saved plan onto a captured graph, and to get a model's layouts from the file without a capture."""
    import torch

    from autoshard import api
    from autoshard.api.passes import annotate
    from autoshard.capture import capture_module
    from autoshard.cli.model import load_model
    from autoshard.exports.sharding_map import unbacked_mesh
    from autoshard.mesh import Mesh
    from autoshard.solution import misfits

    torch.set_num_threads(1)
    warm_up(api, Mesh)
    api.export(api.load(path), "sharding_map")  # DTensorSpec and its friends are imported when first used
    began = time.process_time()
    api.export(api.load(path), "sharding_map")
    sharding_map = time.process_time() - began
    module, example_inputs = load_model(f"{folder}/{LLAMA}", {})
    captured = capture_module(module, example_inputs, training=True)  # all layers, with the fx graph that is annotated
    began = time.process_time()
    found = api.load(path)
    wrong = misfits(found, captured.graph, found.mesh)
    annotate(captured, found, unbacked_mesh(found.mesh))
    preload = time.process_time() - began
    assert not wrong, wrong
    return {"preload": preload, "sharding_map": sharding_map, "ops": len(found.layouts)}


# -- the table -------------------------------------------------------------------------------------------------------------------------


def judged(name: str, case: dict, row: dict) -> dict:
    seconds, gibibytes, gap = case["limits"]
    ok = (
        (seconds is None or row["cpu_seconds"]["total"] <= seconds)
        and (gibibytes is None or row["peak_rss_bytes"] <= gibibytes * 2**30)
        and row["gap"] <= gap
    )
    return {"case": name, **row, "limit_seconds": seconds, "ok": ok}


def line(row: dict) -> str:
    phases = " ".join(f"{row['cpu_seconds'].get(phase, 0.0):>10.2f}" for phase in PHASES)
    return (
        f"{row['case']:20} {row['nodes']:>7} {row['distinct_signatures']:>6} {phases} {row['peak_rss_bytes'] / 2**30:>6.2f} "
        f"{row['status']:>9} {row['gap']:>8.1e} {'ok' if row['ok'] else 'MISSED'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "models")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--depths", action="store_true")
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="of the grid: one in so many cells")
    parser.add_argument("--limits", type=float, nargs="*", default=[], help="of the grid: time limits in CPU seconds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.order:
        order = json.loads(given.order)
        print(json.dumps(reuse_once(order["folder"], order["path"]) if "path" in order else plan_once(**order)))
        return 0
    if given.reuse:
        return reuse(given.folder, given.json)
    if given.grid:
        return grid(given.folder, given.only, given.every, given.limits, given.json)
    rows = []
    if not given.json:
        heads = " ".join(f"{phase:>10}" for phase in PHASES)
        print(f"{'':20} {'nodes':>7} {'signs':>6} {heads} {'GiB':>6} {'status':>9} {'gap':>8}")
    for name, case in cases(given.depths, given.small).items():
        if given.only is None or any(part in name for part in given.only):
            rows.append(judged(name, case, in_own_process(__file__, {"case": case, "folder": str(given.folder)})))
            if not given.json:
                print(line(rows[-1]), flush=True)
    ok = all(row["ok"] for row in rows)
    result = {"rows": rows}
    total = {row["case"]: row["cpu_seconds"]["total"] for row in rows}
    if {f"llama3-8b {n} layers" for n in (8, 126)} <= set(total):
        result["growth"] = total["llama3-8b 126 layers"] / total["llama3-8b 8 layers"]
        ok &= result["growth"] <= MOST_GROWTH
        if not given.json:
            print(f"from 8 to 126 layers: {result['growth']:.2f}x")
    if given.json:
        print(json.dumps({**result, "ok": ok}))
    return not ok


def grid(folder: Path, only: list[str] | None, every: int, limits: list[float], as_json: bool) -> int:
    def planned(case: dict, gap: float) -> dict:
        try:
            return in_own_process(__file__, {"case": {**case, "gap": gap}, "folder": str(folder)})
        except subprocess.CalledProcessError as error:  # a cell that ends without a sentence: it counts as missed
            return {"status": "crashed", "gap": math.inf, "message": str(error)[-80:], "peak_rss_bytes": 0, "cpu_seconds": {"total": 0.0}}

    names = [name for name in planning_grid.cells() if only is None or any(part in name for part in only)]
    rows = []
    if not as_json:
        print(planning_grid.LIMITED_HEADS if limits else planning_grid.HEADS)
    for name, limit in itertools.product(names[: math.ceil(len(names) / every)], limits or [None]):
        case = planning_grid.cells()[name]
        if limit is None:
            row = {"case": name, **planning_grid.planned_row(case, planned)}
            rows.append({**row, "ok": planning_grid.is_ok(row)})
        else:
            row = planned({**case, "options": {**case["options"], "time_limit": limit}}, 0.0)
            row |= {"case": name, "limit": limit, "over_seconds": planning_grid.over(row, limit)}
            rows.append({**row, "ok": planning_grid.keeps_limit(row, limit)})
        if not as_json:
            print(planning_grid.line(rows[-1]) if limit is None else planning_grid.limited_line(rows[-1]), flush=True)
    missed = [row["case"] for row in rows if not row["ok"]]
    ok = len(missed) <= (0 if limits else planning_grid.MOST_MISSED * len(rows))
    text = f"{len(rows)} cells, missed: {', '.join(missed) or 'none'}"
    print(json.dumps({"rows": rows, "missed": missed, "ok": ok}) if as_json else text)
    return not ok


def reuse(folder: Path, as_json: bool) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "plan.json")
        planned = in_own_process(__file__, {"case": CASES["llama3-8b 8x8"], "folder": str(folder), "out": path})
        row = in_own_process(__file__, {"folder": str(folder), "path": path})
    row["ok"] = all(row[key] <= limit for key, limit in REUSE_LIMITS.items())
    row["cost_seconds"] = planned["cost_seconds"]
    if as_json:
        print(json.dumps(row))
    else:
        print(f"{row['ops']} ops: preload {row['preload']:.2f} CPU s, sharding map {row['sharding_map']:.2f} CPU s")
    return not row["ok"]


if __name__ == "__main__":
    sys.exit(main())

"""Twelve plans under several versions of torch: are the costs equal, and does `check` name what another torch traces differently?

    python benchmarks/torch_versions.py PYTHON [PYTHON ...] [--only PLAN ...]

Each PYTHON is an interpreter whose torch is one of the versions, for example build/matrix/torch2.15.0-newest/python of matrix.py. It plans
the models, and checks the plans that the first one made. That holds where the cost is that of the first version (to 1e-9) and `check`
finds the plan good, or where `check` names the ops that differ and has planned anew, to the cost that this version plans itself.
"""

# ruff: noqa: E402  (this folder must not hide packages)
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"]
sys.path.insert(0, str(ROOT))

PLANS: dict[str, tuple[str, bool, tuple[int, ...], dict]] = {  # model of fake_cuda.py, training, mesh, options of plan
    "gpt2, training, 2x2": ("gpt2", True, (2, 2), {}),
    "gpt2, inference, 8": ("gpt2", False, (8,), {}),
    "llama, training, bf16, 2x4": ("llama", True, (2, 4), {"precision": "bf16"}),
    "moe, training, 2x2": ("moe", True, (2, 2), {}),
    "resnet, training, 4": ("resnet", True, (4,), {}),
    "unet, inference, 2x2": ("unet", False, (2, 2), {}),
    "dlrm, training, 8": ("dlrm", True, (8,), {}),
    "bert, training, recompute, 2x2": ("bert", True, (2, 2), {"recompute": "all"}),
    "vit of transformers, training, 2x2": ("vit", True, (2, 2), {}),
    "t5 of transformers, training, 4": ("t5", True, (4,), {}),
    "whisper of transformers, inference, 2x2": ("whisper", False, (2, 2), {}),
    "qwen3 of transformers, training, 2x2": ("qwen3", True, (2, 2), {}),
}
EQUAL = 1e-9  # relative: costs that are called equal
MESH = {"intra_node_bandwidth": 300e9, "inter_node_bandwidth": 50e9, "device": "h100"}


def plans(names: list[str], folder: Path) -> dict:
    """In this interpreter: the plans, saved into the folder."""
    import torch

    import autoshard
    from benchmarks import fake_cuda

    rows = {}
    for k, name in enumerate(names):
        model, training, shape, options = PLANS[name]
        mesh = autoshard.Mesh.from_bandwidths(shape, **MESH)
        solution = autoshard.plan(*fake_cuda.built(model, training), mesh, training=training, baselines=False, **options)
        solution.save(folder / f"{k}.json")
        rows[name] = {"cost": solution.cost, "ops": len(solution.layouts) - len(solution.parameters)}
    return {"torch": torch.__version__.split("+")[0], "plans": rows}


def checks(names: list[str], folder: Path) -> dict:
    """In this interpreter: what `check` says of the plans in the folder."""
    import autoshard
    from benchmarks import fake_cuda

    rows = {}
    for k, name in enumerate(names):
        model, training, _, _ = PLANS[name]
        checked = autoshard.check(*fake_cuda.built(model, training), autoshard.load(folder / f"{k}.json"))
        named = [line for line in (*checked.reasons, *checked.notes) if "traced it then" in line]
        rows[name] = {"ok": checked.ok, "best": checked.best, "named": named, "reasons": list(checked.reasons)}
    return rows


def asked(python: str, what: str, names: list[str], folder: Path) -> dict:
    command = [python, __file__, "--here", what, "--folder", str(folder), "--only", *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        sys.exit(f"{python} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def holds(row: dict, first: dict, checked: dict) -> bool:
    equal = abs(row["cost"] - first["cost"]) <= EQUAL * abs(first["cost"])
    anew = abs(row["cost"] - checked["best"]) <= EQUAL * abs(row["cost"])
    return (equal and checked["ok"]) or bool(checked["named"]) and (checked["ok"] or anew)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="*")
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--here", choices=("plans", "checks"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps({"plans": plans, "checks": checks}[given.here](given.only, given.folder)))
        return 0
    if len(given.python) < 2:
        sys.exit("give at least two interpreters, each with a torch of its own")
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for k, python in enumerate(given.python):
            (own := Path(folder) / str(k)).mkdir()
            made.append((asked(python, "plans", given.only, own), asked(python, "checks", given.only, Path(folder) / "0")))
    first, failed = made[0][0]["plans"], 0
    for name in given.only:
        print(name)
        for planned, checked in made:
            row, answer = planned["plans"][name], checked[name]
            good = holds(row, first[name], answer)
            failed += not good
            said = "; ".join(answer["named"] or answer["reasons"]) or "the same ops"
            print(f"    torch {planned['torch']:8} {row['cost']:.12e} s {row['ops']:5} ops   {'holds' if good else 'FAILS'}: {said}")
    print(f"{len(given.only) * len(made) - failed} of {len(given.only) * len(made)} hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

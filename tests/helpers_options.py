"""Every option of every verb beside what the verb is given: command lines that differ in one option, and what changes with it."""

import json
import re
from functools import cache
from pathlib import Path

from tests.helpers_command import run

ROOT = Path(__file__).parent.parent
DATA = f"{ROOT}/tests/data"
MLP, TINY, GPT2, MOE = (f"{ROOT}/models/{name}" for name in ("mlp.py:mlp", "mlp.py:tiny", "gpt2.py:tiny", "moe.py:tiny"))
LLAMA, MIXTRAL = f"hf:{DATA}/hf/llama", f"hf:{DATA}/hf/mixtral"
TITAN, PROBLEMS = "job.toml", "problems.json"
TABLES = "name,rows,columns,pooling,skew\n" + "".join(f"t{k},{1000 * 4**k},{32 * (k + 1)},{3 + k},0\n" for k in range(6))
TITAN_TEXT = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
"""
EVIDENCE = json.dumps({name: [{"measured_bytes": 2e9, "predicted_bytes": 1e9}] for name in ("torchtitan", "megatron")})
PROGRAMS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from autoshard import Program
from models import mlp

def programs(batch: int = 32):
    return {{"train": Program(*mlp.mlp(batch=batch), training=True), "use": Program(*mlp.mlp(batch=8, loss=False), weight=4)}}

def train(batch: int = 32):
    return mlp.mlp(batch=batch)
"""
ROUTES = Path(f"{DATA}/redistribution/problems.json").read_text()
SERVED = ["--set", "layers=1", "--devices", "2", "--max-tokens", "64", "--batch", "4"]

# verb: {situation: what it is given}; every option of the verb is added to each of them
SITUATIONS = {
    "plan": {
        "train": [MLP, "--mesh", "2x2", "--train"],
        "forward": [TINY, "--mesh", "1"],
        "auto": [TINY, "--mesh", "auto", "--devices", "4"],
        "keep": [MLP, "--keep", "edited.json"],
        "experts": [MIXTRAL, "--mesh", "2", "--set", "layers=1", "--batch", "4", "--seq", "8"],
        "programs": ["rl.py:programs", "--mesh", "2"],
    },
    "frontier": {"train": [TINY, "--mesh", "2x2", "--train", "--points", "1"]},
    "pipeline": {"train": [TINY, "--devices", "4", "--no-grid", "--schedules", "1f1b", "--microbatches", "2", "--workers", "1"]},
    "simulate": {
        "model": [MLP, "--data", "2"],
        "tensor": [MLP, "--tensor", "2", "--data", "2"],
        "stages": [MLP, "--pipeline", "2", "--microbatches", "4", "--set", "layers=4"],
        "alone": [MLP],
        "plan": ["plan.json", "--trust"],
        "cluster": [MLP, "--cluster", "cluster.json", "--data", "2"],
        "fsdp": [MLP, "--data", "2", "--scheme", "fsdp"],
    },
    "show": {
        "plan": ["plan.json"], "programs": ["programs.json"], "equal": ["plan.json", "plan.json"], "other": ["plan.json", "edited.json"],
        "page": ["plan.json", "--html", "new.html", "--trust"], "page without model": ["plan.json", "--html", "new.html", "--no-model"],
    },
    "verify": {"plan": ["tiny.json", "--trust"]},
    "explain": {
        "name": ["plan.json", "layers.0.up.weight", "--trust"],
        "why not": ["plan.json", "layers.0.up.weight", "--trust", "--why-not", "R,R"],
        "robust": ["plan.json", "--robust", "--trust"],
        "all": ["plan.json"],
    },
    "check": {"plan": ["plan.json", "--trust"], "launcher": [TITAN, "--launcher", "torchtitan", "--devices", "8"]},
    "fits": {
        "model": [LLAMA, "--devices", "8", "--seq", "64", "--microbatch", "4"],
        "megatron": [LLAMA, "--devices", "8", "--seq", "64", "--launcher", "megatron"],
        "configuration": [TITAN, "--devices", "8"],
    },
    "degrees": {
        "bound": [LLAMA, "--devices", "2", "--seq", "16", "--global-batch", "4", "--launcher", "megatron"],
        "no bound": [LLAMA, "--devices", "8", "--no-bound", "--seq", "64", "--global-batch", "16"],
        "megatron": [LLAMA, "--devices", "8", "--no-bound", "--launcher", "megatron", "--seq", "64", "--global-batch", "16"],
    },
    "doctor": {"model": [GPT2, "--device", "cpu"], "alone": []},
    "export": {
        "map": ["plan.json"], "tp_plan": ["plan.json", "--format", "tp_plan", "--within", "9"],
        "fully_shard": ["plan.json", "--format", "fully_shard", "--within", "9"],
    },
    "redistribute": {"mesh": ["problems.json"]},
    "serve-plan": {"experts": [MIXTRAL, *SERVED]},
    "solve": {"plain": [f"{DATA}/iopddl/example.json"]},
    "tables": {"one": ["tables.csv", "--devices", "4"], "two": ["tables.csv", "--devices", "2x2"]},
    "calibrate show": {"all": [], "one": ["h100"]},
    "calibrate fit": {"csv": [f"{DATA}/collectives/measured.csv"], "json": [f"{DATA}/collectives/intra_2.json"]},
}  # fmt: skip

# a value other than the default; per verb where it needs its own
VALUES = {
    "mesh": "4", "settings": "width=256", "batch": "16", "seq": "8", "dtype": "bfloat16", "cluster": "cluster.json", "devices": "2",
    "memory": "70GB", "out": "new.json", "time_limit": "77", "gap": "0.3", "solver": "ilp", "intra_node_bandwidth": "9GB/s",
    "inter_node_bandwidth": "7GB/s", "device": "a100", "prices": "a100", "devices_per_node": "1", "optimizer": "sgd",
    "precision": "bf16", "microbatches": "4", "expert_imbalance": "3.0", "global_batch": "128", "objective": "overlapped",
    "recompute": "all", "sequence_order": "natural", "pins": "layers.*.up.weight=R,R", "forbid": "layers.*.up.weight=R,R",
    "keep": "edited.json", "free": "layers.1.*", "points": "2", "csv": "new.csv", "plot": "new.svg", "save_dir": "plans",
    "nodes": "1x2:a100", "schedules": "gpipe", "layers": "2", "stages": "2", "workers": "1", "dask": "tcp://127.0.0.1:1",
    "data": "4", "tensor": "4", "pipeline": "2", "schedule": "gpipe", "chunks": "2", "scheme": "fsdp", "prefetch": "0",
    "trace": "new.json", "picture": "new.svg", "random": "1", "seed": "5", "why_not": "S(0),R",
    "alternatives": "1", "within": "0.4", "launcher": "megatron", "microbatch": "2", "per_node": "2", "top": "1", "kind": "json",
    "dp": "2", "shard": "2", "ep": "1", "zero": "1",
    "evidence": "memory.json", "observed": "3MB", "tp": "2", "pp": "2", "cp": "2", "target": "job.toml",
    "row": "2", "axis": "a", "frontier": "frontier.json", "switches": "9", "planner": "naive", "memory_limit": "1GB", "count": "buffers",
    "max_tokens": "128", "prompt": "9", "hbm": "1GB", "host_memory": "1GB",
    "host_bandwidth": "1GB/s", "reserve": "0.5", "effort": "0.1", "collective": "all_reduce", "system": "b",
    "seconds": "2", "largest": "1MB", "backend": "gloo", "name": "h100", "model": MLP, "other": "edited.json", "html": "new.html",
    "dynamic_shapes": "input_*=batch:1-64", "criterion": "worst",
}  # fmt: skip
OWN = {
    ("check", "within"): "0%", ("check", "out"): "new.toml", ("degrees", "out"): "new.toml",
    ("degrees", "recompute"): "full", ("degrees", "schedule"): "none",
    ("fits", "recompute"): "full", ("fits", "precision"): "fp8", ("fits", "settings"): "layers=1", ("fits", "devices"): "16",
    ("explain", "name"): "layers.0.down.weight", ("pipeline", "recompute"): "always", ("tables", "devices"): "2",
    ("degrees", "precision"): "fp8", ("verify", "device"): "cuda", ("doctor", "device"): "cuda", ("doctor", "model"): MLP,
    ("verify", "model"): f"{ROOT}/models/mlp.py:tiny", ("degrees", "settings"): "layers=1",
    ("simulate", "microbatches"): "2",
    ("calibrate fit", "devices"): "2", ("degrees", "memory"): "500MB", ("pipeline", "microbatches"): "4", ("pipeline", "devices"): "2",
    ("serve-plan", "settings"): "layers=2", ("serve-plan", "memory"): "1MB", ("frontier", "settings"): "width=64",
    ("serve-plan", "devices"): "4", ("plan", "seq"): "16", ("plan", "memory_limit"): "70GB",
    ("verify", "batch"): "8", ("redistribute", "count"): "resident", ("serve-plan", "dtype"): "float32", ("degrees", "devices"): "4",
    ("doctor", "settings"): "layers=1", ("check", "devices"): "16",
}  # fmt: skip
HOST = ("cpu_seconds", "wall_seconds", "seconds_of_host", "autosharding_time", "imports")  # of the planning host


# files that the command lines name: made when one does; {name: the command line that writes it}
WRITES = {
    "plan.json": ["plan", MLP, "--mesh", "2x2", "--train"],
    "tiny.json": ["plan", TINY, "--mesh", "2", "--train"],
    "programs.json": ["plan", "rl.py:programs", "--mesh", "2"],
    "frontier.json": ["frontier", TINY, "--mesh", "2x2", "--train", "--points", "1"],
}


def prepare(argv: list[str], folder: Path) -> None:
    """The files that a command line names, in the folder where it runs."""
    words = {word.partition(":")[0] for word in argv}
    for name in (*WRITES, "rl.py", "edited.json", "cluster.json", "tables.csv", "memory.json", TITAN, PROBLEMS):
        path = folder / name
        if name not in words or path.exists():
            continue
        if name in WRITES:
            prepare(WRITES[name], folder)
            assert run(*WRITES[name], "--out", name)[0] == 0
        elif name == "edited.json":
            prepare(["plan.json"], folder)
            plan = json.loads((folder / "plan.json").read_text())
            plan["parts"][0]["parameters"]["layers.0.up.weight"]["layout"] = "R,R"
            path.write_text(json.dumps(plan))
        elif name == "cluster.json":
            from tests.test_schemas import measured

            measured(path)
        else:
            path.write_text({"rl.py": PROGRAMS, "tables.csv": TABLES, TITAN: TITAN_TEXT, PROBLEMS: ROUTES, "memory.json": EVIDENCE}[name])


@cache
def verbs() -> dict[str, list]:
    """The parameters of every verb, by its words."""
    from typer.main import get_command

    from autoshard.cli.app import app

    found = {}
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found.update({f"{name} {key}": one.params for key, one in inner.items()} if inner else {name: command.params})
    return found


def without(words: list[str], names: list[str], flag: bool) -> list[str]:
    at = next((k for k, word in enumerate(words) if word in names), None)
    return words if at is None else [*words[:at], *words[at + (1 if flag else 2) :]]


def lines(verb: str, situation: str) -> dict[str, list[str]]:
    """Per parameter of the verb the situation's command line with another value of it, or without the flag; under "" the line itself."""
    begin = SITUATIONS[verb][situation]
    found = {"": [*verb.split(), *begin, "--json"]}
    for p in verbs()[verb]:
        if p.name == "as_json":
            found[p.name] = [*verb.split(), *begin]
            continue
        flag = bool(getattr(p, "is_flag", False))
        if flag and p.opts[0] in begin:
            found[p.name] = [*verb.split(), *without(begin, p.opts, True), "--json"]
            continue
        if p.param_type_name == "argument":
            place = [q.name for q in verbs()[verb] if q.param_type_name == "argument"].index(p.name)
            given = next((k for k, word in enumerate(begin) if word.startswith("--")), len(begin))
            if place != given:
                continue  # what a verb is about is not an option
            words = [*begin[:place], OWN.get((verb, p.name), VALUES[p.name]), *begin[place:]]
        else:
            rest = begin if p.multiple else without(begin, p.opts, flag)
            words = [*rest, p.opts[0]] if flag else [*rest, p.opts[0], OWN.get((verb, p.name)) or VALUES[p.name]]
        found[p.name] = [*verb.split(), *words, "--json"]
    return found


def answer(argv: list[str], folder: Path) -> tuple:
    """What a command line says and writes, without what the host's clock adds; and its exit code."""
    prepare(argv, folder)
    for path in folder.glob("new.*"):
        path.unlink()
    code, out, err = run(*argv)
    try:
        said = json.dumps(timeless(json.loads(out)))
    except ValueError:
        said = re.sub(r"\d+\.?\d* s\b", "", out)
    return code, said, err, sorted(path.name for path in folder.iterdir() if path.name.startswith(("new.", "plans")))


def timeless(record):
    if isinstance(record, dict):
        return {key: timeless(value) for key, value in record.items() if key not in HOST}
    return [timeless(value) for value in record] if isinstance(record, list) else record


def outcomes(verb: str, situation: str, folder: Path) -> dict[str, str]:
    """What each option does to the answer of a situation: acts, refused or same."""
    every = lines(verb, situation)
    line = every.pop("")
    base, plain, found = answer(line, folder), None, {}
    assert base[0] == 0 or verb == "redistribute", base  # of which some problems have no route within memory
    for name, argv in every.items():
        if sorted(argv) == sorted(line):
            continue  # it is given already, with this value
        code, *rest = answer(argv, folder)
        found[name] = "refused" if code == 2 else "same" if (code, *rest) == base else "acts"
        assert code != 2 or rest[1].splitlines()[-1:] == [one for one in rest[1].splitlines() if one.startswith("autoshard: ")], rest
        if found[name] == "same" and "--json" in argv:  # some options are those of the text
            plain = plain or answer([word for word in line if word != "--json"], folder)
            found[name] = "same" if answer([word for word in argv if word != "--json"], folder) == plain else "acts"
    return found

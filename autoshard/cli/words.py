"""Checks of command-line arguments that run before anything slow is imported: one check per option, for all verbs.

    check_words(verb, names, values)       names: per parameter, the name that the user knows (--mesh, MODEL)

A check is a function of (name, value) that raises ValueError. ROWS holds the checks by parameter. OWN holds those by verb and parameter,
where a verb uses a parameter differently. FREE lists parameters that accept any text, or whose values only a plan or a library can check.
Names of solvers, formats and so on are repeated here, because the modules that define them take seconds to import; a test compares the two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autoshard.cli.arguments import (
    check_out,
    check_picture,
    model_settings,
    parse_bytes,
    parse_forbidden,
    parse_optimizer,
    parse_pins,
    parse_recompute,
    parse_settings,
)
from autoshard.cli.model_source import config_folder, may_have, settings_of
from autoshard.mesh import DEVICES, MOST_DEVICES, parse_shape
from autoshard.precision import Precision
from autoshard.reading import content_of, data_of, parsed, refuse_other

SOLVERS = ("auto", "prices", "ilp", "cvxpy", "dp", "dual", "exhaustive")
OPTIMIZERS = ("adamw", "sgd", "momentum")
PRICES = ("a100", "h100", "h200", "b200", "mi300x", "l40s", "rtx", "cpu")
EXPORTS = (
    "sharding_map", "json", "parallelize_module", "tp_plan", "vllm", "sglang", "fully_shard", "distribute_module", "checkpoint_policy",
)  # fmt: skip
SCHEDULES = ("sequential", "gpipe", "1f1b", "zb_h1", "interleaved_1f1b")
ORDERS = ("auto", "natural", "head_tail")
SCHEMES = ("auto", "data_parallel", "fsdp", "megatron", "megatron_sp", "planned")
DTYPES = ("float64", "float32", "float16", "bfloat16")  # of weights that models compute with
CONSTANTS = ("physical", "distir_3386edc", "distir_83d7fc3")
PLANNERS = ("naive", "astar", "dijkstra", "memory_constrained")
LAUNCHERS = {"torchtitan": ".toml", "megatron": ".sh", "accelerate": ".yaml", "nanotron": ".yaml"}  # and how its configurations end
SITE_DEVICES = tuple(sorted(set(DEVICES) - {"cpu"}))  # of autoshard/cost/devices
PRECISIONS = ("bf16", "fp16", "fp8", "nvfp4")
# devices of which no matmul runs at a precision faster than in 16 bits
NO_NARROW = {"a100": ("fp8", "nvfp4")} | dict.fromkeys(("h100", "h100_500w", "h200", "mi300x", "mi325x"), ("nvfp4",))
OBJECTIVES = ("serial", "overlapped")
METHODS = ("piecewise", "pchip", "p_norm", "alpha_beta", "sigmoid")
MOST_DIM = 63  # that a layout can shard
MOST_WORKERS = 1024  # processes of one machine
SMALL = 1_000_000  # bytes: files up to here are read before anything slow is imported

Check = Callable[[str, Any], object]


def one_of(known: tuple[str, ...], name: str, value: str, *, what: str = "") -> None:
    if value not in known:
        said = f"there is no {what} {value!r}" if what else f"{name} is {value!r}"
        raise ValueError(f"{said}; expected one of {', '.join(known)}")


def above(least: float, name: str, value: float) -> None:
    if not least < value:
        raise ValueError(f"{name} is {value}; expected more than {least:g}")


def at_least(least: float, name: str, value: float) -> None:
    if not least <= value:
        raise ValueError(f"{name} is {value}; expected {least:g} or more")


def finite_at_least(least: float, name: str, value: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name} is {value}; expected a finite number, {least:g} or more")


def workers(name: str, value: int) -> None:
    if not 1 <= value <= MOST_WORKERS:
        raise ValueError(f"{name} is {value}; expected a number of processes, 1 to {MOST_WORKERS}")


def share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; expected a number from 0 to 1: 0.01 is one percent")


def readable(expected: str, name: str, value: str) -> None:
    """The file exists; its reader checks the content."""
    path = Path(value)
    if path.is_dir():
        raise ValueError(f"{value or '.'} is a folder; expected {expected}")
    if not path.exists():
        raise ValueError(f"there is no file {value}; expected {expected}")


def plan(
    name: str, value: str, *, expected: str = "a plan's file, as `autoshard plan --out` writes it", also: tuple[str, ...] = ()
) -> None:
    """A plan's file, or one program of a file with several: FILE#NAME. also: other formats that the verb reads."""
    path, _, program = value.rpartition("#")
    file = path if path and not Path(value).exists() and program else value
    readable(expected, name, file)
    if Path(file).stat().st_size <= SMALL and content_of(file, "plan").lstrip()[:1] == b"{":  # else a pickle, or a configuration
        refuse_other(parsed(content_of(file, "plan"), file, "plan"), file, "plan", "programs", *also)


PLAN: Check = plan


def cluster(name: str, value: str) -> None:
    readable("what `autoshard calibrate measure --out` wrote", name, value)
    if Path(value).stat().st_size <= SMALL:
        data_of(value, "cluster")


def each(check: Check, name: str, values: list[Any]) -> None:
    for value in values:
        check(name, value)


def size(name: str, value: str) -> None:
    parse_bytes(value, "memory" if name in ("--memory", "--hbm") else name)


def size_or_none(name: str, value: str) -> None:
    if value.strip() not in ("0", "0GB"):
        size(name, value)


def mesh(name: str, value: str) -> None:
    parse_shape(value)


def mesh_or_auto(name: str, value: str) -> None:
    if value != "auto":
        parse_shape(value)


def layout(name: str, value: str, *, any_placement: bool = False) -> None:
    """Placements as `layout.parse` reads them; any_placement: `*` is one."""
    for part in (part.strip() for part in value.split(",")):
        shard = re.fullmatch(r"S\((\d{1,3})\)|S(\d{1,3})", part)
        known = part == "R" or re.fullmatch(r"P(\((sum|avg|max|min)\))?", part) or (any_placement and part == "*")
        if not known and not (shard and int(shard[1] or shard[2]) <= MOST_DIM):
            raise ValueError(f"{name}: layout {value!r} has {part!r}; expected R, S(dim) or P per mesh axis, for example S(0),R")


def pins(name: str, values: list[str]) -> None:
    for pinned, written in parse_pins(values).items():
        layout(f"{name} {pinned}", written, any_placement=True)


def forbidden(name: str, values: list[str]) -> None:
    for tensor, several in parse_forbidden(values).items():
        for written in several:
            layout(f"{name} {tensor}", written, any_placement=True)


def optimizer(name: str, value: str) -> None:
    read = parse_optimizer(value)
    if read not in OPTIMIZERS if isinstance(read, str) else not 0 <= read < math.inf:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"unknown optimizer {value!r}; known are {known}, or give its bytes of state per parameter, for example 8")


def switches(name: str, value: str) -> None:
    try:
        known = value == "none" or 0 <= float(value) < math.inf
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{name} is {value!r}; expected how often per unit, 0 or more, or none")


def precision(name: str, value: str) -> None:
    Precision.parse(value)


def recompute(name: str, value: str, words: tuple[str, ...] = ("all", "blocks", "auto")) -> None:
    if isinstance(parse_recompute(value), str) and value not in words:
        raise ValueError(f"{name} is {value!r}; expected a number of blocks, {', '.join(words[:-1])} or {words[-1]}")


def numbers(name: str, value: str) -> None:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {value!r}; expected whole numbers of 1 or more, for example 4 or 1,2,4")


def several_of(known: tuple[str, ...], name: str, value: str) -> None:
    for word in value.split(","):
        one_of(known, name, word.strip())


def nodes(name: str, value: str) -> None:
    match = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?", value.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise ValueError(f"{name} is {value!r}; expected NODESxDEVICES:DEVICE, for example 2x8:h100")
    if match[3] is not None:
        device(name, match[3])


def device(name: str, value: str) -> None:
    if value not in DEVICES:
        raise ValueError(f"unknown device {value!r}; known are {', '.join(sorted(DEVICES))}")


def device_or_file(name: str, value: str) -> None:
    if value.endswith(".json"):
        cluster(name, value)
    else:
        device(name, value)


def device_with_constants(name: str, value: str) -> None:
    if value not in SITE_DEVICES:
        count = f"; for a number of devices use --devices {value}" if value.isdecimal() else ""
        raise ValueError(f"unknown device {value!r}; known are {', '.join(SITE_DEVICES)}{count}")


def prices(name: str, value: str) -> None:
    if value not in PRICES:
        raise ValueError(f"no prices are known for {value!r}; known are {', '.join(PRICES)}, or measure: autoshard calibrate measure")


def percent(name: str, value: str) -> None:
    try:
        known = 0 <= float(value.strip().removesuffix("%")) < math.inf
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{name} is {value!r}; expected a share of 0 or more, for example 5% or 0.05")


def folder(name: str, value: str) -> None:
    path = Path(value)
    if (path.exists() and not path.is_dir()) or not path.parent.is_dir():
        raise ValueError(f"{name} {value} is a file, or its folder does not exist; give the name of a folder, new or old")


# -- models ------------------------------------------------------------------------------------------------------------------------


def model(name: str, value: str) -> None:
    """The file exists, and something in it may have the function's name."""
    if value.startswith("hf:"):
        config_folder(value.removeprefix("hf:"))
        return
    value = value.partition("#")[0]  # one of several programs follows
    path, _, function = value.rpartition(":")
    if not path or not function.isidentifier():
        raise ValueError(f"MODEL is {value!r}; expected file.py:function, for example models/gpt2.py:small, or hf:DIR")
    may_have(path, function)


def model_or_plan(name: str, value: str) -> None:
    if value.startswith("hf:") or ".py:" in value:
        model(name, value)
    elif value != "mlp":
        PLAN(name, value)


def programs_or_plan(name: str, value: str) -> None:
    path, _, program = value.rpartition("#")
    if ".py:" not in value and path and program and not Path(value).exists() and Path(path).exists():
        raise ValueError(f"{value} is one program of a plan; expected the plan, {path}, or see the one with: autoshard show {value}")
    if ".py:" in value:
        model(name, value)
    else:
        readable("file.py:function, which returns programs, or what `autoshard programs --out` wrote", name, value)


# -- the checks --------------------------------------------------------------------------------------------------------------------

ROWS: dict[str, Check] = {
    "model": model,
    "mesh": mesh,
    "settings": lambda name, value: parse_settings(value),
    "cluster": cluster,
    "keep": PLAN,
    "solution": PLAN,
    "a": PLAN,
    "b": PLAN,
    "problem": partial(readable, "a contest instance, as JSON or gzipped JSON named .gz"),
    "spec": partial(readable, "tables as CSV in a file named .csv, or JSON"),
    "frontier": partial(readable, "what `autoshard frontier --out` wrote"),
    "files": partial(each, partial(readable, "the output of nccl-tests or PARAM, nnscaler JSON, or CSV")),
    "target": model_or_plan,
    "memory": size,
    "memory_limit": size,
    "hbm": size,
    "host_memory": size_or_none,
    "host_bandwidth": size,
    "intra_node_bandwidth": size,
    "inter_node_bandwidth": size,
    "largest": size,
    "out": lambda name, value: check_out(value, name),
    "csv": lambda name, value: check_out(value, name),
    "trace": lambda name, value: check_out(value, name),
    "plot": lambda name, value: check_picture(value, name),
    "picture": lambda name, value: check_picture(value, name),
    "draw": lambda name, value: check_picture(value, name),
    "save_dir": folder,
    "solver": partial(one_of, SOLVERS, what="solver"),
    "device": device,
    "prices": prices,
    "optimizer": optimizer,
    "objective": lambda name, value: one_of(OBJECTIVES, name, value),
    "precision": precision,
    "recompute": recompute,
    "sequence_order": partial(one_of, ORDERS),
    "switches": switches,
    "pin": pins,
    "forbid": forbidden,
    "why_not": layout,
    "time_limit": partial(above, 0),
    "gap": partial(finite_at_least, 0),
    "seconds": partial(at_least, 1),
    "effort": partial(above, 0),
    "batch": partial(at_least, 1),
    "seq": partial(at_least, 1),
    "prompt": partial(at_least, 1),
    "max_tokens": partial(at_least, 2),
    "dtype": lambda name, value: one_of(DTYPES, name, value),
    "reserve": share,
    "points": partial(at_least, 1),
    "devices": partial(at_least, 1),
    "devices_per_node": partial(at_least, 1),
    "workers": workers,
    "layers": partial(at_least, 1),
    "chunks": partial(at_least, 1),
    "max_depth": partial(at_least, 1),
    "top_k": partial(at_least, 1),
    "prefetch": partial(at_least, 0),
    "random": partial(at_least, 0),
    "alternatives": partial(at_least, 0),
    "seed": partial(at_least, 0),
    "within": share,
    "kind": partial(one_of, EXPORTS, what="export"),
    "schedule": partial(one_of, SCHEDULES),
    "schedules": partial(several_of, SCHEDULES),
    "scheme": partial(one_of, SCHEMES),
    "constants": partial(one_of, CONSTANTS),
    "data": numbers,
    "tensor": numbers,
    "pipeline": numbers,
    "microbatches": numbers,
    "global_batch": partial(at_least, 1),
    "expert_imbalance": partial(finite_at_least, 1),
    "nodes": partial(each, nodes),
    "planner": partial(one_of, PLANNERS),
    "count": partial(one_of, ("resident", "buffers")),
    "method": partial(one_of, METHODS),
    "launcher": partial(one_of, tuple(LAUNCHERS), what="launcher"),
    "per_node": partial(at_least, 1),
    "microbatch": partial(at_least, 1),
    "top": partial(at_least, 1),
    "backend": partial(one_of, ("auto", "nccl", "gloo")),
}
RUNS_ON = ("cpu", "cuda")
OWN: dict[tuple[str, str], Check] = {
    ("plan", "mesh"): mesh_or_auto,
    ("tables", "devices"): mesh,
    ("pipeline", "memory"): partial(each, size),
    ("pipeline", "recompute"): partial(one_of, ("auto", "never", "always")),
    ("pipeline", "optimizer"): partial(one_of, OPTIMIZERS),
    ("frontier", "recompute"): partial(recompute, words=("all",)),
    ("plan", "microbatches"): partial(at_least, 1),
    ("frontier", "microbatches"): partial(at_least, 1),
    ("redistribute", "problem"): partial(readable, "one or a list of shape, mesh, src, src_bs, dst, dst_bs"),
    ("redistribute", "prices"): partial(one_of, ("mesh", "tensorcraft")),
    ("check", "within"): percent,
    ("export", "within"): percent,
    ("check", "solution"): partial(plan, expected="a plan's file, as `autoshard plan --out` writes it, or a launcher's configuration"),
    ("check", "device"): device_with_constants,
    ("report", "solution"): partial(plan, also=("pipeline",)),
    ("plan", "device"): device_or_file,
    ("frontier", "device"): device_or_file,
    ("simulate", "device"): device_or_file,
    ("programs", "device"): device_or_file,
    ("tables", "device"): device_or_file,
    ("programs", "target"): programs_or_plan,
    ("degrees", "device"): device_with_constants,
    ("show-prices", "name"): prices,
    ("doctor", "device"): partial(one_of, RUNS_ON, what="device"),
    ("verify", "device"): partial(one_of, RUNS_ON, what="device"),
    ("serve-plan", "device"): prices,
    ("degrees", "precision"): partial(one_of, PRECISIONS),
}
FREE = {"name", "free", "axis", "dask", "collective", "system"}


def check_words(verb: str, names: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """ValueError on a value that no run of the verb could use. names: of the parameters, as the user writes them."""
    for parameter, value in values.items():
        check = OWN.get((verb, parameter), ROWS.get(parameter))
        if check is not None and value is not None and not isinstance(value, bool) and value not in ([], ()):
            check(names.get(parameter, parameter), value)
    if (written := values.get("model") or values.get("target")) is not None and ("hf:" in written[:3] or ".py:" in written):
        own = {key: values[key] for key in ("batch", "seq", "dtype") if key in values and "settings" in values and values[key] is not None}
        own = own if verb not in ("serve-plan", "degrees", "check") else {}  # of the sequences that are served or trained on
        settings_of(written, model_settings(values.get("settings") or [], **own))
    if verb == "pipeline":
        _cluster(values["devices"], values["nodes"], values["devices_per_node"], values["stages"] or 1)
    if verb in ("degrees", "check") and (values["devices"] or 1) % min(values["per_node"], values["devices"] or 1):
        raise ValueError(f"{values['devices']} devices are no whole number of nodes of {values['per_node']}; give --per-node a divisor")
    if verb in ("degrees", "check") and (ending := LAUNCHERS.get(values["launcher"])) and (out := values.get("out")) is not None:
        if Path(out).suffix in ({".toml", ".sh", ".yaml", ".json"} - {ending}):
            raise ValueError(f"--out {out} is no configuration of {values['launcher']}, which reads {ending}; expected another name")
    if verb == "degrees" and (lacks := NO_NARROW.get(values["device"], ())) and values["precision"] in lacks:
        raise ValueError(f"{values['device']} multiplies no {values['precision']} numbers; expected another --precision or --device")
    if verb == "simulate" and values["target"] == "mlp" and values["constants"] == "physical":
        published = " or ".join(CONSTANTS[1:])
        raise ValueError(f"mlp is the model of a published simulator; add --constants {published}, or give a plan or a model")
    several = verb in ("plan", "frontier") and (values["microbatches"] or 1) > 1
    if several and not values["train"] and values.get("keep") is None:  # what is kept may be the plan of a training step
        raise ValueError(f"--microbatches is {values['microbatches']}, but only a training step has several; add --train, or leave it out")
    if (shape := values.get("mesh")) is not None and shape != "auto":
        _pinned_to_axes(shape, [*parse_pins(values.get("pin") or []).items(), *_pairs(values.get("forbid") or [])])


def _cluster(devices: int | None, kinds: list[str], per_node: int, stages: int) -> None:
    if (devices is None) == (not kinds):
        raise ValueError("give the cluster: either --devices 16, or --nodes 2x8:h100 once per kind of node")
    sizes = [written.partition(":")[0].split("x") for written in kinds]
    count = sum(int(nodes) * int(of_one) for nodes, of_one in sizes) if devices is None else devices
    if count > MOST_DEVICES:
        raise ValueError(f"the cluster has {count} devices; expected {MOST_DEVICES} at most: make it smaller")
    if stages > count:
        raise ValueError(f"--stages is {stages}, but the cluster has {count} devices; expected one or more for each stage")
    if devices is not None and devices % (own := min(devices, per_node)):
        fitting = math.gcd(devices, own)
        raise ValueError(f"{devices} devices are no whole number of nodes of {own}; give --devices-per-node, for example {fitting}")


def _pairs(written: list[str]) -> list[tuple[str, str]]:
    return [(name, layout) for name, several in parse_forbidden(written).items() for layout in several]


def _pinned_to_axes(shape: str, pinned: list[tuple[str, str]]) -> None:
    axes = len(parse_shape(shape))
    for name, written in pinned:
        if (count := written.count(",") + 1) != axes:
            raise ValueError(f"on {name!r}: layout {written} has {count} placements, the mesh {shape} has {axes} axes")

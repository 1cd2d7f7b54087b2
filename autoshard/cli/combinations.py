"""Options that have no effect beside others, or contradict them: refused before anything runs, so that none is ignored in silence.

    check_combinations(verb, names, given, values)     names: per parameter what the user writes; given: parameters on the command line
    check_together(verb, values)                       values that no run could use together
    check_repeated(names)                              an option that holds one value, written twice
    check_files(verb, names, values)                   a result that would replace what is read, or another result

RULES has a row per reason. A rule holds for a command line where `when` is true of (given, values); then none of its options may be given.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from autoshard.cli.model_source import may_be_programs, names_model, settings_of
from autoshard.cli.table import CONFIGURATIONS, LAUNCHERS, LINKS, NAMED, OF_LAUNCH, OWN, SEVERAL, SHARED, options_of_verb
from autoshard.mesh import DEVICES_PER_NODE, MOST_DEVICES, Axis, Mesh, of_one_node, shape_text
from autoshard.options import Options, having
from autoshard.reading import file_and_program

Given = frozenset[str]
RESULTS = ("out", "html", "csv", "plot", "trace", "picture")
READ = ("model", "target", "solution", "other", "problem", "spec", "frontier", "files", "keep", "cluster", "device")
REPLACES = {("plan", "keep")}  # an edited plan may be planned anew in its place


@dataclass(frozen=True)
class Ineffective:
    """Options of verbs that have no effect on some command lines."""

    verbs: tuple[str, ...]
    options: tuple[str, ...]
    when: Callable[[Given, Mapping[str, Any]], bool]
    why: str  # continues the sentence "--option has no effect"
    cure: str = ""  # what to do, where leaving it out is not all that helps


def without(*options: str) -> Callable[[Given, Mapping[str, Any]], bool]:
    """True where none of the options is given."""
    return lambda given, values: not given & set(options)


def beside(*options: str) -> Callable[[Given, Mapping[str, Any]], bool]:
    """True where one of the options is given."""
    return lambda given, values: bool(given & set(options))


def where(name: str, *words: str) -> Callable[[Given, Mapping[str, Any]], bool]:
    """True where the value of an argument is one of these."""
    return lambda given, values: values.get(name) in words


def _forward(given: Given, values: Mapping[str, Any]) -> bool:
    return not given & {"training", "keep"} and not may_be_programs(values["model"])


def _is_model(given: Given, values: Mapping[str, Any]) -> bool:
    return names_model(str(values.get("target")))


def is_launch(path: str, launcher: str | None) -> bool:
    """Whether a file is no plan but a launcher's configuration, as its ending or --launcher says."""
    return launcher is not None or Path(path).suffix in (*CONFIGURATIONS, *SEVERAL)


def _is_launch(given: Given, values: Mapping[str, Any]) -> bool:
    return is_launch(str(values.get("solution")), values.get("launcher"))


def _is_plan(given: Given, values: Mapping[str, Any]) -> bool:
    return not _is_launch(given, values)


def _is_file(given: Given, values: Mapping[str, Any]) -> bool:
    return not _is_model(given, values)


def _has_no(link: str) -> Callable[[Given, Mapping[str, Any]], bool]:
    """True where no axis of the mesh that the options describe uses this link: one whose bandwidth changes nothing."""

    def when(given: Given, values: Mapping[str, Any]) -> bool:
        meshes = [(shape, per_node) for shape, per_node in _meshes(values) if math.prod(shape) <= MOST_DEVICES]
        try:
            return bool(meshes) and all(_axes(*mesh, link, 1.0) == _axes(*mesh, link, 2.0) for mesh in meshes)
        except ValueError:
            return False  # what is wrong is said by what reads it

    return when


def _axes(shape: tuple[int, ...], per_node: int | None, link: str, bandwidth: float) -> list[Axis]:
    options: dict[str, Any] = {"devices_per_node": per_node, link: bandwidth}
    return [axis for axis in Mesh.from_bandwidths(shape, **options).axes if axis.size > 1]


def _meshes(values: Mapping[str, Any]) -> list[tuple[tuple[int, ...], int | None]]:
    """The meshes that a command line is about, and how many devices each has in a node (None: all axes but the first)."""
    mesh, devices = values.get("mesh"), values.get("devices")
    if mesh == "auto":
        return [((devices,), values.get("devices_per_node") or DEVICES_PER_NODE)] if devices else []
    if mesh is not None:
        return [(mesh, values.get("devices_per_node"))]
    if isinstance(devices, tuple):  # of tables
        return [(devices, None)]
    if isinstance(devices, int):
        return [((devices,), min(values.get("per_node") or values.get("devices_per_node") or DEVICES_PER_NODE, devices))]
    degrees = [values.get(name) for name in ("pipeline", "data", "tensor")]
    grid = product(*degrees) if None not in degrees else ()  # type: ignore[arg-type]
    return [(shape, values.get("devices_per_node") or math.prod(shape[1:])) for shape in grid]


LAUNCH = tuple(name for name in OF_LAUNCH if name != "launcher")
OF_PLANS = {  # options of verbs about plans and configurations that count for a plan alone
    "check": ("trust", "within", "no_solve", "any_graph", "cluster", "time_limit"),
    "show": ("trust", "frontier", "no_model"),
    "explain": ("name", "why_not", "alternatives", "robust", "within", "time_limit", "trust"),
}  # fmt: skip
OF_MODEL = ("training", "settings", "batch", "seq", "dtype")
OF_PLANNED = ("model", "settings", "batch", "dtype", "trust")  # the model of a plan
OF_PAGES = (*OF_PLANNED, "frontier", "no_model")
OF_SIMULATED_MODEL = ("schedule", "chunks", "scheme", "inference", "device", "devices_per_node", "tf32", *LINKS)

OF_LAUNCHED_MODEL = ("tp", "pp", "cp", "recompute", "precision", "compiled")
UNPRICED = ("sharding_map", "json", "distribute_module", "checkpoint_policy")  # exports
OF_TRAINING = tuple(name for name in having(Options, "of_training") if name in options_of_verb("plan"))
ON_MESHES = ("plan", "frontier", "simulate")
LINKED = ("plan", "frontier", "simulate", "pipeline", "degrees", "tables", "check", "show", "explain", "fits")
RULES = (
    Ineffective(("plan",), ("price_pins",), without("pins", "forbid"), "without --pin or --forbid", "add what it is to price"),
    Ineffective(("plan",), ("criterion",), without("dynamic_shapes"), "without --dynamic-shapes", "add it"),
    Ineffective(("plan",), ("dynamic_shapes",), where("mesh", "auto"), "on several meshes", "give one mesh"),
    Ineffective(("plan", "frontier"), OF_TRAINING, _forward, "on a forward pass", "add --train"),
    Ineffective(("plan", "frontier"), ("device", *LINKS), beside("prices"), "beside --prices, which say it too"),
    Ineffective(ON_MESHES, ("device", "devices_per_node", *LINKS), beside("cluster"), "beside --cluster, where it was measured"),
    Ineffective(("plan", "frontier"), ("prices",), beside("cluster"), "beside --cluster, where it was measured"),
    Ineffective(ON_MESHES, ("tf32",), beside("cluster"), "beside --cluster, which was measured with what torch was set to"),
    Ineffective(
        ("plan",), ("device", "devices_per_node", "prices", "tf32", *LINKS),
        lambda given, values: "keep" in given and not given & {"mesh", "cluster"}, "on the mesh of the plan to keep", "add --mesh",
    ),
    Ineffective(
        ("simulate",), ("schedule", "chunks"), lambda given, values: {values.get("pipeline"), values.get("microbatches")} == {(1,)},
        "on one stage and one microbatch", "add --pipeline or --microbatches",
    ),
    Ineffective(("simulate",), ("prefetch", "no_join"), beside("no_overlap"), "beside --no-overlap, where one task follows the other"),
    Ineffective(("simulate",), ("trust",), _is_model, "on a model, which is run anyway"),
    Ineffective(("simulate",), ("no_join",), _is_model, "on a model", "give a plan of it"),
    Ineffective(("certify", "check", "verify", "show", "explain", "simulate"), ("trust",), beside("model"), "beside a model that is named"),
    Ineffective(("export",), ("within",), where("kind", *UNPRICED), "on a format whose reader decides what a step takes"),
    Ineffective(("show",), ("exit_code",), without("other"), "without another plan to compare with", "name it"),
    Ineffective(("show",), ("html",), beside("other"), "beside another plan to compare with"),
    Ineffective(
        ("show",), OF_PAGES, lambda given, values: "html" not in given and _is_plan(given, values), "without --html", "add it"
    ),
    Ineffective(("show",), OF_PLANNED, beside("no_model"), "beside --no-model"),
    Ineffective(
        ("explain",), (*OF_PLANNED, "time_limit"),
        lambda given, values: not given & {"name", "robust"} and _is_plan(given, values), "without NAME or --robust", "add one",
    ),
    Ineffective(
        LINKED, ("inter_node_bandwidth",), _has_no("inter_node_bandwidth"), "where no two nodes talk to each other", "give more nodes"
    ),
    Ineffective(
        LINKED, ("intra_node_bandwidth",), _has_no("intra_node_bandwidth"), "where no two devices are in one node", "give larger nodes"
    ),
    Ineffective(("explain",), ("within",), without("robust"), "without --robust", "add it"),
    Ineffective(("explain",), ("alternatives",), without("name"), "without the NAME of what to explain", "add it"),
    Ineffective(
        ("check",), OF_PLANNED[1:-1], lambda given, values: _is_launch(given, values) and "model" not in given, "without MODEL", "name it"
    ),
    Ineffective(("check",), ("html", "out"), _is_plan, "on a plan", "name a launcher's configuration"),
    Ineffective(tuple(OF_PLANS), LAUNCH, _is_plan, "on a plan", "name a launcher's configuration"),
    *(Ineffective((verb,), options, _is_launch, "on a launcher's configuration, but only on a plan") for verb, options in OF_PLANS.items()),
    Ineffective(("doctor",), OF_MODEL, without("model"), "without a model", "add one, with --device"),
    Ineffective(("simulate",), OF_SIMULATED_MODEL, _is_file, "on a plan, which says it itself"),
    Ineffective(("pipeline",), ("workers",), beside("dask"), "beside --dask, whose workers plan the stages"),
    Ineffective(("pipeline",), ("devices_per_node",), beside("nodes"), "beside --nodes, which says it too"),
    Ineffective(("pipeline",), ("recompute", "optimizer"), beside("inference"), "on a forward pass"),
    Ineffective(("tables",), ("host_bandwidth",), without("host_memory"), "without --host-memory", "add it"),
    Ineffective(("redistribute",), ("memory_limit",), where("planner", "naive"), "with --planner naive, which keeps no limit"),
    Ineffective(("degrees",), ("time_limit",), beside("no_bound"), "beside --no-bound"),
    *(Ineffective(("degrees",), (f"no_{name}",), beside(name), f"beside --{name}") for name in ("tp", "cp", "ep", "pp")),
    Ineffective(("fits",), OF_LAUNCHED_MODEL, _is_file, "on a configuration, which says it itself"),
    Ineffective(("fits",), ("model",), _is_model, "beside a model that is named"),
    Ineffective(
        ("fits",), ("settings",), lambda given, values: _is_file(given, values) and "model" not in given, "without MODEL", "name it"
    ),
)  # fmt: skip


def check_combinations(verb: str, names: Mapping[str, str], given: Given, values: Mapping[str, Any]) -> None:
    """ValueError on an option that this command line ignores."""
    for rule in RULES:
        ignored = [option for option in rule.options if option in given]
        if verb in rule.verbs and ignored and rule.when(given, values):
            raise ValueError(f"{names[ignored[0]]} has no effect {rule.why}; {rule.cure}{', or ' if rule.cure else ''}leave it out")


def check_together(verb: str, values: Mapping[str, Any]) -> None:
    """ValueError on values, right one by one, that no run of the verb could use together."""
    settings, own = values.get("settings") or {}, named_settings(verb, values)
    if twice := [key for key in own if key in settings]:
        key = twice[0]
        raise ValueError(f"--{key} {own[key]} and --set {key}={settings[key]} are the same; leave one out")
    if (written := values.get("model") or values.get("target")) is not None and names_model(written):
        settings_of(written, settings | own)
    if verb == "pipeline":
        _cluster(values["devices"], values["nodes"], values["stages"] or 1)
    if verb in ("degrees", "check", "show", "explain", "fits"):
        _launch(verb, values)
    if len(meshes := _meshes(values)) == 1 and (per_node := meshes[0][1]):
        of_one_node(math.prod(meshes[0][0]), per_node, "--per-node" if "per_node" in values else "--devices-per-node")
    if (shape := values.get("mesh")) is not None and shape != "auto":
        pairs = [(name, layout) for name, several in (values.get("forbid") or {}).items() for layout in several]
        for name, layout in [*(values.get("pins") or {}).items(), *pairs]:
            if (count := layout.count(",") + 1) != (axes := len(shape)):
                raise ValueError(f"on {name!r}: layout {layout} has {count} placements, the mesh {shape_text(shape)} has {axes} axes")


def named_settings(verb: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the verb's model that have an option of their own, where they are given."""
    named = [key for key in NAMED if OWN[verb].get(key) is SHARED[key]]  # `seq` of a launch is no setting
    return {key: values[key] for key in named if values[key] is not None}


def _launch(verb: str, values: Mapping[str, Any]) -> None:
    out, given = values.get("out"), Path(str(values.get("solution"))).suffix  # Megatron's may be YAML
    launcher = values["launcher"] or CONFIGURATIONS.get(given, "")
    ending = LAUNCHERS.get(launcher)
    if ending is not None and out is not None and Path(out).suffix in {".toml", ".sh", ".yaml", ".json"} - {ending, given}:
        raise ValueError(f"--out {out} is no configuration of {launcher}, which reads {ending}; expected another name")


def _cluster(devices: int | None, kinds: list[tuple[int, int, str | None]], stages: int) -> None:
    if (devices is None) == (not kinds):
        raise ValueError("give the cluster: either --devices 16, or --nodes 2x8:h100 once per kind of node")
    count = sum(nodes * of_one for nodes, of_one, _ in kinds) if devices is None else devices
    if count > MOST_DEVICES:
        raise ValueError(f"the cluster has {count} devices; expected {MOST_DEVICES} at most: make it smaller")
    if stages > count:
        raise ValueError(f"--stages is {stages}, but the cluster has {count} devices; expected one or more for each stage")


def check_repeated(names: Iterable[str]) -> None:
    """ValueError on a name that comes twice. names: of the options that hold one value, as they are written."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{name} is given {count} times, and it has one value; give it once")


def check_files(verb: str, names: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """ValueError where a result would be written over a file that is read, or over another result."""
    read = [(key, path) for key in READ for path in _paths(values.get(key))]
    written = [(key, path) for key in RESULTS for path in _paths(values.get(key))]
    for k, (key, path) in enumerate(written):
        for other, taken in [*read, *written[:k]]:
            same = os.path.realpath(path) == os.path.realpath(taken) and not os.path.realpath(path).startswith("/dev/")
            if same and (verb, other) not in REPLACES:
                raise ValueError(f"{names[key]} {path} is the file of {names[other]}, which would be lost; give another name")
    if twice := [path for path, count in Counter(map(os.path.realpath, _paths(values.get("files")))).items() if count > 1]:
        raise ValueError(f"{names['files']} has {twice[0]} twice; give it once")


def _paths(value: Any) -> list[str]:
    """Names of files in a value: without what follows # in a plan's, or : in a model's."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return [_file(one) for one in several if isinstance(one, str)]


def _file(written: str) -> str:
    if ".py:" in written:
        return written.partition(".py:")[0] + ".py"
    return file_and_program(written)[0]

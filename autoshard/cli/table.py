"""Every argument of the command line that is no option of planning, declared once: of all verbs that have it, or of one.

    option_of("plan", "mesh")        the declaration: words of --help, values that it knows, its default

OWN has the arguments of each verb in the order of its --help. Options of planning are declared in `autoshard.options`. Names of exports,
schedules and so on are repeated here, because the rooms that define them take seconds to import; a test compares the two.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cli import kinds
from autoshard.mesh import DEVICES_PER_NODE
from autoshard.options import (
    COUNTS,
    SCHEDULES,
    SCHEMES,
    SIZE,
    SIZES,
    SOLVERS,
    SWITCH,
    TEXT,
    TIME_LIMIT,
    Declaration,
    Options,
    PipelineOptions,
    ValueKind,
    count,
    number,
    one_of,
    options_of,
    recomputed,
    some_of,
)

EXPORTS = (
    "sharding_map", "json", "parallelize_module", "tp_plan", "vllm", "sglang", "fully_shard", "distribute_module", "checkpoint_policy",
)  # fmt: skip
DTYPES = ("float64", "float32", "float16", "bfloat16")  # of weights that models compute with
PLANNERS = ("naive", "astar")
LAUNCHERS = {  # and how its configurations end
    "torchtitan": ".toml", "megatron": ".sh", "accelerate": ".yaml", "nanotron": ".yaml", "deepspeed": ".json", "automodel": ".yaml",
}  # fmt: skip
SEVERAL = (".yaml", ".yml")  # endings of configurations that don't tell their launcher
CONFIGURATIONS = {".toml": "torchtitan", ".sh": "megatron"}  # that do; a .json is a plan, unless a launcher is named
PLAN_OR_CONFIGURATION = "a plan's file, as `autoshard plan --out` writes it, or a launcher's configuration"
RECOMPUTED = ("none", "selective_op", "selective_layer", "attn", "mla_up_proj", "full")  # by launchers
LAUNCH_SCHEDULES = ("none", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
PRECISIONS = ("bf16", "fp16", "fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Typed(Declaration):
    """An option that only the command line has. default: as it is typed; REQUIRED where there is none."""

    default: Any = None


@dataclass(frozen=True)
class Argument(Typed):
    """An argument without a name of its own on the command line."""


REQUIRED: Any = inspect.Parameter.empty


def opt(help: str, kind: ValueKind = TEXT, *flags: str, metavar: str | None = None, default: Any = None) -> Typed:
    """Without a default switches are off, and nothing is given of others."""
    nothing = kind.typed() if kind.typed in (bool, list[str]) else None
    return Typed(kind, help, flags, metavar, default=nothing if default is None else default)


def arg(help: str, kind: ValueKind = TEXT, metavar: str | None = None, default: Any = REQUIRED) -> Argument:
    return Argument(kind, help, metavar=metavar, default=default)


TEXTS = kinds.each(TEXT)
CACHED = arg("The folder or URL of a cache, as `autosharding_pass(cache=)` takes it.")
CACHED_KEY = arg("The first letters of an entry's key.")
CERTIFIED = kinds.plan("what `autoshard certify --out` or `autoshard plan --out` wrote", ("certificate",))
CONTEST, SCHEME = kinds.file("a contest instance, as JSON or gzipped JSON named .gz"), one_of(SCHEMES)
MEASURED = kinds.each(kinds.file("the output of nccl-tests or PARAM, nnscaler JSON, or CSV"))
SECONDS = number(above=True, finite=False)
LAUNCHER, PRECISION, RUNS_ON = one_of(tuple(LAUNCHERS), "launcher"), one_of(PRECISIONS), one_of(("cpu", "cuda"), "device")
THE_MODEL = arg("file.py:function; without it and with --trust the one the plan was made for.", kinds.MODEL, default=None)
MODEL_OPTION = opt("file.py:function; without it and with --trust the one the plan was made for.", kinds.MODEL, metavar="MODEL")
NUMBERS_HELP = "A number, or several as 1,2,4: every combination that can run is simulated, the fastest that fits first."

SHARED: dict[str, Typed] = {
    "model": arg(
        "file.py:function, which returns (module, example_inputs); or hf:DIR, a folder with a Hugging Face config.json.", kinds.MODEL
    ),
    "solution": arg("A plan, as `autoshard plan --out` writes it.", kinds.PLAN, "SOLUTION"),
    "trust": opt("Run the code of the model that the plan names, where no model is given.", SWITCH),
    "cluster": opt("A file of `calibrate measure`, instead of a mesh and bandwidths.", kinds.CLUSTER),
    "mesh": opt("Sizes of the mesh, slowest axis first: 2x4.", kinds.MESH),
    "intra_node_bandwidth": opt("Bytes per second per device, inside a node. Default: the device's own.", SIZE),
    "inter_node_bandwidth": opt("Bytes per second of one node's link to the others.", SIZE, default="400GB/s"),
    "device": opt(
        "a100, h100, h200, b200, ... (autoshard/cost/devices) or cpu; or a measured cluster.json.", kinds.DEVICE_OR_FILE, default="h100"
    ),
    "devices_per_node": opt("Default: all axes but the first.", count()),
    "tf32": opt('Price float32 matmuls as TF32: set torch.set_float32_matmul_precision("high") where it runs.', SWITCH),
    "prices": opt("Take bandwidths and device from `calibrate show`: a100, h100, b200, mi300x, ...", kinds.PRICED),
    "settings": opt("A keyword for the model's function; repeatable.", kinds.SETTINGS, "--set", metavar="KEY=VALUE"),
    "batch": opt("As --set batch=N: examples in the model's inputs.", count()),
    "seq": opt("As --set seq=N: tokens of each example.", count()),
    "dtype": opt("As --set dtype=NAME: bfloat16, float32, ... of the weights.", one_of(DTYPES)),
    "as_json": opt("Print one JSON object instead of tables.", SWITCH, "--json"),
    "quiet": opt("No progress, no notes.", SWITCH),
    "out": opt("Write the plan here: .json, or .pkl.", kinds.OUT),
}


def shared(*names: str) -> dict[str, Typed]:
    return {name: SHARED[name] for name in names}


NAMED = ("batch", "seq", "dtype")  # settings of models with an option of their own
OF_MODELS, LINKS, ANSWER = shared("settings", *NAMED), shared("intra_node_bandwidth", "inter_node_bandwidth"), shared("as_json", "quiet")
OF_PLANNED = shared("settings", "batch", "dtype", "trust")  # models of plans, by verbs for which `seq` is that of a launch
PRICES_OF_MESH = LINKS | shared("device", "tf32", "prices", "devices_per_node")
SITE = {  # of a launch
    "device": opt("a100, h100, h200, b200, ...: one of autoshard/cost/devices.", kinds.SITE_DEVICE, default="h100"),
    "per_node": opt("Devices of a node.", count(), default=8),
    "memory": opt("Of a device: 80GB. Default: all it has.", SIZE),
}
EVIDENCE = opt("A file with what own runs needed, by which answers are corrected; `fits --observed` writes it.", kinds.OUT)
HTML = opt("Write a page of HTML here.", kinds.OUT)
SEQ, GLOBAL_BATCH = "Tokens of a sequence.", "Sequences per step."
OF_LAUNCH = {  # what a launcher's configuration may leave open, and where it runs
    "launcher": opt(f"Of a configuration: {', '.join(LAUNCHERS)}. Default: by the file's ending.", LAUNCHER),
    "devices": opt("How many, where a configuration doesn't say.", count()),
    "seq": opt(SEQ, count()),
    "microbatch": opt("Sequences of a microbatch, where a configuration doesn't say.", count()),
    "global_batch": opt(GLOBAL_BATCH, count()),
    **SITE, **LINKS, "evidence": EVIDENCE,
}  # fmt: skip
ONLY = {  # of launches, by the names of their columns
    **{name: opt(f"Only {name} of these: 1,2.", COUNTS) for name in ("dp", "shard", "tp", "cp", "ep", "pp")},
    **{f"no_{name}": opt(f"Only {name} 1.", SWITCH) for name in ("tp", "cp", "ep", "pp")},
    "zero": opt("Only these stages of ZeRO: 1,3.", some_of(("0", "1", "2", "3"))),
    "microbatch": opt("Only microbatches of these many sequences: 1,2.", COUNTS),
    "schedule": opt("Only these schedules of pipelines: none, 1F1B, Interleaved1F1B, ZBVZeroBubble.", some_of(LAUNCH_SCHEDULES)),
    "recompute": opt("Only these kinds of recomputation.", some_of(RECOMPUTED)),
}  # fmt: skip
LAUNCH_OUT = opt("Write a configuration here, as the launcher reads it.", kinds.OUT)
RECORDS: dict[str, type] = {"pipeline": PipelineOptions}  # by verb; of the other verbs Options
# by verb, in the order of its --help
OWN: dict[str, dict[str, Typed]] = {
    "plan": {
        **shared("model"),
        "mesh": opt("Sizes of the mesh, slowest axis first: 2x4; or auto, to compare all shapes.", kinds.MESH_OR_AUTO),
        **OF_MODELS, **shared("cluster"),
        "devices": opt("With --mesh auto: how many.", count()),
        **shared("out"), **PRICES_OF_MESH,
        "devices_per_node": opt("Default: all axes but the first; 8 with --mesh auto.", count()),
        "keep": opt("Keep the parameters' layouts of this plan, edited perhaps.", kinds.PLAN, metavar="SOLUTION"),
        "free": opt("With --keep: parameters to plan anew; repeatable.", TEXTS, metavar="GLOB"),
        "switches": opt(
            "Of several programs: how often per unit copies of parameters are made anew; 0: once; none: there are no copies. Default: 1.",
            kinds.SWITCHES,
        ),
        **ANSWER,
    },
    "show": {
        "solution": arg(
            "A plan, as `autoshard plan --out` writes it; or a launcher's configuration.", kinds.plan(PLAN_OR_CONFIGURATION, ("pipeline",)),
            "SOLUTION",
        ),
        "other": arg("Another one, to compare it with.", kinds.plan(PLAN_OR_CONFIGURATION), "OTHER", default=None),
        "html": HTML,
        "model": MODEL_OPTION, **OF_PLANNED,
        "frontier": opt("Show this frontier on the page, a file of `frontier --out`.", kinds.file("what `autoshard frontier --out` wrote")),
        "no_model": opt("Don't build the model: no time line, no memory over time, no ops.", SWITCH),
        "exit_code": opt("With OTHER: exit with 1 where they differ.", SWITCH),
        **OF_LAUNCH, **ANSWER,
    },
    "verify": {
        **shared("solution"), "model": THE_MODEL, **OF_MODELS, **shared("trust"),
        "random": opt("Check this many plans drawn at random from the candidates too.", count(0), default=0),
        "seed": opt("Of the inputs and of the drawing.", count(0), default=0),
        "plant_fault": opt("Check a plan with a wrong row in it, which must fail.", SWITCH),
        "device": opt("Where all ranks run: cpu or cuda.", RUNS_ON, default="cpu"),
        "mark": opt("Where the answer is ok, note that in the plan's file.", SWITCH),
        **ANSWER,
    },
    "frontier": {
        **shared("model", "mesh"), **OF_MODELS, **shared("cluster"),
        "points": opt("How many proven points to look for.", count(), default=12),
        "gap": opt("Up to which gap a point counts as proven, relative.", number(), default=1e-3),
        "out": opt("Write the points and bounds here, as JSON.", kinds.OUT),
        "csv": opt("Write the points here, as CSV.", kinds.OUT),
        "plot": opt("Draw memory against seconds here: .png, .svg or .pdf.", kinds.PICTURE),
        "save_dir": opt("Write the plan of every point into this folder: point-00.json, ...", kinds.FOLDER),
        "time_limit": opt("Seconds for the sweep.", SECONDS, default=TIME_LIMIT),
        **PRICES_OF_MESH,
        "recompute": opt("Blocks to recompute in the backward pass: a number, or all.", recomputed(("all",)), default="0"),
        **ANSWER,
    },
    "pipeline": {
        **shared("model"),
        "devices": opt("How many devices, in equal nodes.", count()),
        "nodes": opt("Instead: N nodes of M devices, 2x8:h100; repeatable.", kinds.each(kinds.NODES), metavar="NxM:DEVICE"),
        **OF_MODELS,
        "memory": opt("Memory of a device: 80GB. Default: all it has. Repeat for further limits to answer for.", SIZES),
        "inference": opt("The forward pass alone.", SWITCH),
        "training": opt("A training step (this is the default).", SWITCH, "--train"),
        **LINKS,
        "device": opt("a100, h100, h200, b200, ... (autoshard/cost/devices) or cpu.", kinds.DEVICE, default="h100"),
        **shared("tf32"),
        "devices_per_node": opt("With --devices.", count(), default=DEVICES_PER_NODE),
        "workers": opt("Processes that plan stages; 1: this one.", kinds.WORKERS, default=2),
        "dask": opt("Plan stages on this Dask cluster: tcp://host:8786.", metavar="URL"),
        "out": opt("Write the pipeline with all its layouts here, as JSON.", kinds.OUT),
        "csv": opt("Write all configurations here.", kinds.OUT),
        "plot": opt("Draw speed-up over devices here: .png, .svg or .pdf.", kinds.PICTURE),
        **ANSWER,
    },
    "simulate": {
        "target": arg(
            "A plan's file; or file.py:function or hf:DIR, sharded by --data, --tensor and --pipeline.",
            kinds.MODEL_OR_PLAN, "SOLUTION|MODEL",
        ),
        "model": THE_MODEL, **OF_MODELS, **shared("trust"),
        "data": opt(f"Data-parallel degree. {NUMBERS_HELP}", COUNTS, default="1"),
        "tensor": opt("Tensor-parallel degree (Megatron).", COUNTS, default="1"),
        "pipeline": opt("Pipeline stages.", COUNTS, default="1"),
        "microbatches": opt("Microbatches per step; they divide the batch.", COUNTS, default="1"),
        "schedule": opt("sequential, gpipe, 1f1b, interleaved_1f1b or zb_h1.", one_of(SCHEDULES), default="1f1b"),
        "chunks": opt("Parts of the model per stage, for interleaved_1f1b.", count(), default=1),
        "scheme": opt(
            "Layouts within a stage: auto, data_parallel, fsdp, megatron, megatron_sp, or planned by the solver.", SCHEME, default="auto"
        ),
        "inference": opt("The forward pass of MODEL alone.", SWITCH),
        "no_overlap": opt("Collectives and kernels one after the other.", SWITCH),
        "no_join": opt("Of a plan: small reductions of gradients one by one.", SWITCH),
        "prefetch": opt("Parameters fetched ahead of their use.", count(0), default=12),
        "cluster": opt("Prices from a file of `calibrate measure`; a model uses all its devices.", kinds.CLUSTER),
        **LINKS, **shared("device", "tf32"),
        "devices_per_node": opt("Default: those of one stage.", count()),
        "trace": opt("Write a trace here, for ui.perfetto.dev.", kinds.OUT),
        "picture": opt("Draw the time line here: .png, .svg or .pdf.", kinds.PICTURE),
        **ANSWER,
    },
    "explain": {
        "solution": arg("A plan, or a launcher's configuration.", kinds.plan(PLAN_OR_CONFIGURATION), "SOLUTION"),
        "name": arg("A parameter, buffer, input, op, or a block: h.3, h.3.attn.", default=None),
        "why_not": opt("With NAME: what would this layout cost, as 'S(1),R'?", kinds.LAYOUT, metavar="LAYOUT"),
        "alternatives": opt("With NAME: how many other layouts to report.", count(0), default=5),
        "model": MODEL_OPTION, **OF_PLANNED,
        "robust": opt("Plan again under other bandwidths: where does the plan stay best, and what is lost outside?", SWITCH),
        "within": opt("With --robust: a regret that still counts as best, relative; 0.01 is one percent.", kinds.SHARE, default=0.0),
        "time_limit": opt("Seconds for each plan that is solved on the way.", SECONDS, default=60.0),
        **OF_LAUNCH, **ANSWER,
    },
    "certify": {
        "numbers": arg("The numbers that prove a plan, as --out writes them; with MODEL or --trust, a plan.", CERTIFIED, "NUMBERS|PLAN"),
        "model": THE_MODEL, **OF_MODELS, **shared("trust"),
        "out": opt("Write the numbers here, as JSON: all that the check needs.", kinds.OUT),
        "problem": opt("Write the plan's problem here, for another solver: .mps, .lp, or .json as `autoshard solve` reads it.", kinds.OUT),
        **ANSWER,
    },
    "check": {
        "solution": arg("A plan, or a launcher's configuration.", kinds.plan(PLAN_OR_CONFIGURATION), "SOLUTION"),
        "model": THE_MODEL, **OF_PLANNED,
        "within": opt("How far it may be above the best plan now: 5%, or 0.05.", kinds.PERCENT, default="5%"),
        "no_solve": opt("Do not plan anew; compare with a bound that is found faster.", SWITCH),
        "any_graph": opt("Accept a graph other than the one planned, if the layouts fit it: another batch size.", SWITCH),
        "cluster": opt("Today's prices: a file of `calibrate measure`. Default: those of the plan.", kinds.CLUSTER),
        "time_limit": opt("Seconds for planning anew.", SECONDS, default=600.0),
        **OF_LAUNCH, "html": HTML, "out": LAUNCH_OUT, **ANSWER,
    },
    "fits": {
        "target": arg(
            "A launcher's configuration (.toml, .sh, .yaml); or file.py:function or hf:DIR, a model.", kinds.MODEL_OR_CONFIGURATION,
            "MODEL|CONFIG",
        ),
        "model": arg("With a configuration that doesn't say its model: file.py:function or hf:DIR.", kinds.MODEL, default=None),
        **OF_LAUNCH,
        "seq": opt(f"{SEQ} Default of a model: 8192.", count()),
        "microbatch": opt("Sequences of a microbatch. Default of a model: 1.", count()),
        "global_batch": opt(f"{GLOBAL_BATCH} Default of a model: one microbatch per rank, with --pp two per stage.", count()),
        "launcher": opt(f"{', '.join(LAUNCHERS)}. Default: by the file's ending; torchtitan for a model.", LAUNCHER),
        "tp": opt("Of a model: tensor parallel degree.", count(), default=1),
        "pp": opt("Of a model: pipeline stages.", count(), default=1),
        "cp": opt("Of a model: context parallel degree.", count(), default=1),
        "recompute": opt(f"Of a model: {', '.join(RECOMPUTED)}.", one_of(RECOMPUTED), default="none"),
        "precision": opt(f"Of a model: of the blocks' matmuls: {', '.join(PRECISIONS)}.", PRECISION, default="bf16"),
        "compiled": opt("Of a model: blocks and loss are compiled.", SWITCH, "--compile"),
        **shared("settings"),
        "observed": opt(
            "What a run of this launch needed: 71.2GB as torch.cuda.max_memory_reserved says, its log, or a memory snapshot.", TEXT
        ),
        "html": HTML, **ANSWER,
    },
    "degrees": {
        **shared("model"),
        "devices": opt("How many, in equal nodes.", count(), default=REQUIRED),
        "seq": opt(SEQ, count(), default=8192),
        "global_batch": opt(GLOBAL_BATCH, count(), default=512),
        "launcher": opt(f"{', '.join(LAUNCHERS)}.", LAUNCHER, default="torchtitan"),
        "precision": opt(f"Of the blocks' matmuls: {', '.join(PRECISIONS)}.", PRECISION, default="bf16"),
        "compiled": opt("Blocks are compiled.", SWITCH, "--compile"),
        **shared("settings"), **SITE,
        **LINKS, **ONLY,
        "no_bound": opt("Leave out the bound of an unrestricted plan.", SWITCH),
        "time_limit": opt("Seconds for that bound.", SECONDS, default=30.0),
        "top": opt("Only so many, the best. Default: 20 in the table, all with --json.", count()),
        "evidence": EVIDENCE,
        "html": HTML,
        "row": opt("Where the seconds of the launch with this number go, which --out then writes; 1 is the best.", count()),
        "out": LAUNCH_OUT,
        "plot": opt("Draw memory against seconds here: .png, .svg or .pdf.", kinds.PICTURE),
        **ANSWER,
    },
    "serve-plan": {
        **shared("model"),
        "devices": opt("How many; replicas of the model share them.", count(), default=REQUIRED),
        "max_tokens": opt("Tokens of a sequence, prompt and answer, that the cache has room for.", count(2), default=REQUIRED),
        "batch": opt("Sequences that are served at the same time.", count(), default=REQUIRED),
        "prompt": opt("Tokens of a prompt. Default: half of --max-tokens.", count()),
        **shared("settings", "dtype"),
        "device": opt("One of `calibrate show`: a100, h100, h200, b200, mi300x, ...", kinds.PRICED, default="h100"),
        "devices_per_node": opt("How many devices a node has.", count(), default=DEVICES_PER_NODE),
        "memory": opt("Memory of a device: 72GB. Default: all it has.", SIZE),
        "expert_parallel": opt("Experts over the devices of all replicas: vLLM's --enable-expert-parallel.", SWITCH),
        "eager": opt("Every kernel is launched from the host: no CUDA graphs.", SWITCH),
        **ANSWER,
    },
    "demo": {"out": opt("Keep the plan in this file.", kinds.OUT)},
    "doctor": {
        "model": arg("file.py:function or hf:DIR: the model whose ops are looked up for --device.", kinds.MODEL, default=None),
        "device": opt("cuda: can each op run there? No GPU is needed.", RUNS_ON),
        "training": opt("Look at a training step instead of a forward pass.", SWITCH, "--train"),
        **OF_MODELS, **shared("as_json"),
    },
    "export": {
        **shared("solution"),
        "kind": opt(
            "sharding_map, json, parallelize_module, tp_plan (Hugging Face), vllm, sglang, fully_shard (with tensor parallel), "
            "distribute_module or checkpoint_policy.",
            one_of(EXPORTS, "export"), "--format", "--to", default="sharding_map",
        ),
        "axis": opt("Mesh axis that module styles shard over. Default: where the plan shards most."),
        "within": opt("How much longer than the plan a step may take as exported: 5%, or 0.05.", kinds.PERCENT, default="5%"),
        "out": opt("Write it here: .json; a sharding map as specs to .pkl; code for a launcher to .py.", kinds.OUT),
        "as_json": opt("Print one JSON object: the export, what it leaves out, its price.", SWITCH, "--json"),
        **shared("quiet"),
    },
    "redistribute": {
        "problem": arg(
            "Problems as JSON: shape, mesh, src, src_bs, dst, dst_bs; one or a list.",
            kinds.file("one or a list of shape, mesh, src, src_bs, dst, dst_bs"),
        ),
        "planner": opt("astar, the cheapest route; or naive, which gathers everything.", one_of(PLANNERS), default="astar"),
        "memory_limit": opt("Bytes per rank, for example 1GB; default: from the ends.", SIZE),
        "count": opt("What the limit counts: resident or buffers.", one_of(("resident", "buffers"))),
        **LINKS,
        **ANSWER,
    },
    "solve": {
        "problem": arg("A problem in the contest's format, .json or .json.gz.", CONTEST),
        "solver": opt("auto, prices, ilp, dp, dual or exhaustive.", one_of(SOLVERS, "solver"), default="auto"),
        "time_limit": opt("Seconds; then the best answer so far is returned, with its bound.", SECONDS, default=TIME_LIMIT),
        "gap": opt("Stop when the answer is proven to be within this of the best, relative.", number(), default=0.0),
        "out": opt("Write the choices here, as JSON.", kinds.OUT),
        **ANSWER,
    },
    "tables": {
        "spec": arg("Tables as CSV (name,rows,columns,...) or JSON.", kinds.file("tables as CSV in a file named .csv, or JSON")),
        "devices": opt("How many devices, or a mesh such as 2x8: nodes x devices of a node.", kinds.MESH, default="8"),
        "hbm": opt("Memory of a device.", SIZE, default="80GB"),
        "host_memory": opt("Memory of a host, shared by its devices; default: no table is placed there.", kinds.SIZE_OR_NONE),
        **LINKS,
        "host_bandwidth": opt("Bytes per second between a device and its host's memory.", SIZE, default="32GB/s"),
        **shared("device"),
        "batch": opt("Examples per device and step.", count(), default=512),
        "reserve": opt("Share of all memory that is kept free.", kinds.SHARE, default=0.15),
        "effort": opt("Times the usual number of search moves.", SECONDS, default=1.0),
        "seed": opt("Of the search; the same seed yields the same plan.", count(0), default=0),
        "out": opt("Write the plan as JSON.", kinds.OUT),
        "plot": opt("Write a bar plot of the load per device, PNG or SVG.", kinds.PICTURE),
        "every": opt("Print every table, not only those that take longest.", SWITCH, "--all"),
        **ANSWER,
    },
    "cache ls": {"location": CACHED, **ANSWER},
    "cache show": {"location": CACHED, "key": CACHED_KEY, **ANSWER},
    "cache prune": {"location": CACHED, "most": opt("Bytes that the entries may take: 1GB.", SIZE, default=REQUIRED), **ANSWER},
    "cache export": {
        "location": CACHED, "key": CACHED_KEY, "out": opt("Write the plan here: .json, or .pkl.", kinds.OUT, default=REQUIRED), **ANSWER,
    },
    "calibrate fit": {
        "files": arg("Output of nccl-tests or PARAM, nnscaler JSON, or CSV.", MEASURED),
        "out": opt("Write the curves here, as JSON.", kinds.OUT),
        "plot": opt("Draw curves and errors here: .png, .svg or .pdf.", kinds.PICTURE),
        "table": opt("Show every curve, also where there are many.", SWITCH),
        "collective": opt("Of files that don't say it."),
        "devices": opt("Of files that don't say it.", count()),
        "system": opt("A name for the cluster."),
        "alone": opt("Fit each curve by itself: others don't say how it runs between sizes.", SWITCH),
        **ANSWER,
    },
    "calibrate measure": {
        "mesh": replace(SHARED["mesh"], default=REQUIRED),
        "out": opt("Write the cluster here, again and again while it is measured.", kinds.OUT, default="cluster.json"),
        "seconds": opt("Time to measure in, without starting up.", number(1.0), default=40.0),
        "largest": opt("Largest buffer. Default: 64MiB on CPUs, 1GiB on GPUs.", SIZE),
        "backend": opt("nccl, gloo, or auto.", one_of(("auto", "nccl", "gloo")), default="auto"),
        **ANSWER,
    },
    "calibrate show": {"name": arg("One of them; default all.", kinds.PRICED, default=None), **shared("as_json")},
}  # fmt: skip


def option_of(verb: str, name: str) -> Declaration:
    """The declaration of one argument of a verb."""
    return OWN[verb].get(name) or options_of(record_of(verb))[name]


def record_of(verb: str) -> type:
    """The record of options of planning of which a verb has some."""
    return RECORDS.get(verb, Options)


def options_of_verb(verb: str) -> tuple[str, ...]:
    """The options of planning that a verb has, in the order of their declaration, without those that it declares itself."""
    return tuple(name for name, option in options_of(record_of(verb)).items() if verb in option.verbs and name not in OWN[verb])

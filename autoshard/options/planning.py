"""The options of planning: all that a plan depends on beside the model and the mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autoshard.options.declared import check_values, declared, defaults_of, having, options_of
from autoshard.options.kinds import (
    ACCEPTED,
    COUNTS,
    DIMS,
    FORBIDDEN,
    LAYOUTS,
    OFF,
    OPTIMIZER,
    PRECISION,
    SIZE,
    SIZES,
    SWITCH,
    TEXT,
    count,
    number,
    one_of,
    recomputed,
    some_of,
)
from autoshard.precision import Precision

OBJECTIVES = ("overlapped", "serial")
SOLVERS = ("auto", "prices", "ilp", "dp", "dual", "exhaustive")
TIME_LIMIT = 10000.0  # seconds for the proof, where no limit is set; refusal.PATIENCE limits the search for a first plan
SWEPT = ("plan", "frontier")  # verbs
SCHEMES = ("auto", "data_parallel", "fsdp", "megatron", "megatron_sp", "planned")  # of a simulated grid
SCHEDULES = ("sequential", "gpipe", "1f1b", "zb_h1", "interleaved_1f1b")
typed, untyped = partial(declared, verbs=("pipeline",)), partial(declared, verbs=())


@dataclass(frozen=True)
class Options:
    """Everything that a plan depends on beside the model and the mesh."""

    training: bool = declared(
        False, SWITCH, "Plan a training step instead of a forward pass.", flags=("--train",), verbs=SWEPT, kept=True, noted="always"
    )
    # or its bytes of state per parameter
    optimizer: str | float = declared(
        "adamw", OPTIMIZER, "Whose state memory holds: adamw, sgd, momentum, or bytes per parameter.",
        verbs=SWEPT, kept=True, noted="always", of_training=True,
    )  # fmt: skip
    # dtypes to compute and to reduce gradients in; also as text, "bf16"
    precision: Precision | None = declared(
        None, PRECISION,
        "Mixed precision: bf16, or bf16:reduce=bf16,output=fp32. Gradients are reduced in float32 unless it says otherwise.",
        metavar="DTYPE[:reduce=DTYPE]", verbs=SWEPT, kept=True,
    )  # fmt: skip
    # count the float32 copies that your optimizer holds of parameters of smaller dtypes; no plan makes them
    master_weights: bool = declared(
        False, SWITCH,
        "Count a float32 copy of 16-bit parameters that your optimizer holds: its bytes, its update's time. Running a plan makes none.",
        verbs=SWEPT, in_pass=False, kept=True, noted="always", of_training=True,
    )  # fmt: skip
    # bytes per device
    memory_limit: float | None = declared(
        None, SIZE, "Memory of a device: 80GB. Default: no limit.", flags=("--memory",), kept=True, noted="always",
        of_all=True, not_in={"frontier": "the frontier is about all memory limits"},
    )  # fmt: skip
    # layout by parameter, buffer, input or op name, or by a glob of names
    pins: Mapping[str, str] = declared(
        dict, LAYOUTS, "Fix the layout of what a name or glob means; repeatable.", flags=("--pin",), metavar="NAME=LAYOUT", verbs=SWEPT,
        noted="always",
    )  # fmt: skip
    # layouts of an older plan by name; pins go first
    keep: Mapping[str, str] = declared(dict, LAYOUTS, verbs=(), in_pass=False, not_in={"plan_programs": "pin the layouts instead"})
    # layouts that a tensor must not have, by name or glob
    forbid: Mapping[str, str | Sequence[str]] = declared(dict, FORBIDDEN, "Forbid a layout; repeatable.", metavar="NAME=LAYOUT")
    # work out what each pin and each forbidden layout costs
    price_pins: bool = declared(
        False, SWITCH, "Say what each pin and forbidden layout costs.", in_pass=False, noted="never",
        not_in={"frontier": "plan prices pins under one memory limit", "plan_programs": "plan the program alone to price its pins"},
    )  # fmt: skip
    solver: Any = declared(  # or any object with solve(problem, time_limit=, gap=)
        "auto", replace(one_of(SOLVERS, "solver"), schema=TEXT.schema), "auto, prices, ilp or exhaustive.", noted="always",
        in_fingerprint=False, of_all=True, not_in={"frontier": "the frontier has a solver of its own"},
    )  # fmt: skip
    # seconds, for the whole plan
    time_limit: float = declared(
        TIME_LIMIT, number(above=True, finite=False, unit="seconds"), "Seconds for the solver.", reopened=False,
        of_all=True, noted="never",
    )  # fmt: skip
    # relative
    gap: float = declared(
        0.0, number(), "Stop when proven to be within this of the best. Default: 0.001, after a minute 0.01.",
        in_pass=False, reopened=False, of_all=True, noted="always",
    )  # fmt: skip
    # (relative gap, seconds): after so many seconds a plan within that gap is enough
    accepted: tuple[float, float] = declared(
        (0.0, math.inf), ACCEPTED, verbs=(), in_pass=False, of_all=True, noted="never",
        not_in={"frontier": "a point counts as proven within `gap`"},
    )  # fmt: skip
    baselines: bool = declared(
        True, OFF, "Leave out the usual plans, such as FSDP and Megatron.", flags=("--no-baselines",), in_pass=False, reopened=False,
        noted="never",
        not_in={"frontier": "plan prices them", "plan_programs": "a program is compared with the best plan of it alone"},
    )  # fmt: skip
    skip_fully_replicated: bool = declared(False, SWITCH, verbs=(), noted="always", not_in={"plan_programs": "forbid the layout R instead"})
    # blocks to recompute in the backward: a number, "all", "blocks" (as many as pay); "auto": per tensor
    recompute: int | str = declared(
        0, recomputed(("all", "blocks", "auto")), "Recompute in the backward: a number of blocks, all, blocks, auto.", in_pass=False,
        kept=True, reopened=False, noted="always", of_training=True,
    )  # fmt: skip
    # equal ops of repeated blocks share one decision; the bound stays that of the untied graph
    tie_blocks: bool = declared(
        False, SWITCH, "Use the same layouts in all repeated blocks.", in_pass=False, kept=True, noted="always",
        not_in={"frontier": "its bound would not be that of the frontier", "plan_programs": "its bound would not be that of all programs"},
    )  # fmt: skip
    # of which a training step consists; the example inputs are those of one
    microbatches: int = declared(
        1, count(), "Of a training step; the model's inputs are those of one.", verbs=SWEPT, kept=True, of_training=True
    )
    # examples of a step: instead of `microbatches`, so many times the batch of the example inputs
    global_batch: int | None = declared(
        None, count(), "Examples of a step, instead of --microbatches.", verbs=SWEPT, noted="never", of_training=True
    )
    # of the sums of gradients over microbatches; by default that of the gradients
    accumulation_dtype: str | None = declared(
        None, one_of(("float32", "bfloat16", "float16", "float64")), verbs=(), in_pass=False, kept=True, of_training=True
    )
    # pointwise ops and reductions run in the kernels that torch.compile makes of them
    compiled: bool = declared(
        False, SWITCH, "Price the kernels of a compiled program: torch.compile fuses pointwise ops and reductions.", flags=("--compile",),
        verbs=SWEPT, kept=True,
    )  # fmt: skip
    # of long causal attention: natural, head_tail (balanced over shards of the sequence), or the better
    sequence_order: str = declared(
        "auto", one_of(("auto", "natural", "head_tail")),
        "Of long causal attention: auto, natural, or head_tail, which gives all shards the same work.", in_pass=False, reopened=False,
        noted="never",
    )  # fmt: skip
    # logits of a cross entropy for some tokens at a time: always, never, or where all don't fit
    chunked_loss: str = declared("auto", one_of(("auto", "always", "never")), verbs=(), in_pass=False, reopened=False, noted="never")
    # tokens of the busiest rank's experts as a multiple of its share; by default the mesh's, 1
    expert_imbalance: float | None = declared(
        None, number(1.0), "Tokens of the busiest rank's experts per its share. Default: 1.", in_pass=False
    )
    # seconds of the simulated time line; "serial": of all tasks one after the other
    objective: str = declared(
        "overlapped", one_of(OBJECTIVES),
        "What is made small: overlapped, the seconds of the simulated time line; or serial, the sum of all seconds.",
        not_in={"plan_programs": "the sum of all seconds is what is made small; plan the program alone"},
    )  # fmt: skip
    # ranges of sizes, as torch.export takes them, for all of which there is one plan
    dynamic_shapes: Any = declared(
        None, DIMS, "Plan for ranges of the sizes of inputs, by name or glob; repeatable.", metavar="INPUT=DIM:LEAST-GREATEST,...",
        reopened=False, noted="never", not_in={
            "frontier": "a point has one shape", "plan_programs": "give each shape as a program", "plan_meshes": "give one mesh",
        },
    )  # fmt: skip
    # of the seconds over the ranges, relative to the best plan of each size
    criterion: str = declared(
        "median", one_of(("median", "average", "worst")), "What is made small over the ranges: median, average, or worst.",
        reopened=False, noted="never", not_in={name: "it is of dynamic_shapes" for name in ("frontier", "plan_programs", "plan_meshes")},
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.of(self.precision))
        check_values(self)
        forbidden = {key: tuple(value) if isinstance(value, (list, tuple)) else (value,) for key, value in self.forbid.items()}
        object.__setattr__(self, "forbid", forbidden)

    def noted(self) -> dict[str, Any]:
        """The options as a plan notes them: those of "changed" only where they are used, so that plans from before them read as equal."""
        solver = self.solver if isinstance(self.solver, str) else type(self.solver).__name__
        values = {**vars(self), "precision": None if self.precision is None else str(self.precision), "solver": solver}
        usual, facts = defaults_of(self), options_of(self)
        changed = {key: value for key, value in values.items() if facts[key].noted == "changed" and value != usual[key]}
        return {key: value for key, value in values.items() if facts[key].noted == "always" or key in changed}

    def compared(self) -> dict[str, Any]:
        """What is noted of the options that ask for another plan; with an option of before, so that fingerprints stay what they are."""
        asked = having(self, "in_fingerprint")
        return {**{key: value for key, value in self.noted().items() if key in asked}, "witness": False}


def note_schema(name: str) -> dict[str, Any]:
    """The JSON schema, under this name, of what a plan's file notes of the options."""
    usual = defaults_of(Options)
    properties = {
        name: {"anyOf": [option.kind.schema, {"type": "null"}]} if usual[name] is None else option.kind.schema
        for name, option in options_of(Options).items()
        if option.noted != "never"
    }
    draft, title = "https://json-schema.org/draft/2020-12/schema", "Options of planning"
    description = "What a plan notes of the options that it was made with."
    return {"$schema": draft, "$id": name, "title": title, "description": description, "type": "object", "properties": properties}


@dataclass(frozen=True)
class PipelineOptions:
    """The options of the search for a pipeline, beside the model and the cluster."""

    training: bool = untyped(True, SWITCH)
    optimizer: str | float = typed("adamw", OPTIMIZER, "Whose state memory holds: adamw, sgd, momentum, or bytes per parameter.")
    # bytes per device; None: the device's own memory
    memory_limit: float | None = untyped(None, SIZE)
    # numbers to try; None: the powers of two that divide the batch, 32 at most
    microbatches: Sequence[int] | None = typed(None, COUNTS, "Numbers to try: 4,8,16. Default: powers of two that divide the batch.")
    schedules: Sequence[str] = typed(("1f1b", "gpipe", "interleaved_1f1b", "zb_h1"), some_of(SCHEDULES), "Schedules to try.")
    # the number of layers that the model is clustered into
    layers: int | None = typed(None, count(), "Into how many layers the model is clustered.")
    # device groups of the pipeline; None: as many as is best
    stages: int | None = typed(None, count(), "Groups of devices in a row. Default: the best.")
    # whether stages may recompute their activations: auto, never, always
    recompute: str = typed(
        "auto", one_of(("auto", "never", "always")), "Compute activations again in the backward pass: auto, never, always."
    )
    # that the runtime takes for each forward and each backward of a microbatch, beside kernels
    unit_seconds: float = untyped(0.0, number(unit="seconds"))
    # bytes per device: further limits to report on
    budgets: Sequence[float] = untyped((), SIZES)
    # also consider data x tensor x pipeline with fixed layouts
    grid: bool = typed(True, OFF, "Leave out data x tensor x pipeline with fixed layouts.", flags=("--no-grid",))

    def __post_init__(self) -> None:
        check_values(self)

"""The options of the search for a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autoshard.options.declared import check_values, declared
from autoshard.options.kinds import COUNTS, OFF, OPTIMIZER, SIZE, SIZES, SWITCH, count, number, one_of, some_of

SCHEDULES = ("sequential", "gpipe", "1f1b", "zb_h1", "interleaved_1f1b")
typed, untyped = partial(declared, verbs=("pipeline",)), partial(declared, verbs=())


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
    witness: bool = untyped(False, SWITCH)

    def __post_init__(self) -> None:
        check_values(self)

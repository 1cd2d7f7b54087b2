"""Common options of the verbs, and functions that load plans and the parts of autoshard that are slow to import."""

from __future__ import annotations

import shlex
from types import ModuleType
from typing import Annotated, Any

import typer

from autoshard.mesh import Device, Mesh, parse_shape

INTRA, INTER, DEVICE = "300GB/s", "400GB/s", "h100"  # the default, an H100 node: as Mesh.from_bandwidths

Model = Annotated[
    str,
    typer.Argument(
        help="file.py:function, which returns (module, example_inputs); or hf:DIR, a folder with a Hugging Face config.json.",
        show_default=False,
    ),
]
OptionalModel = Annotated[
    str | None, typer.Argument(help="file.py:function; without it and with --trust the one the plan was made for.", show_default=False)
]
Trust = Annotated[bool, typer.Option("--trust", help="Run the code of the model that the plan names, where no model is given.")]
Plan = Annotated[str, typer.Argument(metavar="SOLUTION", help="A plan, as `autoshard plan --out` writes it.", show_default=False)]
ClusterFile = Annotated[
    str | None, typer.Option("--cluster", help="A file of `calibrate measure`, instead of a mesh and bandwidths.", show_default=False)
]
IntraNodeBandwidth = Annotated[str, typer.Option("--intra-node-bandwidth", help="Bytes per second per device, inside a node.")]
InterNodeBandwidth = Annotated[str, typer.Option("--inter-node-bandwidth", help="Bytes per second of one node's link to the others.")]
DeviceName = Annotated[
    str, typer.Option("--device", help="a100, h100, h200, b200, ... (autoshard/cost/devices) or cpu; or a measured cluster.json.")
]
Tf32 = Annotated[
    bool, typer.Option("--tf32", help='Price float32 matmuls as TF32: set torch.set_float32_matmul_precision("high") where it runs.')
]
Prices = Annotated[
    str | None,
    typer.Option("--prices", help="Take bandwidths and device from `show-prices`: a100, h100, b200, mi300x, ...", show_default=False),
]
Train = Annotated[bool, typer.Option("--train", help="Plan a training step instead of a forward pass.")]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", help="Of a training step; the model's inputs are those of one. Default: 1.", min=1, show_default=False),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", help="Examples of a step, instead of --microbatches.", min=1, show_default=False)
]
ExpertImbalance = Annotated[
    float | None,
    typer.Option("--expert-imbalance", help="Tokens of the busiest rank's experts per its share. Default: 1.", min=1.0, show_default=False),
]
MASTER = "Count a float32 copy of 16-bit parameters that your optimizer holds: its bytes, its update's time. Running a plan makes none."
MasterWeights = Annotated[bool, typer.Option("--master-weights", help=MASTER)]
PRECISION = "Mixed precision: bf16, or bf16:reduce=bf16,output=fp32. Gradients are reduced in float32 unless it says otherwise."
PrecisionText = Annotated[str | None, typer.Option("--precision", metavar="DTYPE[:reduce=DTYPE]", help=PRECISION, show_default=False)]
Pin = Annotated[
    list[str],
    typer.Option("--pin", metavar="NAME=LAYOUT", help="Fix the layout of what a name or glob means; repeatable.", show_default=False),
]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="A keyword for the model's function; repeatable.", show_default=False)
]
BatchSize = Annotated[
    int | None, typer.Option("--batch", help="As --set batch=N: examples in the model's inputs.", min=1, show_default=False)
]
SeqLength = Annotated[int | None, typer.Option("--seq", help="As --set seq=N: tokens of each example.", min=1, show_default=False)]
DType = Annotated[
    str | None, typer.Option("--dtype", help="As --set dtype=NAME: bfloat16, float32, ... of the weights.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Objective = Annotated[
    str, typer.Option(help="What is made small: serial, the sum of all seconds; or overlapped, the seconds of the simulated time line.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no notes.")]
OldMesh = Annotated[str | None, typer.Option("--mesh", help="For old plans, whose files don't say: the mesh, 2x4.", show_default=False)]


def load_api() -> ModuleType:
    from autoshard import api  # here: torch takes seconds to import, which --help and `solve` shouldn't

    return api


def load_report() -> ModuleType:
    from autoshard import report  # here: as above

    return report


def load_cluster(path: str) -> Mesh:
    from autoshard.cost import load_cluster as load  # here: torch again

    return load(path)


def load_device(device: str) -> str | Device:
    """The name of a device as it is; of a file of `calibrate measure` the device that was measured."""
    if not device.endswith(".json"):
        return device
    from autoshard.cost import load_device as load  # here: as above

    return load(device)


def load_plan(path: str, mesh: str | None) -> Any:
    return load_api().load(path) if mesh is None else load_api().load(path, Mesh.from_bandwidths(parse_shape(mesh)))


def load_any_plan(path: str, mesh: str | None) -> Any:
    """A plan of one program, or of several."""
    return load_api().load_any(path, None if mesh is None else Mesh.from_bandwidths(parse_shape(mesh)))


def model_of(
    solution: Any, model: str | None, settings: dict, path: str, trust: bool, *, option: str = "", without: str = ""
) -> tuple[str, dict]:
    """The model that the user names; or with `trust` the one that the plan names with its settings, those given now on top.

    A model is code that runs, and a plan may be anybody's file: ValueError, which shows the plan's model, where nobody said to run it.
    option: how the verb takes a model where not as an argument; without: its words for going on without one.
    """
    if model is not None:
        return model, settings
    named, given = solution.model, solution.model_settings or {}
    if not named:
        raise ValueError(f"{path} does not say which model it is for; name it after the file, for example {path} models/gpt2.py:small")
    if not isinstance(named, str) or not isinstance(given, dict):
        raise ValueError(f"{path} says its model is {str(named)[:80]!r} with settings {str(given)[:80]!r}; expected text; name it yourself")
    settings = {**given, **settings}
    if not trust:
        words = [*option.split(), named, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]
        raise ValueError(
            f"{path} is for a model whose code would run; to run it name it yourself: {shlex.join(words)[:400]}; or add --trust, which "
            f"runs what the plan names{without}"
        )
    return named, settings

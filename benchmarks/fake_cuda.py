"""Is the graph captured from CUDA tensors the one captured from the CPU's? Fake tensors on both: needs a CUDA build of torch, no GPU.

    python benchmarks/fake_cuda.py [--device cuda] [--real] [NAME ...] [--json]

For each model (the bundled ones, the two-layer Hugging Face ones that the tests use and strangers.py) and mode: torch.export and, for
training, AOTAutograd trace it with parameters and inputs on the device, and autoshard reads the graph. It has to be, op by op, the graph
that is read from the same trace on the CPU: target, inputs, literals, shapes and dtypes. What differs is listed by target. `view` and
`_unsafe_view` count as equal and are listed: a plan of the one is applied to the other.
With fake tensors a training row is the forward of the module in training, with its loss: autograd of fake CUDA tensors asks a driver for
streams. Equal forwards have equal backwards. --real: tensors with memory, backward included, which needs a GPU.
"""

# ruff: noqa: E402  (this folder must not hide packages)
import argparse
import copy
import json
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.export.passes import move_to_device_pass
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.capture import capture_fx
from autoshard.capture.experts import experts_as_one_op
from autoshard.capture.nested_tensors import listed
from autoshard.capture.replaced import replaced_operators
from autoshard.torch_private import FakeTensorMode, aot_export_joint_with_descriptors, pytree
from benchmarks import coverage
from benchmarks.strangers import STRANGERS

BUNDLED = ("gpt2", "llama", "bert", "mlp", "moe", "dlrm", "resnet", "unet")


def names() -> list[str]:
    return sorted({*BUNDLED, *coverage.names(), *STRANGERS})


def built(name: str, training: bool):
    if name in BUNDLED:
        from autoshard.cli.model import load_model

        return load_model(f"{coverage.ROOT}/models/{name}.py:tiny", {"loss": training} if name in (*coverage.OWN, "gpt2", "llama") else {})
    return coverage.build(name, training)


def on(device: str, module: nn.Module, example_inputs, real: bool):
    """The module and its inputs on a device, with memory or without."""
    module = copy.deepcopy(module)
    mode = nullcontext() if real else FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with mode:

        def placed(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(x.shape, dtype=x.dtype, device=device).requires_grad_(x.requires_grad)

        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for key, x in held.items():
                    if x is not None:
                        held[key] = nn.Parameter(placed(x.detach()), x.requires_grad) if isinstance(x, nn.Parameter) else placed(x)
        return mode, module, pytree.tree_map(lambda x: placed(x) if isinstance(x, torch.Tensor) else x, example_inputs)


def traced(device: str, module: nn.Module, example_inputs, training: bool, real: bool):
    """The Graph of a trace on the device."""
    mode, module, example_inputs = on(device, module, example_inputs, real)
    args, kwargs = ((), example_inputs) if isinstance(example_inputs, dict) else (tuple(example_inputs), {})
    with torch.set_grad_enabled(training), replaced_operators(), replaced_operators(device.upper()):
        with mode:
            program = torch.export.export(module, args, kwargs, strict=False)
        experts_as_one_op(program.graph_module)
        if not training or not real:
            return capture_fx(program if device == "cpu" else move_to_device_pass(program, "cpu")).graph  # nested graphs name devices too
        with ExitStack() as stack, mode:
            joint = aot_export_joint_with_descriptors(stack, program.module(check_guards=False), *listed((args, kwargs)))
    return capture_fx(joint.graph_module).graph


def rows_of(graph) -> list[str]:
    rows = [repr((op.target, op.inputs, op.literals, op.outputs, op.kind)) for op in graph.ops]
    return [row.replace("cuda:0", "cpu").replace("'cuda'", "'cpu'").replace("aten._unsafe_view.", "aten.view.") for row in rows]


def compared(name: str, training: bool, device: str, real: bool = False) -> dict:
    """equal: the two graphs are one; else by target how many more there are on the device, or why there is none."""
    row = {"model": name, "training": training}
    try:
        module, example_inputs = built(name, training)
        expected = traced("cpu", module, example_inputs, training, real)
    except Exception as error:  # a model that can't be traced on the CPU either is no answer
        return {**row, "equal": None, "why": str(error).splitlines()[0][:200]}
    try:
        given = traced(device, module, example_inputs, training, real)
    except Exception as error:
        return {**row, "equal": False, "why": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    more = Counter(op.target for op in given.ops)
    more.subtract(Counter(op.target for op in expected.ops))
    differing = {target: count for target, count in more.items() if count}
    same = rows_of(given) == rows_of(expected)
    first = next((" / ".join(pair) for pair in zip(rows_of(given), rows_of(expected)) if pair[0] != pair[1]), "")
    return {
        **row,
        "equal": same,
        "ops": len(given.ops),
        "more_on_device": differing,
        "why": "" if same or differing else f"other literals or shapes: {first}"[:500],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.device == "cuda" and torch.version.cuda is None:
        sys.exit("this torch is built without CUDA: install one with it, or give --device cpu to try the script")
    rows = []
    for name in given.name or names():
        for training in coverage.modes(name):
            rows.append(compared(name, training, given.device, given.real))
            if not given.json:
                one = rows[-1]
                said = {True: "equal", False: "differs", None: "not traced"}[one["equal"]]
                print(
                    f"{name:20} {'training' if training else 'inference':10} {said:10} {one.get('more_on_device') or ''} {one['why']}",
                    flush=True,
                )
    judged = [one for one in rows if one["equal"] is not None]
    summary = {"equal": sum(one["equal"] for one in judged), "compared": len(judged), "not_traced": len(rows) - len(judged)}
    print(json.dumps({**summary, "rows": rows, "torch": torch.__version__}) if given.json else summary)
    return int(summary["equal"] < summary["compared"])


if __name__ == "__main__":
    sys.exit(main())

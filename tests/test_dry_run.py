"""A dry run on a device that isn't there: which ops of a lowered program have no kernel for it."""

import json
import random
from functools import cache

import pytest
import torch
from torch import nn

import autoshard
from autoshard import api
from autoshard.capture import capture
from autoshard.cli import main
from autoshard.cli.model import load_model
from autoshard.graph import Const, Graph, Op, Ref, Result, Tensor
from autoshard.layout import text
from autoshard.lower.dry_run import dry_run, has_kernel
from autoshard.lower.program import lower
from autoshard.solution import Placed
from autoshard.strategies import candidates
from tests.helpers_lower import mesh_of
from tests.helpers_refusals import assert_refused

aten = torch.ops.aten
BUNDLED = ("gpt2", "llama", "bert", "moe", "resnet", "unet", "dlrm", "mlp")
COVERED = ("llama", "mixtral", "vit")
MORE = ("bart", "clip", "deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_neox", "phi", "qwen3_moe", "t5", "whisper")
ALIKE = [  # as llama or resnet, or as in training
    ("hf llama", False), ("hf llama", True), ("hf mixtral", False), ("bert", False), ("unet", False), ("unet", True),
]  # fmt: skip
QUICK = [(name, training) for name in (*BUNDLED, *(f"hf {name}" for name in COVERED)) for training in (False, True)]
SLOW = [*ALIKE, *((f"hf {name}", training) for name in MORE for training in (False, True))]
EVERY = [*(one for one in QUICK if one not in ALIKE), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]


def drawn(graph: Graph, mesh, seed: int) -> dict[str, Placed]:
    """A candidate for each op at random; inputs are never Partial, as no route leads there."""
    generator, layouts = random.Random(seed), {}
    for op, of in zip(graph.ops, candidates(graph, mesh).of, strict=True):
        usable = [c for c in of if not any(p.is_partial() for layout in (c.inputs or c.outputs) for p in layout)]
        c = generator.choice(usable)
        layouts[op.name] = Placed(tuple(map(text, c.inputs)), tuple(layout and text(layout) for layout in c.outputs))
    return layouts


@cache
def captured(name: str, training: bool) -> Graph:
    if name in BUNDLED:
        model, inputs = load_model(f"models/{name}.py:tiny", {"loss": training})
    else:
        model, inputs = load_model(f"hf:tests/data/hf/{name.removeprefix('hf ')}", {"layers": 1}, training=training)
    return capture(model, inputs, training=training)


def problems(graph: Graph, *sizes: int, seed: int = 0):
    mesh = mesh_of(*sizes)
    return dry_run(lower(graph, drawn(graph, mesh, seed), {}, mesh, device="cuda"), graph)


@pytest.mark.parametrize(("name", "training"), EVERY)
def test_every_op_of_a_lowered_model_can_run_on_a_gpu(name, training):
    for sizes in ((2,), (2, 2)):
        assert problems(captured(name, training), *sizes) == ()


def test_the_kernel_of_a_cpu_fails_it():
    q = Tensor((2, 4, 8, 4), "float32")
    target = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    inputs = tuple(Op(name, "input", (), ((), ()), (q,), "input") for name in "qkv")
    literals = ((Ref(0), Ref(1), Ref(2), 0.0, True), ())
    op = Op("op", target, ((0, 0), (1, 0), (2, 0)), literals, (q, Tensor((2, 4, 8), "float32")), module="h.0")
    graph = Graph((*inputs, op), (Result("output", "0", (3, 0)),))
    layouts = {name: Placed((), ("R",)) for name in "qkv"} | {"op": Placed(("R",) * 3, ("R", "R"))}
    (problem,) = dry_run(lower(graph, layouts, {}, mesh_of(2), device="cuda"), graph)
    assert (problem.op, problem.module, problem.target) == ("op", "h.0", target) and "no kernel for cuda" in problem.why


def factory(device: str) -> Graph:
    y = Tensor((4,), "float32")
    literals = (((4,), 1.0), (("device", Const("device", "cpu")), ("dtype", Const("dtype", "float32"))))
    return Graph((Op("full", "aten.full.default", (), literals, (y,)),), (Result("output", "0", (0, 0)),))


def test_constants_are_placed_on_the_device_of_the_run_and_one_elsewhere_is_named():
    graph, layouts = factory("cuda"), {"full": Placed((), ("R",))}
    assert dry_run(lower(graph, layouts, {}, mesh_of(2), device="cuda"), graph) == ()
    (problem,) = dry_run(lower(graph, layouts, {}, mesh_of(2), device="cpu"), graph, "cuda")
    assert problem.op == "full" and "a tensor on cpu" in problem.why


HAVE = {  # as native_functions.yaml of torch 2.13 says it
    "mm.default": True, "add.Tensor": True, "view.default": True, "convolution.default": True, "linear.default": True,
    "_native_batch_norm_legit_functional.default": True, "_native_batch_norm_legit_no_training.default": True, "_grouped_mm.default": True,
    "_scaled_dot_product_flash_attention.default": True, "_scaled_dot_product_flash_attention_for_cpu.default": False,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": False, "mkldnn_rnn_layer.default": False, "_cudnn_rnn.default": True,
    "quantize_per_tensor.default": True, "mkldnn_linear.default": False, "native_dropout.default": True, "bernoulli.p": True,
}  # fmt: skip


def test_the_table_of_kernels_is_read():
    overloads = {name: getattr(getattr(aten, name.split(".")[0]), name.split(".")[1]) for name in HAVE}
    assert {name: has_kernel(overload, "CUDA") for name, overload in overloads.items()} == HAVE
    assert has_kernel(aten._scaled_dot_product_flash_attention_for_cpu.default, "CPU") and not has_kernel(aten._cudnn_rnn.default, "CPU")


torch.library.define("dry_run_test::cpu_only", "(Tensor x) -> Tensor")
torch.library.impl("dry_run_test::cpu_only", "CPU", lambda x: x.clone())
torch.library.register_fake("dry_run_test::cpu_only", lambda x: torch.empty_like(x))
torch.library.register_autograd("dry_run_test::cpu_only", lambda ctx, grad: grad)


class OnlyOnCPU(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return torch.ops.dry_run_test.cpu_only(y) + 1  # this line


def line_of_op() -> str:
    lines = open(__file__).read().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith('# this line'))}"


def test_a_models_op_without_a_kernel_is_named_with_its_line():
    found = autoshard.dry_run(OnlyOnCPU(), (torch.empty(2, 4),))
    assert not found["ok"] and found["ops"] == len(capture(OnlyOnCPU(), (torch.empty(2, 4),), training=False).ops) - 3
    (row,) = found["cannot_run"]
    assert row["target"] == "dry_run_test.cpu_only.default" and "no kernel for cuda" in row["why"] and row["line"] == line_of_op()


def test_a_plan_is_run_dry_in_its_layouts():
    model, inputs = load_model("models/mlp.py:tiny", {})
    solution = api.plan(model, inputs, mesh_of(2), baselines=False, objective="serial")
    assert api.dry_run(model, inputs, solution)["ok"]
    assert_refused("device is 'tpu'; expected one of cpu, cuda", api.dry_run, model, inputs, solution, device="tpu")


NET = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.ops.dry_run_test.cpu_only(self.layer(x))
        return y.mean()

def model():
    return Model(), (torch.empty(2, 3, 4),)
"""


@pytest.mark.parametrize("training", [[], ["--train"]], ids=["inference", "training"])
def test_doctor_names_what_a_device_cannot_run(tmp_path, capsys, monkeypatch, training):
    monkeypatch.setenv("COLUMNS", "400")  # so that no line of the folder's name is folded
    (tmp_path / "net.py").write_text(NET)
    asked = ["doctor", f"{tmp_path}/net.py:model", "--device", "cuda", *training]
    assert main([*asked, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["cannot_run"]
    assert rows[0]["target"] == "dry_run_test.cpu_only.default" and rows[0]["line"] == f"{tmp_path}/net.py:11"
    assert main(asked) == 1 and "net.py:11" in capsys.readouterr().out
    assert main(["doctor", "models/mlp.py:tiny", "--device", "cuda", *training]) == 0 and "can run on cuda" in capsys.readouterr().out
    assert main(["doctor", "--device", "cuda"]) == 2 and "go together" in capsys.readouterr().err


def test_without_a_gpu_verify_on_one_is_an_error_in_one_sentence():
    model, inputs = load_model("models/mlp.py:tiny", {})
    solution = api.plan(model, inputs, mesh_of(2), baselines=False, objective="serial")
    if not torch.cuda.is_available():
        assert_refused("^device is cuda, but torch sees no GPU here; [^.]*$", api.verify, model, inputs, solution, device="cuda")
    assert_refused("device is 'tpu'; expected one of cpu, cuda", api.verify, model, inputs, solution, device="tpu")

"""torch's private names have one room: this torch has every one of them, and no other room names one."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard import torch_private
from autoshard.torch_private import FORMS, Form, check_all, private, source_of, untested

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("autoshard", "models", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
ROOM = ROOT / "autoshard" / "torch_private.py"
# Private attributes of torch's objects that the package reads, with the class whose objects have them.
ATTRIBUTES = {
    "_backward_hooks": "torch.nn.Module",
    "_backward_pre_hooks": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_cdata": "torch.UntypedStorage",
    "_codegen": "torch.fx.Graph",
    "_destroy": "torch.library.Library",
    "_dispatch_cache": "torch._ops.OpOverload",
    "_flatten": "torch.distributed.DeviceMesh",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_load_csv": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "_load_from_state_dict": "torch.nn.Module",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_modules": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_prepare_schedule_with_comms": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "_root": "torch.fx.Graph",
    "_schema": "torch._ops.OpOverload",
    "_spec": "torch.distributed.tensor.DTensor",
    "_timeout": "torch.distributed.ProcessGroupGloo._Options",
    "_version": "torch.Tensor",
}
NOT_TORCHS = {"_asdict", "_replace", "_exit", "_attn_implementation", "_from_config"}  # of namedtuples, os and transformers


def test_this_torch_has_every_name():
    assert check_all() == []


def test_a_name_that_torch_moved_is_reported_with_version_and_cure():
    moved = {"OpSpec": [Form("torch.distributed.tensor._op_schema:OpSpecification")], "pytree": [Form("torch.utils._trees")]}
    first, second = check_all(forms=moved)
    assert f"torch {torch.__version__} has no torch.distributed.tensor._op_schema.OpSpecification, autoshard's OpSpec" in first
    assert "has no torch.utils._trees, autoshard's pytree" in second
    assert first.endswith("tested with torch 2.12 to 2.15: install one of these, or a newer autoshard")
    with pytest.raises(ValueError, match="_trees"):  # which the command line answers in a sentence
        private("pytree", forms=moved)


def test_a_name_with_two_forms_is_looked_up_in_that_of_the_version():
    forms = {"pytree": [Form("torch.utils._trees", until=(2, 13)), Form("torch.utils._pytree", since=(2, 14))]}
    assert private("pytree", (2, 14), forms) is private("pytree", (2, 99), forms) is torch_private.pytree
    (error,) = check_all((2, 13), forms)
    assert "torch.utils._trees" in error


def test_programs_that_we_write_import_what_this_torch_has():
    names: dict = {}
    exec(source_of("replicate"), names)
    assert names["replicate"] is torch_private.replicate


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = torch_private.nothing


def test_every_row_has_a_user():
    used = {name for path in SOURCES for _, name in re.findall(r"(\bsource_of\('|\b)([A-Za-z_0-9]+)", path.read_text()) if path != ROOM}
    assert set(FORMS) <= used


def objects() -> dict:
    """One of each class whose private attributes are read, by the class's name."""
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("a",), _init_backend=False, _rank=0)
    return {
        "torch.Tensor": torch.ones(1),
        "torch.UntypedStorage": torch.ones(1).untyped_storage(),
        "torch._ops.OpOverload": torch.ops.aten.mm.default,
        "torch.distributed.DeviceMesh": mesh,
        "torch.distributed.ProcessGroupGloo._Options": torch_private.GlooOptions(),
        "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": torch_private.PipelineScheduleRuntime,  # its methods are read
        "torch.distributed.tensor.DTensor": DTensor.from_local(torch.ones(1), mesh, [Replicate()], run_check=False),
        "torch.fx.Graph": torch.fx.Graph(),
        "torch.library.Library": torch.library.Library("autoshard_attributes", "FRAGMENT"),
        "torch.nn.Module": nn.Linear(1, 1),
    }


def test_torchs_objects_have_the_attributes_that_are_read():
    known = objects()
    assert [f"{kind}.{name}" for name, kind in ATTRIBUTES.items() if not hasattr(known[kind], name)] == []


@cache
def own_names() -> set[str]:
    """Attributes with an underscore that the package defines itself; those of another room are test_rooms.py's."""
    return {
        node.name if isinstance(node, ast.FunctionDef) else node.attr if isinstance(node, ast.Attribute) else node.id
        for path in SOURCES
        for top in ast.parse(path.read_text()).body
        if isinstance(top, ast.ClassDef)
        for node in ast.walk(top)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }


def names_of_torch(nodes: list) -> set[str]:
    """The names of a file that are modules or objects of torch."""
    bound = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                if (module or alias.name).split(".")[0] == "torch":
                    bound.add((alias.asname or alias.name).split(".")[0])
    return bound


def private_uses(source: str) -> list[str]:
    """Line and text of each private name of torch that a file names, and of each private attribute that is in no list."""
    nodes, uses = list(ast.walk(ast.parse(source))), []  # walking takes longer than what is done with the nodes
    of_torch = names_of_torch(nodes)
    own = {n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in ("self", "cls")}
    known = {*ATTRIBUTES, *NOT_TORCHS, *own, *own_names()}
    for node in nodes:
        text = ""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            text = next((f"{node.module}.{alias.name}" for alias in node.names if "._" in f"{node.module}.{alias.name}"), "")
        elif isinstance(node, ast.Import):
            text = next((alias.name for alias in node.names if alias.name.startswith("torch.") and "._" in alias.name), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = next(iter(re.findall(r"\btorch(?:\.\w+)*\._\w+", node.value)), "")
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            whole = ast.unparse(node)
            is_module = re.fullmatch(r"[\w.]+", whole) and whole.split(".")[0] in of_torch
            is_operator = whole.startswith(("aten.", "torch.ops.aten."))
            if not is_operator and (is_module or node.attr not in known):
                text = whole
        if text:
            uses.append(f"{node.lineno}: {text}")
    return uses


def test_no_other_file_names_a_private_part_of_torch():
    uses = [f"{path.relative_to(ROOT)}:{use}" for path in SOURCES if path != ROOM for use in private_uses(path.read_text())]
    assert uses == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch._subclasses import FakeTensorMode",
        "from torch.utils import _pytree as pytree",
        "def f():\n    import torch._dynamo",
        "import torch\ntorch._C._nn._parse_to()",
        "import torch.distributed as dist\ndist.distributed_c10d._set_pg_timeout()",
        "from torch import nn\nnn.utils.stateless._reparametrize_module()",
        "from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher",
        "code = 'from torch.distributed._composable.replicate_with_fsdp import replicate'",
        "def f(x):\n    return x._typed_storage()",
    ],
)
def test_a_planted_private_name_is_caught(source):
    assert private_uses(source)


@pytest.mark.parametrize("source", ["aten = torch.ops.aten\naten._to_copy", "x._spec", "row._replace(a=1)", "self._whatever"])
def test_operators_and_listed_attributes_pass(source):
    assert private_uses(f"import torch\n{source}") == []


def test_versions_that_were_not_tested_are_named():
    assert untested((2, 12)) == untested((2, 15)) == ""
    assert untested((2, 99), "2.99.1") == "torch 2.99.1 is not among the versions that autoshard is tested with, 2.12 to 2.15"


def test_a_newer_torch_is_warned_about_once_and_works():
    script = """if True:
        import warnings, torch
        torch.__version__ = "2.99.0"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            from autoshard.capture import capture
            for width in (4, 8):
                assert capture(torch.nn.Linear(width, 2), (torch.ones(3, width),), training=False).ops
        assert sum("torch 2.99.0 is not among" in str(w.message) for w in warned) == 1
    """
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)

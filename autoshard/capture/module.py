"""Models and fx graphs -> Graph. The only reader of fx; everything runs under fake tensors, so no weights are in memory.

Two ways in, one way out:

    training    dynamo captures the module, AOTAutograd joins forward and backward into one ATen graph
    inference   torch.export captures the module (or the caller brings a graph), an interpreter runs it once more under
                make_fx, below autograd, so that linear, layer_norm, attention become the same ATen ops as in training

Running a given graph through an interpreter also says which traced value each of its nodes became (`Captured.values`): that
is how layouts find their way back onto the nodes that the caller gave.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import operator
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from autoshard.graph import Const, Graph, Op, Ref, Result, Tensor, Value

ALWAYS_VIEWS = {"aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default"}


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Captured:
    """A Graph and the fx graph that it stands for. values: for each of its nodes the Value that the node became, nested as the
    node's result is, None where that is no tensor."""

    graph: Graph
    given: fx.GraphModule | ExportedProgram
    values: dict[fx.Node, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Named:
    """What a placeholder of a traced graph stands for."""

    kind: str
    name: str
    value: torch.Tensor | None = None  # of a constant that the program holds


def capture(module: nn.Module, example_inputs: Any, *, training: bool) -> Graph:
    """`capture_module(...).graph`, for those who don't need the fx graph."""
    return capture_module(module, example_inputs, training=training).graph


def capture_module(module: nn.Module, example_inputs: Any, *, training: bool) -> Captured:
    """The program of one call (or one training step up to the gradients) of `module`.

    example_inputs: a tuple of positional arguments or a dict of keyword arguments, tensors on any device; the meta device
    costs no memory. training: forward and backward joined; the module must return a tensor, or several, to differentiate.
    ValueError says what stopped the capture, and where.
    """
    args, kwargs = _arguments(example_inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fake_module, fake_args, fake_kwargs = _to_fake(mode, module, args, kwargs)
    torch._dynamo.reset()  # automatic dynamic shapes would turn the second model of a process into a symbolic one
    with _explained(module):
        if training:
            captured = _capture_training(mode, fake_module, fake_args, fake_kwargs)
        else:
            with mode, torch.no_grad(), redirect_stderr(io.StringIO()):  # where it fails it prints the graph so far
                program = torch.export.export(fake_module, fake_args, fake_kwargs, strict=False)
            captured = capture_given(program)
    if not any(result.value is not None for result in captured.graph.results):
        raise ValueError(f"{type(module).__name__} returns no tensor; there is nothing to plan")
    return replace(captured, graph=_merge_tied(captured.graph, tied_parameters(module)))


def tied_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names of one and the same parameter, groups of one left out."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _merge_tied(graph: Graph, groups: Sequence[Sequence[str]]) -> Graph:
    """The graph with the names of each tied parameter noted: a capture leaves the second name as an input that nobody reads."""
    tied = []
    for names in groups:
        present = [name for name in names if name in graph.parameters]
        used = [name for name in present if (graph.parameters[name], 0) in graph.users] or present
        tied += [(name, used[0]) for name in names if used and name not in used]
    return replace(graph, tied=tuple(tied))


def capture_given(given: fx.GraphModule | ExportedProgram, example_inputs: Any = None) -> Captured:
    """The inference program of a graph that somebody else captured, with the value that each given node became.

    given: an ExportedProgram, a GraphModule of ATen nodes, or one from torch.fx.symbolic_trace. example_inputs: needed when
    the placeholders carry no `meta["val"]`.
    """
    mode = _mode_of(given)
    result_names: list[tuple[str, str]] | None
    if isinstance(given, ExportedProgram):
        if any(_is_mutable(node) for node in given.graph.nodes):
            given = given.run_decompositions({})
            mode = _mode_of(given)
        names, fakes, result_names = _export_signature(given, mode)
        module: fx.GraphModule = given.graph_module
        params: dict[str, torch.Tensor] = {}
        tied: Sequence[Sequence[str]] = ()
    else:
        module = given
        names, fakes = _placeholder_inputs(module, example_inputs, mode)
        params = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tied = tied_parameters(module)
        names = [_Named("parameter" if isinstance(p, nn.Parameter) else "buffer", n) for n, p in params.items()] + names
        fakes = [_fake(mode, p) for p in params.values()] + fakes
        result_names = _described_results(module)
    recorder = _Recorder(module)

    def run(*flat: torch.Tensor) -> Any:
        with nn.utils.stateless._reparametrize_module(module, dict(zip(params, flat, strict=False)), tie_weights=True, strict=False):
            return recorder.run(*flat[len(params) :], enable_io_processing=False)

    with _explained(module), mode, torch.no_grad():
        traced = make_fx(run)(*fakes)
    leaves = pytree.tree_leaves(next(node for node in traced.graph.nodes if node.op == "output").args[0])
    results = list(zip(result_names or [("output", str(i)) for i in range(len(leaves))], leaves, strict=True))
    recorded = {leaf for became in recorder.became.values() for leaf in pytree.tree_leaves(became) if isinstance(leaf, fx.Node)}
    graph, values = _read(traced, names, results, recorder.modules, recorded)
    mapped = {
        node: pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else None, became)
        for node, became in recorder.became.items()
    }
    return Captured(_merge_tied(graph, tied), given, mapped)


def _described_results(module: fx.GraphModule) -> list[tuple[str, str]] | None:
    """What the outputs of a joint graph are, where its output node says so."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    if "desc" not in output.meta:
        return None
    return [_result_name(desc) if desc is not None else ("none", str(k)) for k, desc in enumerate(pytree.tree_leaves(output.meta["desc"]))]


class _Recorder(fx.Interpreter):
    """Runs a given graph under make_fx and remembers which traced node each of its results is."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.became: dict[fx.Node, Any] = {}
        self.modules: dict[fx.Node, str] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        """The node's arguments; devices that the graph was captured on become the CPU, where our fake tensors are."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map(lambda leaf: CPU if isinstance(leaf, torch.device) else leaf, (args, kwargs))
        return args, {key: CPU if key == "device" and isinstance(item, str) else item for key, item in kwargs.items()}

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        before = next(reversed(mode.tracer.graph.nodes), None)
        result = super().run_node(n)

        def traced(leaf: Any) -> fx.Node | None:
            slot = get_proxy_slot(leaf, mode.tracer, None) if isinstance(leaf, torch.Tensor) else None
            return None if slot is None else slot.proxy.node

        self.became[n] = pytree.tree_map(traced, result)
        path = _module_path(n)
        for node in reversed(mode.tracer.graph.nodes):  # all that this node was decomposed into
            if node is before:
                break
            self.modules[node] = path
        return result


def _capture_training(mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict) -> Captured:
    with ExitStack() as stack, torch._dynamo.config.patch(ignore_logging_functions=_logging_functions()):
        with mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
            captured = dynamo_graph_capture_for_export(module)(*args, **kwargs)
        joint = aot_export_joint_with_descriptors(stack, captured, args, kwargs)
    traced: fx.GraphModule = joint.graph_module
    names = [_named(node.meta["desc"]) for node in traced.graph.nodes if node.op == "placeholder"]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    results = [(_result_name(desc), leaf) for desc, leaf in zip(output.meta["desc"], output.args[0], strict=True) if desc is not None]
    modules = {node: _module_path(node) for node in traced.graph.nodes}
    graph, values = _read(traced, names, results, modules)
    if not any(result.kind == "gradient" and result.value is not None for result in graph.results):
        raise ValueError("the module has no parameter that gets a gradient; plan it without training")
    mapped = {node: pytree.tree_map(lambda leaf: values.get(leaf), _leaves_of(node)) for node in traced.graph.nodes if node.op != "output"}
    return Captured(graph, traced, mapped)


def _logging_functions() -> set:
    """What a model calls to log: dynamo stops at it unless told to leave it out."""
    logger = type(torch._dynamo.output_graph.log)
    return {getattr(logger, name) for name in dir(logger) if name.split("_")[0] in ("debug", "info", "warning", "error", "critical", "log")}


def _named(desc: Any) -> _Named:
    match desc:
        case descriptors.ParamAOTInput():
            return _Named("parameter", desc.target)
        case descriptors.BufferAOTInput():
            return _Named("buffer", desc.target)
        case descriptors.PlainAOTInput():
            return _Named("input", f"input_{desc.idx}")
        case descriptors.TangentAOTInput():
            return _Named("tangent", f"tangent_{getattr(desc.output, 'idx', 0)}")
    raise ValueError(f"the captured program has an input of a kind that is not supported: {desc!r}")


def _result_name(desc: Any) -> tuple[str, str]:
    match desc:
        case descriptors.PlainAOTOutput():
            return ("output", str(desc.idx))
        case descriptors.GradAOTOutput():
            return ("gradient", _named(desc.grad_of).name)
        case descriptors.InputMutationAOTOutput():
            return ("buffer", _named(desc.mutated_input).name)
    raise ValueError(f"the captured program has an output of a kind that is not supported: {desc!r}")


# -- reading a traced ATen graph --------------------------------------------------------------------------------------------


def _read(
    traced: fx.GraphModule,
    names: list[_Named],
    results: list[tuple[tuple[str, str], Any]],
    modules: Mapping[fx.Node, str],
    keep: Collection[fx.Node] = (),
) -> tuple[Graph, dict[fx.Node, Value]]:
    """fx nodes -> ops; placeholders first, dead code left out. Also returns the value of each tensor node."""
    alive = _alive(traced, keep)
    ops: list[Op] = []
    values: dict[fx.Node, Value] = {}
    nodes = list(traced.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    constants = [
        (node, _Named("buffer", str(node.target), _held(traced, node))) for node in nodes if node.op == "get_attr" and node in alive
    ]
    made: list[tuple[fx.Node, Op]] = []
    for node, named in [*zip(placeholders, names, strict=True), *constants]:
        if node.meta.get("val") is None and not node.users:  # a flag among the inputs, decided while capturing
            continue
        filled = _filled(named)
        if filled is not None:
            made.append((node, filled))
            continue
        values[node] = (len(ops), 0)
        ops.append(Op(named.name, named.kind, (), (), (_tensor(node.meta["val"]),), named.kind))
    for node, op in made:  # behind the placeholders
        values[node] = (len(ops), 0)
        ops.append(op)
    tuples: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op != "call_function" or node not in alive:
            continue
        if node.target is operator.getitem and node.args[0] in tuples:
            values[node] = (tuples[node.args[0]], node.args[1])
            continue
        if isinstance(node.meta["val"], (tuple, list)):
            tuples[node] = len(ops)
        else:
            values[node] = (len(ops), 0)
        ops.append(_op(node, values, modules.get(node, "")))
    _check_names(ops)
    found = tuple(Result(kind, name, values[leaf] if isinstance(leaf, fx.Node) else None) for (kind, name), leaf in results)
    return Graph(tuple(ops), found), values


def _held(traced: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    held = getattr(traced, str(node.target), None)
    return held if isinstance(held, torch.Tensor) else None


def _filled(named: _Named) -> Op | None:
    """A constant of one value (`torch.tensor(0.5)` in a forward) as the op that makes it; None where it is not known or not one."""
    value = named.value
    if value is None or isinstance(value, FakeTensor) or value.is_meta or value.numel() == 0:
        return None
    first = value.flatten()[0]
    if not bool((value == first).all()):
        return None
    literals = ((tuple(value.shape), first.item()), (("device", Const("device", "cpu")), ("dtype", _constant(value.dtype, None))))
    return Op(named.name, "aten.full.default", (), literals, (_tensor(value),))


def _check_names(ops: list[Op]) -> None:
    """Op names are unique: a node that is called like a parameter gets a suffix."""
    taken: set[str] = set()
    for i, op in enumerate(ops):
        name = op.name
        while name in taken:
            name += "_op"
        taken.add(name)
        if name != op.name:
            ops[i] = replace(op, name=name)


def _alive(traced: fx.GraphModule, keep: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that a result or a kept node depends on (assertions and other effects are left out: a plan does not need them)."""
    alive = set(keep)
    for node in reversed(traced.graph.nodes):
        if node.op == "output" or node in alive:
            alive.update(node.all_input_nodes)
    return alive


def _op(node: fx.Node, values: Mapping[fx.Node, Value], module: str) -> Op:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"the captured program calls {node.target!r} (node {node.name}), which is not an ATen operator")
    if node.target._schema.is_mutable:
        rest = ", with dropout off (model.eval())" if "bernoulli" in str(node.target) else ""
        raise ValueError(f"node {node.name} ({node.target}) writes into its input; give a functional graph (torch.export makes one){rest}")
    inputs: list[Value] = []

    def literal(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if not isinstance(item.meta.get("val"), torch.Tensor):
                raise ValueError(f"node {node.name} ({node.target}) reads {item.name}, a number that depends on the data; keep it a tensor")
            inputs.append(values[item])
            return Ref(len(inputs) - 1)
        if isinstance(item, (tuple, list)):
            return tuple(literal(part) for part in item)
        return _constant(item, node)

    literals = (literal(node.args), tuple((key, literal(item)) for key, item in sorted(node.kwargs.items())))
    result = node.meta["val"]
    outputs = tuple(_tensor(t) for t in result) if isinstance(result, (tuple, list)) else (_tensor(result),)
    backward = node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))
    return Op(node.name, str(node.target), tuple(inputs), literals, outputs, "compute", module, _alias(node), backward)


def _constant(item: Any, node: fx.Node | None) -> Any:
    if item is None or isinstance(item, (bool, int, float, str, complex)):
        return item
    if isinstance(item, torch.dtype):
        return Const("dtype", str(item).removeprefix("torch."))
    if isinstance(item, torch.device):
        return Const("device", "cpu")
    if isinstance(item, torch.memory_format):
        return Const("memory_format", str(item).removeprefix("torch."))
    if isinstance(item, torch.layout):
        return Const("layout", str(item).removeprefix("torch."))
    assert node is not None
    raise ValueError(f"node {node.name} ({node.target}) has an argument {item!r} of a kind that is not supported: {type(item).__name__}")


def _alias(node: fx.Node) -> int | None:
    """Which tensor input lends its storage to the output, by the operator's schema."""
    schema = node.target._schema
    if str(node.target) in ALWAYS_VIEWS:
        return 0
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    lent = schema.returns[0].alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & lent:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return next((k for k, source in enumerate(_input_nodes(node)) if source is given), None)
    return 0  # a list of views: the schema marks its elements, the source is the first tensor


def _input_nodes(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(node.args, found.append)
    fx.map_arg({key: node.kwargs[key] for key in sorted(node.kwargs)}, found.append)
    return found


def _leaves_of(node: fx.Node) -> Any:
    """The node itself, or for a node of several results its getitem nodes by index (None where nobody takes one)."""
    result = node.meta.get("val")
    if not isinstance(result, (tuple, list)):
        return node
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(parts.get(k) for k in range(len(result)))


def _tensor(value: Any) -> Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    return Tensor(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    if not paths:
        return ""
    return re.sub(r"^L\['\w+'\]\.?|^_export_root\.?", "", paths[-1]).replace("slice(None, None, None)", "")


# -- inputs -----------------------------------------------------------------------------------------------------------------


def _arguments(example_inputs: Any) -> tuple[tuple, dict]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise ValueError(f"example_inputs is {type(example_inputs).__name__}; expected a tuple of arguments or a dict of keyword arguments")


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _to_fake(mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict) -> tuple[nn.Module, tuple, dict]:
    """A copy of the module whose tensors are fake CPU tensors (tied ones stay tied), and fake inputs. Nothing is allocated."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _fake(mode, tensor)
    fake_module = copy.deepcopy(module, memo)
    is_tensor = lambda leaf: isinstance(leaf, torch.Tensor)  # noqa: E731
    fake_args, fake_kwargs = pytree.tree_map(lambda leaf: _fake(mode, leaf) if is_tensor(leaf) else leaf, (args, kwargs))
    return fake_module, fake_args, fake_kwargs


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _mode_of(given: fx.GraphModule | ExportedProgram) -> FakeTensorMode:
    """The fake mode that the graph's own values live in (they can't be mixed with another one's), or a new one."""
    for node in given.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def _export_signature(program: ExportedProgram, mode: FakeTensorMode) -> tuple[list[_Named], list[torch.Tensor], list[tuple[str, str]]]:
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "buffer",
        InputKind.USER_INPUT: "input",
    }
    names, users = [], 0
    given = [spec.arg.name for spec in program.graph_signature.input_specs]
    for spec in program.graph_signature.input_specs:
        if spec.kind not in kinds:
            raise ValueError(f"the exported program has an input of kind {spec.kind.name}, which is not supported")
        held = program.constants.get(spec.target) if spec.kind == InputKind.CONSTANT_TENSOR else None
        held = held if isinstance(held, torch.Tensor) else None
        names.append(_Named(kinds[spec.kind], spec.target if spec.kind != InputKind.USER_INPUT else f"input_{users}", held))
        users += spec.kind == InputKind.USER_INPUT
    results, outputs = [], 0
    for out in program.graph_signature.output_specs:
        if out.kind == OutputKind.BUFFER_MUTATION:
            results.append(("buffer", str(out.target)))
        elif out.kind == OutputKind.USER_INPUT_MUTATION:
            results.append(("buffer", names[given.index(out.target)].name))
        else:
            results.append(("output", str(outputs)))
            outputs += 1
    fakes = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return names, [_fake(mode, fake) if isinstance(fake, torch.Tensor) else fake for fake in fakes], results


def _placeholder_inputs(module: fx.GraphModule, example_inputs: Any, mode: FakeTensorMode) -> tuple[list[_Named], list[torch.Tensor]]:
    """Names and fake values of a GraphModule's placeholders, from example inputs or from the nodes' own metadata."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    if example_inputs is None:
        given = [node.meta.get("val", node.meta.get("example_value")) for node in nodes]
        missing = [node.name for node, value in zip(nodes, given, strict=True) if not isinstance(value, torch.Tensor)]
        if missing:
            raise ValueError(f"the graph's placeholders {missing} carry no shapes; pass example_inputs=(...) with one tensor each")
    else:
        args, kwargs = _arguments(example_inputs)
        bound = dict(zip((str(node.target) for node in nodes), args, strict=False)) | kwargs
        missing = [str(node.target) for node in nodes if str(node.target) not in bound and not node.args]
        if missing or len(args) > len(nodes):
            raise ValueError(f"example_inputs has {len(args) + len(kwargs)} entries; the graph takes {[str(n.target) for n in nodes]}")
        given = [bound.get(str(node.target), node.args[0] if node.args else None) for node in nodes]
    names = []
    for i, node in enumerate(nodes):
        desc = node.meta.get("desc")
        names.append(_named(desc) if desc is not None else _Named("input", f"input_{i}"))
    return names, [_fake(mode, value) if isinstance(value, torch.Tensor) else value for value in given]


_STOPS = (RuntimeError, TypeError, AssertionError, AttributeError, NotImplementedError, KeyError, IndexError)


_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # they print tracebacks of what we say in a sentence


@contextmanager
def _explained(module: nn.Module):
    """Turns what stops a capture into one sentence with the model's own line, where there is one."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    except ValueError:
        raise
    except (*_STOPS, torch._dynamo.exc.TorchDynamoException) as error:
        line = _model_line(error, type(module))
        said = re.search(r"got \w+Error\(['\"](.+)['\"]\)", str(error))  # dynamo's own first line does not say what went wrong
        first = said[1] if said else str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "memo disaster" in first or "data-dependent" in first.lower():
            change = "compute the whole with masks, experts with batched or grouped matmuls"
            first = f"its shapes or its control flow depend on the data ({first}); {change}"
        raise ValueError(f"{type(module).__name__} can't be captured{line}: {first}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _model_line(error: BaseException, kind: type) -> str:
    """` at file:line` of the deepest frame in the file that defines the module, from the error's traceback or dynamo's message."""
    try:
        source: str | None = inspect.getsourcefile(kind)
    except TypeError:
        source = None
    if not source:
        return ""
    lines = [int(line) for name, line in re.findall(r'File "([^"]+)", line (\d+)', str(error)) if name == source]
    lines += [frame.lineno for frame in getattr(error, "real_stack", None) or () if frame.filename == source]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == source:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" at {source}:{lines[-1]}" if lines else ""

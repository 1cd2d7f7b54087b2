"""The private names of torch that autoshard uses: each is a row below, and every other room imports it from here.

    from autoshard.torch_private import FakeTensorMode        loads torch._subclasses at that moment, not before

A row says where torch has the name, for the versions of torch that have it there. Where a version moves one, add a row, or a function
where its arguments differ. `check_all` looks up what this torch should have; tests/test_torch_private.py calls it.
"""

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

OLDEST, NEWEST = (2, 12), (2, 15)  # the versions of torch that the tests ran with
VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


@dataclass(frozen=True)
class Form:
    """`module:attributes`, and the versions of torch that have the name there: from `since` to `until`, None for all later ones."""

    place: str
    since: tuple[int, int] = OLDEST
    until: tuple[int, int] | None = None

    def is_in(self, version: tuple[int, int]) -> bool:
        return self.since <= version and (self.until is None or version <= self.until)


FORMS = {  # by the name here: one form for each range of versions
    # fx graphs and nested containers
    "BoxedCodeGen": [Form("torch.fx.graph:_BoxedCodeGen")],
    "pytree": [Form("torch.utils._pytree")],  # torch.utils.pytree is in none of these versions
    # operators and the dispatcher
    "DispatchKey": [Form("torch._C:DispatchKey")],
    "ForceDispatchKeyGuard": [Form("torch._C:_ForceDispatchKeyGuard")],
    "HigherOrderOperator": [Form("torch._ops:HigherOrderOperator")],
    "OpOverload": [Form("torch._ops:OpOverload")],
    "c10d_functional": [Form("torch:ops._c10d_functional")],  # the operators that dynamo traces collectives to
    "enter_autocast": [Form("torch.amp.autocast_mode:_enter_autocast")],
    "has_computed_kernel": [Form("torch._C:_dispatch_has_computed_kernel_for_dispatch_key")],
    "local_exclude_set": [Form("torch._C:_dispatch_tls_local_exclude_set")],
    "local_include_set": [Form("torch._C:_dispatch_tls_local_include_set")],
    "TransformGetItemToIndex": [Form("torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex")],
    "over_places": [Form("torch.nn.attention.flex_attention:_vmap_for_bhqkv")],
    "parse_to": [Form("torch._C._nn:_parse_to")],
    # tensors without data, and modes that see operators
    "FakeTensor": [Form("torch._subclasses:FakeTensor")],
    "FakeTensorMode": [Form("torch._subclasses:FakeTensorMode")],
    "FunctionalTensor": [Form("torch._subclasses.functional_tensor:FunctionalTensor")],
    "FunctionalTensorMode": [Form("torch._subclasses.functional_tensor:FunctionalTensorMode")],
    "TorchDispatchMode": [Form("torch.utils._python_dispatch:TorchDispatchMode")],
    "disable_current_modes": [Form("torch.utils._python_dispatch:_disable_current_modes")],
    "dispatch_functionalize": [Form("torch._subclasses.functional_tensor:dispatch_functionalize")],
    "from_functional_tensor": [Form("torch:_from_functional_tensor")],
    "has_data_mutation": [Form("torch._functorch._aot_autograd.functional_utils:has_data_mutation")],
    "sync": [Form("torch:_sync")],
    # capture and compilation
    "aot_export_joint_with_descriptors": [Form("torch._functorch.aot_autograd:aot_export_joint_with_descriptors")],
    "compile_fx": [Form("torch._inductor.compile_fx:compile_fx")],
    "descriptors": [Form("torch._functorch._aot_autograd.descriptors")],
    "dynamo_config": [Form("torch._dynamo:config")],
    "dynamo_graph_capture_for_export": [Form("torch._dynamo.functional_export:dynamo_graph_capture_for_export")],
    "dynamo_log": [Form("torch._dynamo:output_graph.log")],
    "reparametrize_module": [Form("torch.nn.utils.stateless:_reparametrize_module")],
    "EffectType": [Form("torch._library.effects:EffectType")],
    "functorch": [Form("torch._C:_functorch")],
    "register_effectful_op": [Form("torch._higher_order_ops.effects:_register_effectful_op")],
    # DTensors and their rules
    "DTensorSpec": [Form("torch.distributed.tensor._dtensor_spec:DTensorSpec")],
    "OpSchema": [Form("torch.distributed.tensor._op_schema:OpSchema")],
    "OpSpec": [Form("torch.distributed.tensor._op_schema:OpSpec")],
    "OpStrategy": [Form("torch.distributed.tensor._op_schema:OpStrategy")],
    "ShardingPlaceholder": [Form("torch.distributed.tensor._ops.single_dim_strategy:_ShardingPlaceholder")],
    "TensorMeta": [Form("torch.distributed.tensor._dtensor_spec:TensorMeta")],
    "TupleStrategy": [Form("torch.distributed.tensor._op_schema:TupleStrategy")],
    "sharding_propagator": [Form("torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator")],
    # process groups, simulated ranks, pipelines
    "Action": [Form("torch.distributed.pipelining.schedules:_Action")],
    "ComputationType": [Form("torch.distributed.pipelining.schedules:_ComputationType")],
    "GlooOptions": [Form("torch.distributed:ProcessGroupGloo._Options")],
    "PipelineScheduleRuntime": [Form("torch.distributed.pipelining.schedules:_PipelineScheduleRuntime")],
    "PipelineStageBase": [Form("torch.distributed.pipelining.stage:_PipelineStageBase")],
    "ReaderView": [Form("torch.distributed.checkpoint.utils:_ReaderView")],
    "StorageInfo": [Form("torch.distributed.checkpoint.filesystem:_StorageInfo")],
    "get_default_store": [Form("torch.distributed.distributed_c10d:_get_default_store")],
    "replicate": [Form("torch.distributed._composable.replicate_with_fsdp:replicate")],
    "resolve_process_group": [Form("torch.distributed.distributed_c10d:_resolve_process_group")],
    "set_element": [Form("torch.distributed.checkpoint._nested_dict:set_element")],
    "set_pg_timeout": [Form("torch.distributed.distributed_c10d:_set_pg_timeout")],
    "world": [Form("torch.distributed.distributed_c10d:_world")],
}

# What DCP's index calls when it is unpickled.
INDEX_CALLS = ("torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING")
# A logger that prints tracebacks, and the module whose errors have sentences for messages.
FAKE_TENSOR_LOG, DYNAMO_ERRORS = "torch._subclasses.fake_tensor", "torch._dynamo.exc"


class MovedName(ImportError, ValueError):
    """A name that this torch does not have where its row says. A ValueError, as all that the command line answers in a sentence."""


def spelled(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def private(name: str, version: tuple[int, int] = VERSION, forms: dict[str, list[Form]] = FORMS) -> Any:
    """The object that a row names. MovedName where this torch does not have it in the place that its row says."""
    form = next((form for form in forms[name] if form.is_in(version)), forms[name][-1])
    module, _, attributes = form.place.partition(":")
    try:
        value: Any = import_module(module)
        for attribute in filter(None, attributes.split(".")):
            value = getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        raise MovedName(
            f"torch {torch.__version__} has no {form.place.replace(':', '.')}, autoshard's {name} ({error}); autoshard is tested with "
            f"torch {spelled(OLDEST)} to {spelled(NEWEST)}: install one of these, or a newer autoshard",
            name=module,
        ) from error
    return value


def source_of(name: str) -> str:
    """`from module import attribute`, for programs that we write."""
    module, _, attribute = next(form for form in FORMS[name] if form.is_in(VERSION)).place.partition(":")
    return f"from {module} import {attribute}"


def check_all(version: tuple[int, int] = VERSION, forms: dict[str, list[Form]] = FORMS) -> list[str]:
    """A sentence for each name that this torch does not have where its row says."""
    errors = []
    for name in forms:
        try:
            private(name, version, forms)
        except MovedName as error:
            errors.append(str(error))
    return errors


def untested(version: tuple[int, int], spelling: str = torch.__version__) -> str:
    """What to say about a version of torch that the tests did not run with; "" where they did."""
    if OLDEST <= version <= NEWEST:
        return ""
    return f"torch {spelling} is not among the versions that autoshard is tested with, {spelled(OLDEST)} to {spelled(NEWEST)}"


def without_connecting(schedule: Any) -> Any:
    """The pipeline schedule, told that its stages are connected: from 2.15 on it would connect them in their own groups, and ours send in
    another one."""
    schedule._p2p_initialized = True
    return schedule


if sentence := untested(VERSION):  # once: a module is imported once
    warnings.warn(sentence, stacklevel=2)


def __getattr__(name: str) -> Any:
    if name not in FORMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, private(name))

"""A model that runs its plan: an nn.Module whose parameters are DTensors and whose forward is this rank's graph.

    sharded = parallelize(model, ...)            a copy of the model; its class is a subclass of the model's own
    loss = sharded(tokens, targets)              runs the forward graph; autograd's node keeps what the backward graph reads
    loss.backward()                              runs the backward graph; p.grad is a DTensor in the layout of p

With a plan of several microbatches, a step of the optimizer has one call and one backward() per microbatch (runtime.microbatches):

    for inputs in sharded.microbatches((tokens, targets)):
        (sharded(*inputs) / 4).backward()       the last one reduces the gradients and sets p.grad

There is one set of graphs per kind of call (shapes and constants of the inputs, training or not, autocast), traced when it is first needed.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.layout import text
from autoshard.lower import compiled, state_of_module
from autoshard.runtime.call_inputs import BoundInputs, CallInputs
from autoshard.runtime.distribute import count_steps, local
from autoshard.runtime.microbatches import Microbatches, OpenStep
from autoshard.runtime.overlap import described
from autoshard.runtime.shared_generator import SharedGenerator
from autoshard.runtime.traced_call import TracedCall
from autoshard.torch_private import functorch


@dataclass(eq=False)
class Runner:
    """The state of a parallel module beside its parameters: its inputs' layouts and its traced calls."""

    inputs: CallInputs
    build: Callable[[Any, Any, Sequence[bool]], TracedCall]  # of a call's inputs, their global tensors on meta, modes of all modules
    state_of: Callable[[Any], Any]  # what else these objects hold
    frozen: frozenset[str]  # parameters for which the plan has no gradient
    number: int  # of microbatches in a step
    step: OpenStep | None = None  # that `microbatches` has begun
    calls: dict[Any, TracedCall] = field(default_factory=dict)
    by_inductor: bool = False  # whether inductor compiles all graphs
    watched: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)  # attributes of parts: where, under which key, name
    settings: list[Any] = field(default_factory=list)  # their values, with which the model is captured
    random: SharedGenerator = field(init=False)

    def __post_init__(self) -> None:
        self.random = SharedGenerator(self.device_type, self.inputs.where.group)

    def __deepcopy__(self, memo: dict) -> "Runner":
        """A copy for a copied module; both run the same graphs on the same mesh."""
        return replace(self)

    @property
    def device_type(self) -> str:
        return self.inputs.where.device.type

    def call(self, module: nn.Module, args: tuple, kwargs: dict, compiled: bool) -> Any:
        bound = self.inputs.of_call(args, kwargs)
        if (now := [held.get(key) for held, key, _ in self.watched]) != self.settings:
            self._warn(now)
        traced = self._traced_call(module, bound, compiled or self.by_inductor)
        shards = self.inputs.shards(bound)
        if traced.graphs.is_random:
            self.random.agree()
        return self._run(traced, module, bound.tensors, shards)

    def microbatches(self, batch: Any, *, local: bool) -> Microbatches:
        """As `ParallelModule.microbatches`."""
        return Microbatches(self.number, self.inputs.microbatches(batch, self.number, local=local), partial(setattr, self, "step"))

    def prepare(self, module: nn.Module, batch: Any) -> TracedCall:
        """The graphs for these global inputs, whose shapes are from now on the planned ones."""
        return self._traced_call(module, self.inputs.as_planned(batch), False)

    def _traced_call(self, module: nn.Module, bound: BoundInputs, by_inductor: bool) -> TracedCall:
        autocast = torch.get_autocast_dtype(self.device_type) if torch.is_autocast_enabled(self.device_type) else None
        key = (bound.key, modes(module), self.state_of(bound.inputs), autocast)
        if key not in self.calls:
            self.calls[key] = self.build(bound.inputs, bound.on_meta(), modes(module))
        if not by_inductor:
            return self.calls[key]
        return self.calls.setdefault((*key, "inductor"), replace(self.calls[key], as_function=compiled, passes={}))

    def watch(self, module: nn.Module) -> None:
        """Notes the numbers, texts and flags that parts of the module hold, with which the model is captured."""
        parts = [(f"{name}." if name else "", vars(part)) for name, part in module.named_modules()]
        named = ((held, key, path + key) for path, held in parts for key, value in held.items() if type(value) in PLAIN)
        self.watched = [(held, key, name) for held, key, name in named if key not in ("training", "_digest")]
        self.settings = [held[key] for held, key, _ in self.watched]

    def _warn(self, now: list[Any]) -> None:
        """Says which attribute has changed. It is no error: the forward may not read it, and ranks may note what they please."""
        for name in (name for (_, _, name), old, new in zip(self.watched, self.settings, now, strict=True) if old != new):
            warnings.warn(
                f"{name} was set on a parallel module, whose graphs keep the value with which it was made: give a value that changes as an "
                "input of forward, or set it on the model and parallelize that again",
                stacklevel=8,
            )
        self.settings = now

    def _run(self, traced: TracedCall, module: nn.Module, inputs: dict[str, Tensor], shards: dict[str, Tensor]) -> Any:
        """inputs: the caller's tensors; shards: this rank's shards of them."""
        held = state_of_module(module)
        if unfrozen := [name for name in self.frozen if name in held and held[name].requires_grad]:
            raise ValueError(f"{min(unfrozen)} requires a gradient and the plan has none for it; plan the model with what is to be trained")
        gradients = traced.graphs.gradients if torch.is_grad_enabled() else ()
        if ahead := [name for name, x in inputs.items() if gradients and x.requires_grad and f"gradient:{name}" not in gradients]:
            raise ValueError(
                f"{ahead[0]} requires a gradient, and the plan has none for inputs: what computed it would not be trained. Plan a module "
                f"that computes it, too, or give {ahead[0]}.detach()"
            )
        results = traced(held, shards, self.step or OpenStep(), self.random)
        with torch.no_grad():
            for key in (key for key in results if key.startswith("buffer:")):
                name, value = key.removeprefix("buffer:"), local(results[key])
                if name in inputs:
                    _write(inputs[name], traced.as_dtensor(key, value))
                else:
                    local(held[name]).copy_(value)
        return traced.packed(results)


def _write(target: Tensor, value: DTensor) -> None:
    """Writes what the forward wrote into an input of the caller: the global tensor where that is a plain tensor."""
    if isinstance(target, DTensor):
        target._local_tensor.copy_(value.redistribute(placements=target.placements).to_local())
    else:
        target.copy_(value.full_tensor())


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Which modules are in training mode: of a model under fine-tuning, parts may not be."""
    return tuple(part.training for part in module.modules())


PLAIN = frozenset({int, float, str, bool, type(None)})


class ParallelModule(nn.Module):
    """The methods that replace the model's own in a parallel module."""

    _runner: Runner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs, torch.compiler.is_compiling())

    def shard_inputs(self, batch: Any, *, local: bool = False) -> Any:
        """The inputs of a call as DTensors, each in the layout that the plan has for it. Values that are not tensors stay unchanged.

        batch: a tuple, a dict by the names of forward's arguments, or a tensor: global inputs of any shape, the same on every rank.
        local: the batch holds this rank's shards, in the layouts `input_layouts`; shards have equal sizes, or those of the planned shape.
        There is no communication. A call with a batch of another shape than the planned one captures the model again, once per shape,
        unless the plan is for ranges of sizes (dynamic_shapes).
        """
        return self._runner.inputs.shard(batch, local=local)

    def microbatches(self, batch: Any, *, local: bool = False) -> Microbatches:
        """The microbatches of a step of the optimizer, to be iterated once: the inputs of each call, as `shard_inputs` returns them.

            for inputs in model.microbatches((tokens, targets)):
                (model(*inputs) / 4).backward()
            optimizer.step()

        Within the loop parameters are fetched once and gradients are added up, both as planned; the last backward() reduces the sums and
        sets every p.grad. batch: as for `shard_inputs`, of the examples of all microbatches, split along dim 0; inputs in their planned
        shape go to each of them. Divide the loss yourself, as above, if it is a mean. ValueError where the batch can't be split;
        RuntimeError where a parameter changes within the loop, or the last microbatch has no backward().
        """
        return self._runner.microbatches(batch, local=local)

    @property
    def input_layouts(self) -> dict[str, str]:
        """The layout in which `shard_inputs(batch, local=True)` expects each input: the same for all inputs of a batch. Inputs that the
        plan shards on more axes are sliced after that."""
        return {name: text(layout) for name, layout in self._runner.inputs.loaded.items()}

    @property
    def random_state(self) -> Tensor | None:
        """The state of the generator from which random ops draw, the same on every rank; None before the first draw. Set to None, the
        first rank's generator counts again."""
        return self._runner.random.state

    @random_state.setter
    def random_state(self, state: Tensor | None) -> None:
        self._runner.random.state = state

    def timeline(self) -> str:
        """The estimated time line of the last kind of call as text: which collectives overlap with compute. Empty before the first call."""
        calls = self._runner.calls
        unordered = "none overlaps with compute: shards differ in size from rank to rank, and so do the operators that ranks run"
        return (described(next(reversed(calls.values())).timelines, self._runner.inputs.where.mesh) or unordered) if calls else ""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As the model's own, also of global tensors, the same on every rank: each rank keeps its shards."""
        where = self._runner.inputs.where
        for name, held in state_of_module(self).items():
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = where.placed(value, held)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._runner.watch(copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("a parallel module can't be pickled, as it holds its mesh; save its values with autoshard.save_checkpoint")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """From now on inductor compiles the rank's graphs, as with torch.compile(module)."""
        self._runner.by_inductor = True


@torch.compiler.disable
def _call(module: ParallelModule, args: tuple, kwargs: dict, compiling: bool) -> Any:
    """Runs outside of dynamo: the graphs are traced already, and are compiled without it."""
    if functorch.peek_interpreter_stack() is not None:
        raise ValueError("torch.func and vmap can't transform a parallel module, whose forward is a graph: call backward() on its output")
    return module._runner.call(module, args, kwargs, compiling)


def attach(module: nn.Module, of: type, digest: str, **held: Any) -> None:
    """Makes the module one of the class `of` that holds these objects and the digest of its plan.

    Nothing else changes a module's class, or what it holds without torch knowing. From now on its inner modules can't be called, nor
    hooked: its forward is a graph that calls none of them. That graph has the hooks of the whole model, too, which must not run again.
    """
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        hooks.clear()
    for name, inner in module.named_modules():
        if name and not isinstance(inner, torch.jit.ScriptModule):
            inner.__dict__.update({hook: partial(_refuse, f"{name}.{hook}() has no effect: {PART}") for hook in HOOKS})
            inner.__dict__["forward"] = partial(_refuse, f"{name} can't be called: {PART}")
    module.__class__ = of
    count_steps()
    module.__dict__.update({f"_{name}": value for name, value in held.items()}, _digest=digest)


def parallel_class(of: type, methods: type = ParallelModule, name: str = "Parallel") -> type:
    """A subclass of `of` with these methods, and without those that no plan can run."""
    names = [name for name in NOT_PLANNED if hasattr(of, name) and methods is ParallelModule]
    refused = {name: partial(_refuse, f"{name}() can't run on a parallel module: {NOT_PLANNED[name]}") for name in names}
    return type(f"{name}{of.__name__}", (methods, of), {"__module__": of.__module__, "__doc__": of.__doc__, **refused})


_GATHERED = "load the gathered parameters into the model that was given to parallelize, and call it there: docs/huggingface.md"
NOT_PLANNED = {  # methods that a model may have, which a plan of its forward can't run, and what to do instead
    "generate": f"it calls the model with inputs that were not planned; {_GATHERED}",
    "save_pretrained": f"its files would hold this rank's shards; {_GATHERED}",
    "push_to_hub": f"its files would hold this rank's shards; {_GATHERED}",
    "resize_token_embeddings": "the plan is of another shape; resize the model, then plan it",
}


HOOKS = tuple(m for m in dir(nn.Module) if m.startswith("register_") and m.endswith("_hook") and "dict" not in m)
PART = (
    "it is a part of a parallel module, which runs the plan's graph and calls none of its parts; use the model that was given to "
    "parallelize, or return what you need from its forward and plan that"
)


def _refuse(why: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(why)

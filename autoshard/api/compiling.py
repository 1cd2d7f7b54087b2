"""`backend`: planning as a backend of torch.compile, for inference.

    torch.compile(model, backend=backend(mesh))
    graph    what dynamo traced: parameters and buffers are inputs of it, under names like L['self']._modules['wte']._parameters['weight']
    module   the graph as an nn.Module with these tensors under the model's own names, wte.weight
    answer   parallelize(module, plan(module, inputs, mesh), device_mesh), with global tensors as results
"""

import fnmatch
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autoshard.mesh import Mesh
from autoshard.planning import Options, checked_options, plan
from autoshard.runtime import device_mesh, parallelize

log = logging.getLogger("autoshard")

Compiled = Callable[..., Sequence[Tensor]]
_PATH = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def backend(mesh: Mesh, **options: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """A backend for torch.compile that plans every graph for `mesh` and runs the plan on the ranks of torchrun.

        compiled = torch.compile(model.eval(), backend=autoshard.backend(mesh))
        with torch.inference_mode():
            logits = compiled(tokens)

    options: those of `plan`; of `pins` and `forbid` each graph has those on its own parameters and buffers, by name or glob. Every rank
    calls the compiled model with the same global tensors and gets global tensors. The parameters are sharded when a graph is compiled,
    and again where the model's own were written since, except through `.data`. Buffers that the forward writes are written into the
    model's own. ValueError where a parameter requires a gradient, as the gradients would not reach the model: use `parallelize` for
    training; and where the number of ranks isn't the mesh's.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}; expected an autoshard.Mesh, for example Mesh.from_bandwidths((2, 4))")
    if checked_options(Options, options).training:
        raise ValueError("training is True, and the backend is for inference; train what autoshard.parallelize returns")
    pinned = {key: options.pop(key) for key in ("pins", "forbid") if key in options}

    def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        module = DynamoGraph(graph, example_inputs)
        own: dict[str, Any] = {key: module.named(pins) for key, pins in pinned.items()}
        solution = plan(module, module.inputs_of(example_inputs), mesh, **options, **own)
        sharded = parallelize(module, solution, device_mesh(solution))
        written = {k: name for k, name in module.held.items() if f"buffer:{name}" in solution.results}
        sharded_at = {k: _version(example_inputs[k]) for k in module.held}

        def run(*inputs: Any) -> Sequence[Tensor]:
            now = {k: _version(inputs[k]) for k in module.held}
            if now != sharded_at:  # the model's own tensors have the values: other graphs and the caller may write into them, too
                changed = {name: inputs[k].detach() for k, name in module.held.items() if now[k] != sharded_at[k]}
                sharded.load_state_dict(changed, strict=False)
                sharded_at.update(now)
            outputs = tuple(_global(x) for x in sharded(*module.inputs_of(inputs)))
            with torch.no_grad():
                for k, name in written.items():
                    inputs[k].copy_(_global(attrgetter(name)(sharded)))
            return outputs

        return run

    return compile_graph


def _version(x: Tensor) -> tuple[int, Any]:
    """What changes with the tensor's values, unless they are written through `.data`. Inference tensors count no versions: always new."""
    return x.data_ptr(), object() if x.is_inference() else x._version


def _global(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


class DynamoGraph(nn.Module):
    """A graph that dynamo traced, with the tensors that it reads from the model as parameters and buffers under the model's own names."""

    def __init__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]):
        super().__init__()
        self.graph = graph
        if dynamic := [x for x in example_inputs if isinstance(x, torch.SymInt)]:
            raise ValueError(f"a size is dynamic ({dynamic[0]}), and a plan has one shape: use torch.compile(..., dynamic=False)")
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.held = {k: name_of(placeholders[k]) for k, x in enumerate(example_inputs) if _is_held(x)}
        for k, name in self.held.items():
            self._hold(name, example_inputs[k])

    def _hold(self, name: str, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and the backend is for inference: call the compiled model under torch.no_grad(), or train "
                "what autoshard.parallelize returns"
            )
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        value = tensor.detach()
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(last, nn.Parameter(value, requires_grad=False))
        else:
            module.register_buffer(last, value)

    def named(self, pins: Mapping[str, Any]) -> dict[str, Any]:
        """The pins on what the graph reads from the model: the others may be another graph's."""
        known = {pattern: pin for pattern, pin in pins.items() if fnmatch.filter(self.held.values(), pattern)}
        if others := sorted(set(pins) - set(known)):
            log.warning("this graph has no parameter or buffer %s", ", ".join(others))
        return known

    def inputs_of(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The graph's inputs without those that the model holds."""
        return tuple(x for k, x in enumerate(inputs) if k not in self.held)

    def forward(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        number = len(inputs) + len(self.held)
        return self.graph(*(self._attribute(self.held[k]) if k in self.held else next(rest) for k in range(number)))

    def _attribute(self, name: str) -> Tensor:
        *path, last = name.split(".")
        return getattr(self.get_submodule(".".join(path)), last)


def name_of(placeholder: fx.Node) -> str:
    """The dotted name of a tensor of the model; the node's own name where dynamo's source isn't a path of modules."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return ".".join(_PATH.findall("" if source is None else source.name)) or placeholder.name


def _is_held(x: Any) -> bool:
    """Whether dynamo read the tensor from a module: a parameter, or a buffer."""
    return isinstance(x, nn.Parameter) or getattr(x, "_dynamo_static_input_type", None) is not None

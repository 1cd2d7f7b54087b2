"""What a capture is: a Graph, the fx graph that it was read from, and what the module returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autoshard.capture.explain import FLEX, line_of
from autoshard.capture.nested_tensors import filled
from autoshard.graph import Graph
from autoshard.torch_private import HigherOrderOperator, pytree


@dataclass(frozen=True)
class Returned:
    """What a module returns: leaf k of its structure is the graph's result `output k` where that has a value, else the constant leaves[k].
    template: where objects are among what it returns, and the structure has lists of their tensors, the same on the meta device."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]  # None in place of each tensor
    template: Any = None

    def packed(self, outputs: Mapping[int, torch.Tensor]) -> Any:
        """The return value with these tensors, by leaf."""
        lists = pytree.tree_unflatten([outputs.get(k, leaf) for k, leaf in enumerate(self.leaves)], self.structure)
        return lists if self.template is None else filled(self.template, lists)


@dataclass(frozen=True)
class Captured:
    """A Graph and the fx graph that it was read from. values: for each node of the fx graph the Value that the node became, nested
    as the node's result is, None where that is no tensor. returned: None where a graph was passed instead of a module."""

    graph: Graph
    fx_graph: fx.GraphModule | ExportedProgram
    values: dict[fx.Node, Any] = field(default_factory=dict)
    returned: Returned | None = None
    origins: dict[str, fx.Node] = field(default_factory=dict)  # by op name, the node of the fx graph that the op is (a part) of
    autocast: str = ""  # the device of a torch.autocast in the forward that the captured program has as one of the CPU

    def line_of(self, name: str) -> str:
        """file:line of the model's code for an op, or for the first later op of its module that has one; "" where none is known."""
        values = [(node, value) for node, nested in self.values.items() for value in pytree.tree_leaves(nested, is_leaf=is_value)]
        lines = {value[0]: node.meta.get("stack_trace") for node, value in values if value is not None}
        ops, first = self.graph.ops, self.graph.index[name]
        traces = (lines.get(i) for i in range(first, len(ops)) if ops[i].module == ops[first].module)
        return line_of(next(filter(None, traces), "")).removeprefix(" at ")


def is_value(item: Any) -> bool:
    """Whether an item of `Captured.values` is a Value of the graph."""
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(number, int) for number in item)


def tied_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has more than one."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def merge_tied(graph: Graph, groups: Sequence[Sequence[str]]) -> Graph:
    """The graph with the names of tied parameters in `tied`: a capture leaves the other names as inputs without readers.

    What is read has the first name, in training and in inference: torch.export reads the last one.
    """
    tied, renamed = [], dict[str, str]()
    for names in groups:
        present = [name for name in names if name in graph.parameters]
        used = [name for name in present if (graph.parameters[name], 0) in graph.users] or present
        if len(used) == 1:
            renamed |= {present[0]: used[0], used[0]: present[0]}
            used = present[:1]
        tied += [(name, used[0]) for name in names if used and name not in used]
    return replace(graph, ops=tuple(replace(op, name=renamed.get(op.name, op.name)) for op in graph.ops), tied=tuple(tied))


def check_operators(traced: fx.GraphModule) -> None:
    """ValueError where an operator of the program contains a program, or makes a sparse tensor."""
    for node in traced.graph.nodes:
        if getattr(node.meta.get("val"), "layout", torch.strided) is not torch.strided:
            line = line_of(node.meta.get("stack_trace") or "")
            raise ValueError(f"the program has a sparse tensor ({node}){line}, which no layout shards: give embeddings sparse=False")
        if isinstance(node.target, HigherOrderOperator):
            change = FLEX if "flex" in node.target.name() else "write it with plain operators, cond with torch.where"
            line = line_of(node.meta.get("stack_trace") or "")
            if "auto_functionalized" in node.target.name():
                raise ValueError(f"the program calls {node.args[0]}{line}, which writes into its arguments: let it return a new tensor")
            raise ValueError(f"the program calls {node.target.name()}{line}, an operator with a program inside: {change}")



"""Graphs with torch's kernels of attention in one form: `canonical` makes them `autoshard::attention`, and RMS norms torch's own operator.

The kernels of torch (`_scaled_dot_product_flash_attention`, ...) become the operator, keys and values that are repeated for their
groups of queries aren't, and masks that say nothing, or that attention is causal, are none.
"""

import operator
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from autoshard.capture.functional import VIEWS
from autoshard.capture.known_masks import Says, said_by
from autoshard.capture.operators import ATTENTION, BACKWARD, DROPOUT, DROPOUT_BACKWARD, OF_TORCH
from autoshard.torch_private import FakeTensor, pytree

aten = torch.ops.aten
KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable")
FORWARDS = {getattr(aten, f"_scaled_dot_product_{kind}").default for kind in KINDS}
BACKWARDS = {getattr(aten, f"_scaled_dot_product_{kind}_backward").default for kind in KINDS}
RENAMED = {"attn_bias": "attn_mask", "grad_out_": "grad_out", "log_sumexp": "logsumexp"}


def canonical(traced: fx.GraphModule) -> dict[fx.Node, fx.Node | None]:
    """Replaces torch's kernels and undoes repeated keys and values; returns what replaces each node that is no longer there."""
    gone: dict[fx.Node, fx.Node | None] = {}
    for node in traced.graph.nodes:
        node.target = OF_TORCH.get(node.target, node.target)
    for forward in [node for node in traced.graph.nodes if node.target in FORWARDS]:
        for item in _items(forward).values():
            _without_detach(item)
        backwards = _backwards_of(forward)
        if _are_replaceable(forward, backwards):
            gone |= {node: _as_operator(traced.graph, node) for node in (forward, *backwards)}
    known: dict[str, Says | None] = {}
    for forward in [node for node in traced.graph.nodes if node.target in (ATTENTION, DROPOUT)]:
        for item in _items(forward).values():
            _without_detach(item)
        backwards = _backwards_of(forward)
        _without_mask((forward, *backwards), known)
        _ungroup(forward, backwards)
    before = set(traced.graph.nodes)
    if any(known.values()):  # what torch.export asserts of masks that are none would keep them
        for check in traced.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
            traced.graph.erase_node(check)
    if any(node.target in (ATTENTION, DROPOUT, *FORWARDS) for node in before):
        traced.graph.eliminate_dead_code()
        gone |= {node: None for node in before - set(traced.graph.nodes)}
    _renumber(traced.graph, {_stem(node) for node in gone})
    return gone


def _renumber(graph: fx.Graph, stems: set[str]) -> None:
    """Names nodes of these stems as if the others had never been: stem, stem_1, stem_2 (graph.tile counts the names of a layer)."""
    used: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and (stem := _stem(node)) in stems:
            node.name = f"{stem}_{used[stem]}" if used[stem] else stem
            used[stem] += 1


def _stem(node: fx.Node) -> str:
    return re.sub(r"_\d+$", "", node.name)


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {RENAMED.get(name, name): item for name, item in {**dict(zip(names, node.args, strict=False)), **node.kwargs}.items()}


def _items(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that take results of a node, by the number of the result."""
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]


def _backwards_of(forward: fx.Node) -> list[fx.Node]:
    """The backward nodes that read what a forward node computes."""
    readers = dict.fromkeys(user for item in _items(forward).values() for user in item.users)
    known = (*BACKWARDS, BACKWARD, DROPOUT_BACKWARD)
    return [node for node in readers if node.target in known and _arguments(node)["out"] is _items(forward).get(0)]


def _without_detach(node: fx.Node) -> None:
    """Its readers read the node itself: outputs may be detached before they are kept for the backward."""
    for user in [user for user in node.users if user.target in (aten.detach.default, aten.alias.default)]:
        _without_detach(user)
        user.replace_all_uses_with(node)


def _are_replaceable(forward: fx.Node, backwards: list[fx.Node]) -> bool:
    """Whether nothing is dropped, and only the backwards read what the operator doesn't return."""
    more = [item for k, item in _items(forward).items() if k > 1]
    more += [item for node in backwards for k, item in _items(node).items() if k > 2]
    return not _arguments(forward).get("dropout_p") and all(user in backwards for item in more for user in item.users)


def _as_operator(graph: fx.Graph, node: fx.Node) -> fx.Node:
    target = BACKWARD if node.target in BACKWARDS else ATTENTION
    arguments = _arguments(node)
    args = tuple(arguments.get(argument.name) for argument in target._schema.arguments[:-1])  # in the natural order
    with graph.inserting_before(node):
        new = graph.call_function(target, (*args[:-2], bool(args[-2]), args[-1]))
    values = pytree.tree_map_only(fx.Node, lambda arg: arg.meta["val"], new.args)
    with values[0].fake_mode if isinstance(values[0], FakeTensor) else nullcontext():
        new.meta = {**node.meta, "val": target(*values)}
    for k, item in _items(node).items():
        if k < len(new.meta["val"]):
            item.meta["val"] = new.meta["val"][k]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _without_mask(nodes: Sequence[fx.Node], known: dict[str, Says | None]) -> None:
    """Attention and its backward without the mask where it is known and says what `is_causal` can say."""
    mask = _arguments(nodes[0]).get("attn_mask")
    if mask is None or any(_arguments(node).get("attn_mask") is not mask for node in nodes) or (says := said_by(mask, known)) is None:
        return
    for node in nodes:
        arguments = _arguments(node) | {"attn_mask": None, "is_causal": says is Says.CAUSAL}
        named = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        node.args, node.kwargs = tuple(arguments.get(name) for name in named[: named.index("scale") + 1]), {}


def _ungroup(forward: fx.Node, backwards: list[fx.Node]) -> None:
    """Keys and values as they were before they were repeated, where the gradients can be had of those as well."""
    repeated = [_arguments(forward)[name] for name in ("key", "value")]
    sources = [_before_repeat(node) for node in repeated]
    if any([_arguments(node)[name] for name in ("key", "value")] != repeated for node in backwards):
        return
    if None in sources or _shape(sources[0])[:3] != _shape(sources[1])[:3]:  # type: ignore[arg-type]
        return
    sums = {(node, k): _sum_over_groups(node, k, sources[k - 1]) for node in backwards for k in (1, 2)}  # type: ignore[arg-type]
    if None in sums.values():
        return
    of = dict(zip(repeated, sources, strict=True))
    for node in (forward, *backwards):
        node.args = tuple(of.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args)
    for (node, k), summed in sums.items():
        is_read = summed is not node
        value = summed.meta["val"] if is_read else sources[k - 1].meta["val"]  # type: ignore[union-attr]
        node.meta["val"] = (*node.meta["val"][:k], value, *node.meta["val"][k + 1 :])
        if is_read:
            summed.replace_all_uses_with(_items(node)[k])  # type: ignore[union-attr]
            _items(node)[k].meta["val"] = value


def _before_repeat(node: fx.Node) -> fx.Node | None:
    """x [B, G, S, D] of a node that holds each head of x several times in a row, [B, H, S, D]; None for another node.

    The nodes are unsqueeze(x, 2), expand to [B, G, H / G, S, D], a copy of that, and a view; for a single head of x an expand alone.
    """
    shape, expanded = _shape(node), node
    while expanded.target in VIEWS or expanded.target in (aten.clone.default, aten.expand.default):
        if expanded.target is aten.expand.default:
            break
        expanded = expanded.args[0]  # type: ignore[assignment]
    if expanded.target is not aten.expand.default:
        return None
    source: fx.Node = expanded.args[0]  # type: ignore[assignment]
    sizes = _shape(source)
    if len(sizes) == 4 and sizes[1] == 1 and _shape(expanded) == shape:  # of the single head
        return source if sizes == (shape[0], 1, *shape[2:]) and shape[1] > 1 else None
    b, h, s, d = shape
    if len(sizes) != 5 or _shape(expanded) != (b, sizes[1], h // sizes[1], s, d) or sizes != (b, sizes[1], 1, s, d) or h == sizes[1]:
        return None
    before: fx.Node = source.args[0]  # type: ignore[assignment]
    is_added = source.target in VIEWS or (source.target is aten.unsqueeze.default and source.args[1] in (2, -3))
    return before if is_added and _shape(before) == (b, sizes[1], s, d) else None


def _sum_over_groups(backward: fx.Node, index: int, source: fx.Node) -> fx.Node | None:
    """The gradient of what was repeated: the node that sums a gradient of the backward over each group; the backward itself where that
    gradient isn't computed, None where other nodes read it."""
    node = _items(backward).get(index)
    if node is None or not node.users:
        return backward
    while len(node.users) == 1 and _shape(node) != _shape(source):
        (node,) = node.users
        is_sum = node.target is aten.sum.dim_IntList and list(node.args[1]) in ([1], [2])  # type: ignore[arg-type]
        is_squeeze = node.target in (aten.squeeze.dim, aten.squeeze.dims)
        if not (node.target in VIEWS or is_sum or is_squeeze):
            return None
    return node if _shape(node) == _shape(source) else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)

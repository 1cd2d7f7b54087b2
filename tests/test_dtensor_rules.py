"""What DTensor's own propagation says of the layouts of our plans: every op of the bundled models is propagated by torch with the input
layouts that its plan has. Where torch takes other layouts, or gives another output, the op is in the list below, with the reason.
"""

from functools import cache

import pytest
import torch

import autoshard
from autoshard.capture import capture
from autoshard.exports import spec_of, unbacked_mesh
from autoshard.graph import Const, Ref
from autoshard.layout import parse
from autoshard.torch_private import OpSchema, sharding_propagator
from models import bert, dlrm, gpt2, llama, mlp, moe, resnet, unet
from tests.helpers import fast_mesh

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is that of torch 2.13's rules")
MODELS = {"bert": bert, "dlrm": dlrm, "gpt2": gpt2, "llama": llama, "mlp": mlp, "moe": moe, "resnet": resnet, "unet": unet}
MEANS = "a mean over a sharded dim is Partial(avg) in torch; ours is a sum whose parts were divided before, which adds up with other sums"
CHANNELS = "torch shards a convolution by the batch alone; ours by channels too, with the sums of its local parts"
DIFFERENT = {  # op: why torch takes other input layouts or gives another output
    "aten.addmm.default": "torch wants the bias as a Partial beside partial sums; ours is replicated, and added on one rank",
    "aten._log_softmax.default": "torch gathers the vocabulary; ours reduces the largest logit and the sum",
    "aten._log_softmax_backward_data.default": "the same, in the backward pass",
    "aten.nll_loss_forward.default": MEANS + "; of a sharded vocabulary ours picks the target where it is",
    "aten.nll_loss_backward.default": "the same, in the backward pass",
    "aten.mse_loss.default": MEANS,
    "aten.binary_cross_entropy_with_logits.default": MEANS,
    "aten.convolution.default": CHANNELS,
    "aten.convolution_backward.default": CHANNELS,
    "aten.native_group_norm.default": "torch shards the batch alone; ours whole groups of channels too",
    "aten.expand.default": "a replicated tensor is expanded to its shard alone; torch replicates what it expands",
    "aten.new_zeros.default": "zeros are made in the layout that their reader wants; torch's are replicated",
}
NO_RULE = {  # of torch
    "aten._embedding_bag.default", "aten._embedding_bag_forward_only.default", "aten._embedding_bag_backward.default",
    "aten._unsafe_index.Tensor", "aten._unsafe_index_put.default",
}  # fmt: skip
CASES = [(name, training) for name in MODELS for training in (False, True)]
QUICK = [("mlp", True), ("gpt2", True), ("dlrm", False)]


@cache
def propagated(name: str, training: bool) -> dict[str, list[tuple]]:
    """By what torch says ("same", "other inputs", "other outputs", "no rule"): the ops with their planned layouts."""
    module, inputs = MODELS[name].tiny()
    mesh = fast_mesh((2, 4))
    plan = autoshard.plan(module, inputs, mesh, training=training, baselines=False, objective="serial")
    graph, device_mesh, told = capture(module, inputs, training=training), unbacked_mesh(mesh), {}
    for i, op in enumerate(graph.ops):
        if op.is_placeholder or not op.inputs or not op.target.startswith("aten."):  # nothing to propagate from, or an op of ours
            continue
        placed = plan.layouts[op.name]
        given = zip(graph.input_tensors(i), placed.inputs, strict=True)
        specs = [spec_of(t.shape, getattr(torch, t.dtype), parse(layout), device_mesh) for t, layout in given]
        outputs = tuple(None if layout is None else tuple(parse(layout)) for layout in placed.outputs)
        told.setdefault(verdict(op, specs, outputs), []).append((op.target, placed.inputs, placed.outputs))
    return told


def verdict(op, specs, outputs) -> str:
    namespace, packet, overload = op.target.split(".", 2)
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    infos = (sharding_propagator.op_to_schema_info, sharding_propagator.op_to_schema_info_for_single_dim_strategy)
    args, kwargs = (built(of, specs) for of in (op.literals[0], dict(op.literals[1])))
    schema = OpSchema(function, tuple(args), kwargs, next((info[function] for info in infos if function in info), None))
    try:
        found = sharding_propagator.propagate_op_sharding_non_cached(schema)
    except NotImplementedError:
        return "no rule"
    wanted = found.redistribute_schema.args_spec if found.needs_redistribute else schema.args_spec
    if [spec.placements for spec in wanted] != [spec.placements for spec in schema.args_spec]:
        return "other inputs"
    several = found.output_spec if isinstance(found.output_spec, (tuple, list)) else (found.output_spec,)
    return "same" if tuple(None if spec is None else spec.placements for spec in several) == outputs else "other outputs"


def built(item, specs):
    """An argument as torch takes it, with the specs of tensors."""
    if isinstance(item, Ref):
        return specs[item.index]
    if isinstance(item, dict):
        return {key: built(value, specs) for key, value in item.items()}
    if isinstance(item, tuple):
        return [built(part, specs) for part in item]
    if isinstance(item, Const):
        return torch.device(item.text) if item.kind == "device" else getattr(torch, item.text)
    return item


@pytest.mark.parametrize(("name", "training"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_torch_propagates_the_planned_layouts_but_for_the_ops_of_the_list(name, training):
    told = propagated(name, training)
    unlisted = [row for kind in ("other inputs", "other outputs") for row in told.get(kind, ()) if row[0] not in DIFFERENT]
    assert not unlisted and {target for target, *_ in told.get("no rule", ())} <= NO_RULE
    assert len(told["same"]) > 0.6 * sum(map(len, told.values()))


@pytest.mark.slow
def test_every_op_of_the_list_differs_somewhere():
    told = [propagated(*case) for case in CASES]
    assert {row[0] for one in told for kind in ("other inputs", "other outputs") for row in one.get(kind, ())} == set(DIFFERENT)
    assert {row[0] for one in told for row in one.get("no rule", ())} == NO_RULE


def test_a_wrong_layout_is_noticed():
    """Planted: an elementwise op whose result is said to be sharded on the wrong dims."""
    module, inputs = mlp.tiny()
    graph, device_mesh = capture(module, inputs, training=False), unbacked_mesh(fast_mesh((2, 4)))
    i = next(i for i, op in enumerate(graph.ops) if op.target == "aten.relu.default" or ".gelu." in op.target)
    (tensor,) = graph.input_tensors(i)
    specs = [spec_of(tensor.shape, getattr(torch, tensor.dtype), parse("S(0),S(1)"), device_mesh)]
    assert verdict(graph.ops[i], specs, (tuple(parse("S(0),S(1)")),)) == "same"
    assert verdict(graph.ops[i], specs, (tuple(parse("S(1),S(0)")),)) == "other outputs"

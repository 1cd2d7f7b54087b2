"""A plan of several microbatches for fully_shard: when parameters are gathered and gradients reduced, and what is lost of the plan."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard.api import autosharding_pass
from autoshard.exports import fully_shard
from autoshard.lower.unsharded import materialized
from models import mlp
from tests.helpers_ranks import results
from tests.helpers_solutions import export_anyway as export

M = 4


def planned(scheme: str, **options):
    module, inputs = mlp.tiny(batch=8)
    given = {"example_inputs": inputs, "training": True, "ilp_solution_file": None, "mesh_shape": (2, 2)}
    return autosharding_pass(module, algo=scheme, microbatches=M, **given, **options)[1]["solution"]


@pytest.mark.parametrize(("scheme", "reshard", "sync"), (("zero1", False, False), ("zero2", False, True), ("zero3", True, True)))
def test_the_recipe_says_when_parameters_are_gathered_and_gradients_reduced(scheme, reshard, sync):
    recipe = export(planned(scheme), "fully_shard")
    assert recipe["microbatches"] == {"number": M, "reshard_after_forward": reshard, "requires_gradient_sync": sync}
    source = fully_shard.as_python(recipe)
    compile(source, "recipe.py", "exec")
    assert f"reshard_after_forward={reshard}" in source
    assert ("module.set_requires_gradient_sync(k == 3, recurse=False)" in source) == (not sync)


def test_what_one_choice_for_all_parameters_loses_is_said():
    solution = planned("alpa", pins={"*.weight": "S(0),S(0)", "*.weight.accumulated": "S(0),S(0)", "*.bias.accumulated": "P,P"})
    left = [one.what for one in export(solution, "fully_shard").left]
    assert "when 4 gradients are reduced" in left


def test_a_plan_of_one_microbatch_has_the_recipe_that_it_had():
    module, inputs = mlp.tiny()
    _, info = autosharding_pass(module, algo="fsdp", mesh_shape=(2, 2), example_inputs=inputs, training=True, ilp_solution_file=None)
    recipe = export(info["solution"], "fully_shard")
    assert "microbatches" not in recipe and "begin_microbatch" not in fully_shard.as_python(recipe)


def _trained(rank: int, recipe: dict) -> tuple[float, list[bool]]:
    """The largest difference of gradients to one process, and whether gradients exist after each microbatch."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(recipe["mesh"]["axis_names"]))
    torch.manual_seed(0)
    batches = [[torch.randn(2 * 8, 32) for _ in range(2)] for _ in range(M)]
    alone, model = (materialized(mlp.tiny(batch=8)[0], 0) for _ in range(2))
    fully_shard.apply(recipe, model, device_mesh)
    data = [k for k, name in enumerate(recipe["mesh"]["axis_names"]) if name in recipe["fully_shard"]["axes"]]
    row = device_mesh.get_coordinate()[data[0]]
    for k, (x, y) in enumerate(batches):
        (alone(x, y) / M).backward()
        fully_shard.begin_microbatch(recipe, model, k)
        (model(*(part.chunk(2)[row] for part in (x, y))) / M).backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return max(float((p.grad - q.grad.full_tensor()).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("scheme", ("zero1", pytest.param("zero3", marks=pytest.mark.slow)))
def test_fully_shard_runs_the_recipe(scheme):
    recipe = dict(export(planned(scheme), "fully_shard"))
    assert max(results(4, _trained, recipe)) < 1e-6

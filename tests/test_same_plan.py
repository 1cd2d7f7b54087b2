"""Ranks that were started with different plans: every rank ends with the same sentence, before anything runs."""

from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.solution import Solution
from models import mlp
from tests.helpers import fast_mesh
from tests.helpers_pipelines import as_pipeline, model_of
from tests.helpers_pipelines import planned as planned_pipeline
from tests.helpers_ranks import run_ranks
from tests.test_parallelize import perceptron
from tests.test_programs_run import modules
from tests.test_programs_run import planned as planned_programs


def planned(shape: tuple[int, ...]) -> Solution:
    return autoshard.plan(*mlp.tiny(), fast_mesh(shape), training=True, baselines=False)


def with_other_layout(plan: Solution) -> Solution:
    """One tensor has another layout."""
    name = next(name for name, placed in plan.layouts.items() if not placed.inputs and placed.outputs[0])
    axes = len(plan.mesh.axes)
    other = ",".join(["S(0)" if plan.layouts[name].outputs[0] != ",".join(["S(0)"] * axes) else "R"] * axes)
    return replace(plan, layouts={**plan.layouts, name: replace(plan.layouts[name], outputs=(other,))})


def with_other_prices(plan: Solution) -> Solution:
    """The same layouts; routes between them may differ."""
    first, *rest = plan.mesh.axes
    return replace(plan, mesh=replace(plan.mesh, axes=(replace(first, bandwidth=first.bandwidth / 2), *rest)))


OTHERS = {
    "layout": with_other_layout,
    "prices": with_other_prices,
    "microbatches": lambda plan: plan.noting(microbatches=2),
    "mesh": lambda plan: planned((plan.mesh.num_devices,) if len(plan.mesh.axes) > 1 else (1, plan.mesh.num_devices)),
    "devices": lambda plan: planned((plan.mesh.num_devices * 2,)),
}  # fmt: skip


def begin(rank: int, plans, odd: int, others, own_mesh: tuple[int, ...]) -> list[str]:
    """What a rank says whose plan is `plans`, or on rank `odd` one of `others`."""
    said = []
    for other in others:
        mine = other if rank == odd else plans
        for start in (
            lambda mine=mine: autoshard.device_mesh(mine),
            lambda mine=mine: autoshard.parallelize(perceptron(), mine, init_device_mesh("cpu", own_mesh)),
        ):
            try:
                start()
                said.append("began")
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("shape, odd", [((2,), 1), ((2, 2), 2)])
def test_ranks_with_different_plans_end_with_one_sentence_that_names_them(shape, odd):
    plan = planned(shape)
    others = [*(change(plan) for change in OTHERS.values()), planned(shape)]
    found = run_ranks(plan.mesh.num_devices, begin, plan, odd, others, shape)
    assert all(said == found[0] for said in found), found
    alike = {2: "0", 4: "0-1, 3"}[plan.mesh.num_devices]
    *different, first, second = found[0]
    for other, sentence in zip([o for o in others for _ in range(2)], different):
        expected = f"plan {plan.digest[:8]} on rank {alike}; plan {other.digest[:8]} on rank {odd}; start all ranks with the same plan"
        assert sentence.startswith("the ranks have different plans: ") and expected in sentence
    assert (first, second) == ("began", "began")  # the same plan, made twice


def programs(rank: int, plan, other) -> str:
    try:
        modules(other if rank == 1 else plan)
    except ValueError as error:
        return str(error)
    return "began"


def pipelines(rank: int, model, inputs, plan, other, schedules) -> list[str]:
    said = []
    for mine, schedule in ((other if rank == 0 else plan, None), (plan, schedules[rank])):
        try:
            as_pipeline(model, inputs, mine, schedule)
            said.append("began")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_so_do_ranks_with_different_plans_of_programs_and_with_different_pipelines(tmp_path):
    plan = planned_programs((2,))
    assert "generate" in plan.programs
    other = replace(plan, programs={**plan.programs, "generate": with_other_prices(plan["generate"])})
    found = run_ranks(2, programs, plan, other)
    assert found[0] == found[1] and "different plans" in found[0]
    assert run_ranks(2, programs, plan, plan) == ["began"] * 2

    (model, inputs), pipeline = model_of("gpt2", 2), planned_pipeline("gpt2", 2, stages=4, microbatches=2)
    first, *rest = pipeline.stages
    other = replace(pipeline, stages=(replace(first, recompute=not first.recompute), *rest))
    lines = "\n".join(["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1", "2F0,2F1,2B0,2B1", "3F0,3F1,3B0,3B1"])
    for name, text in (("a.csv", lines), ("b.csv", lines.replace("0F1,0B0", "0B0,0F1"))):
        (tmp_path / name).write_text(text + "\n")
    schedules = [str(tmp_path / name) for name in ("a.csv", "a.csv", "a.csv", "b.csv")]
    found = run_ranks(4, pipelines, model, inputs, pipeline, other, schedules)
    assert all(said == found[0] for said in found), found
    assert "on rank 0; plan" in found[0][0] and "on rank 0-2; plan" in found[0][1]


def test_a_plan_and_its_files_have_one_digest_and_another_plan_another(tmp_path):
    plan, pipeline = planned((2,)), planned_pipeline("gpt2", 2, stages=4, microbatches=2)
    for name in ("plan.json", "plan.pkl"):
        plan.save(tmp_path / name)
        assert autoshard.load(tmp_path / name).digest == plan.digest
    pipeline.save(tmp_path / "pipeline.json")
    assert autoshard.load(tmp_path / "pipeline.json").digest == pipeline.digest
    assert replace(plan, seconds={"cpu": {"total": 9.0}}).digest == plan.digest  # how long planning took is no part of it
    assert len({plan.digest, pipeline.digest, *(change(plan).digest for change in OTHERS.values())}) == 2 + len(OTHERS)

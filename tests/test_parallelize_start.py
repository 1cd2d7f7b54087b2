"""Ranks that die before, or while, the groups of a mesh are formed: the others end soon, with a sentence."""

import inspect
import multiprocessing
import os
import socket
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.mesh import Mesh
from autoshard.runtime.agreement import RankLost
from autoshard.runtime.distribute import Where
from autoshard.runtime.parallelize import parallelize
from autoshard.torch_private import resolve_process_group
from models import mlp
from tests.helpers_ranks import results
from tests.test_parallelize import planned_mlp

WAITED = 2.0  # seconds


def start(rank: int, world: int, port: int, dies: int, joins: bool, answers, solution) -> None:
    """As a launcher starts a rank; the one that dies does so before it joins, or after."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    if rank == dies and joins:
        dist.init_process_group("gloo")
    if rank == dies:
        os._exit(1)
    try:
        autoshard.device_mesh(solution, backend="gloo", timeout=30.0 if dies < 0 else WAITED)
        answers.send("formed")
        time.sleep(2)  # the first rank holds the store that the others may still read
    except RankLost as error:
        answers.send(str(error))
    os._exit(0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def started(dies: int, joins: bool) -> list[str]:
    """What each rank says, of four."""
    context, port, solution = multiprocessing.get_context("fork"), free_port(), planned_mlp()
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    work = partial(start, world=4, port=port, dies=dies, joins=joins, solution=solution)
    ranks = [context.Process(target=work, kwargs={"rank": k, "answers": pipes[k][1]}) for k in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    alive = [k for k, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
    assert not alive, f"ranks {alive} still wait"
    return [pipe.recv() if pipe.poll() else "nothing" for pipe, _ in pipes]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("dies", [0, 3])
def test_ranks_end_with_a_sentence_when_one_dies_before_the_groups_are_formed(dies, joins):
    said = started(dies, joins)
    assert said.pop(dies) == "nothing"
    assert set(said) == {"not all ranks came within 2 s: one died or is late; see each rank's first error, then start all of them again"}


def test_the_mesh_forms_when_all_come():
    assert started(-1, False) == ["formed"] * 4


def with_own_groups(rank: int) -> float:
    dist.new_group([0])
    group = Where.on(Mesh.from_bandwidths((2,)), init_device_mesh("cpu", (2,))).second_group(0)
    summed = torch.ones(())
    dist.all_reduce(summed, group=resolve_process_group(group))
    return summed.item()


def test_second_groups_form_where_some_ranks_have_made_groups_of_their_own():
    assert results(2, with_own_groups) == [2.0, 2.0]


def test_by_default_ranks_wait_less_than_a_minute():
    assert inspect.signature(autoshard.device_mesh).parameters["timeout"].default <= 40


@pytest.mark.parametrize("of", [lambda module: ({"a": module}, None), lambda module: (module, {"input_0": 0})], ids=["several", "pad"])
def test_one_program_of_one_shape_takes_one_model_and_no_values_to_pad_with(of):
    module, pad = of(mlp.tiny()[0])
    with pytest.raises(ValueError, match="give one model, and no values to pad with"):
        parallelize(module, planned_mlp(), None, pad=pad)

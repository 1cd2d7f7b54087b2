"""The same programs on real processes: four ranks over gloo, compared with the whole program."""

import datetime
import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from autoshard.capture import capture
from autoshard.layout import P, R, S, is_legal
from autoshard.lower import lower, run_global
from autoshard.lower.collectives import Groups, Rank
from autoshard.lower.run import run_rank, run_route
from autoshard.lower.sharding import distance, local_tensors
from autoshard.routes import Routes
from autoshard.strategies import candidates
from models import gpt2
from tests.helpers import tiny_graph
from tests.helpers_lower import mesh_of, random_layouts, values_of

WORLD = 4


def tiny_programs():
    """(program, values, whole results) of a training step in random layouts: of equal parts, of unequal ones."""
    mesh = mesh_of(2, 2)
    for graph, seed in ((tiny_graph("gpt2", True), 0), (capture(*gpt2.tiny(layers=1, batch=7, vocab=131), training=True), 1)):
        values, possible = values_of(graph, words=100), candidates(graph, mesh)
        yield lower(graph, *random_layouts(graph, mesh, seed, possible), mesh), values, run_global(graph, values)


def routes_between_all_layouts():
    """(steps, source, target) on a 2x2 mesh, partial sources and their reductions included."""
    mesh = mesh_of(2, 2)
    for reduce_op in ("sum", "avg", "max"):
        layouts = [layout for layout in itertools.product([S(0), S(1), R, P(reduce_op)], repeat=2) if is_legal((8, 12), layout, mesh)]
        for source, target in itertools.product(layouts, repeat=2):
            route = Routes(mesh).route((8, 12), 4, source, target)
            if route is not None and route.steps:
                yield route.steps, source, target


def work(rank, path, programs):
    """One rank's part; what it holds in the end goes to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(path, "store"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store, timeout=datetime.timedelta(seconds=60))
    device_mesh, mesh = init_device_mesh("cpu", (2, 2)), mesh_of(2, 2)
    coordinate = mesh.coordinates()[rank]
    groups, here = Groups.of(device_mesh), Rank(mesh, tuple(map(torch.tensor, coordinate)))
    whole = torch.arange(96.0).reshape(8, 12)
    routes = routes_between_all_layouts()
    moved = [groups.drive(run_route(steps, here, local_tensors(whole, source, mesh)[rank])) for steps, source, _ in routes]
    results = []
    for program, values, _ in programs:
        local = {load.name: local_tensors(values[load.name], load.slot.layout, mesh)[rank] for load in program.loads}
        results.append(run_rank(program, local, groups, here.coordinate, coordinate))
    torch.save((moved, results), os.path.join(path, f"rank{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path, programs = str(tmp_path_factory.mktemp("ranks")), list(tiny_programs())
    mp.start_processes(work, args=(path, programs), nprocs=WORLD, start_method="fork")
    return programs, [torch.load(os.path.join(path, f"rank{rank}.pt")) for rank in range(WORLD)]


@pytest.mark.slow
def test_training_on_processes_gives_the_whole_programs_results(ranks):
    programs, done = ranks
    assert [program.is_even for program, _, _ in programs] == [True, False]
    for k, (program, _, whole) in enumerate(programs):
        for give in program.results:
            parts = [results[k][give.key] for _, results in done]
            scale = whole[give.key].abs().max()
            assert distance(parts, give.slot.layout, program.mesh, whole[give.key]) <= 1e-5 * scale, give.key


@pytest.mark.slow
def test_every_route_on_processes_ends_with_the_target_cut(ranks):
    _, done = ranks
    whole, mesh = torch.arange(96.0).reshape(8, 12), mesh_of(2, 2)
    for k, (_, source, target) in enumerate(routes_between_all_layouts()):
        parts = [moved[k] for moved, _ in done]
        assert distance(parts, target, mesh, whole) < 1e-5, (source, target)
        assert all(part.is_contiguous() for part in parts)

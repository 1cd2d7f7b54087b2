"""Block layouts, their overlaps, and the problems made of them, against counting every element."""

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.layout import P, R, S
from autoshard.relayout import BlockLayout, BlockProblem, blocks, from_placements, order_of, read_problem, read_problems, to_placements
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, canonical, indices, largest, local_indices
from autoshard.relayout.holdings import common, most_leaving, sharding_axes, traffic
from benchmarks.studies.redistribution import random_problem
from tests.helpers_refusals import refusals

DIMS = [(s, n) for s in (1, 2, 3, 5, 7, 8, 12, 13, 16, 30) for n in (1, 2, 3, 4, 6) if n <= s]


@pytest.mark.parametrize("size, n", DIMS)
def test_extents_and_indices_are_those_of_the_definition(size, n):
    for b in range(1, size + 1):
        owner = (np.arange(size) // b) % n
        counted = np.bincount(owner, minlength=n)
        assert blocks.extents(size, (n,), b).tolist() == counted.tolist()
        assert largest(size, (n,), b) == counted.max()
        for r in range(n):
            assert indices(size, (n,), b, r).tolist() == np.flatnonzero(owner == r).tolist()
        published = b <= max(1, (size - 1) // (n - 1)) if n > 1 else True
        assert not published or counted.min() > 0  # the published rule leaves no rank empty
        assert blocks.fits(size, n, b) == (published or b == -(-size // n))


@pytest.mark.parametrize("size", [5, 7, 10, 12, 17, 30])
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
def test_nested_chunks_are_those_of_torch(size, sizes):
    parts = [torch.arange(size)]
    for n in sizes:
        chunks = [list(part.chunk(n)) for part in parts]
        parts = [chunk for made in chunks for chunk in made + [torch.empty(0, dtype=torch.int64)] * (n - len(made))]
    block = blocks.chunk_block(size, sizes)
    for r, part in enumerate(parts):
        assert indices(size, sizes, block, r).tolist() == part.tolist()
        assert indices(size, sizes, CHUNKS, r).tolist() == part.tolist()
    assert largest(size, sizes, block) == max(map(len, parts))
    assert blocks.extents(size, sizes, block).tolist() == list(map(len, parts))


def test_common_counts_every_element():
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 40)
        cuts = [tuple(rng.choice([(), (2,), (3,), (2, 2), (2, 3)])) for _ in range(2)]
        sizes = [rng.choice([CHUNKS, *range(1, size + 1)]) for _ in range(2)]
        held = [[set(indices(size, c, b, r).tolist()) for r in range(math.prod(c))] for c, b in zip(cuts, sizes)]
        counted = [[len(a & b) for b in held[1]] for a in held[0]]
        assert common(size, cuts[0], sizes[0], cuts[1], sizes[1]).tolist() == counted


def test_common_is_quick_for_large_dims():
    assert common(10_000_000, (2,), 5_000_000, (4,), 1).sum() == 10_000_000
    assert common(10**12, (4,), 7, (6,), 5).sum() == 10**12
    assert most_leaving(4096, (8,), 512, 64) == 448  # blocks of 512 dealt in 64s: a rank keeps one of eight


def test_traffic_is_what_ranks_lack():
    rng = random.Random(1)
    for _ in range(60):
        problem = random_problem(rng, most_axes=3, most_dims=3, partial=False)
        shape, mesh, u, v = problem.shape, problem.mesh, problem.source, problem.target
        flows = traffic(shape, u, v, mesh)
        coordinates = list(itertools.product(*map(range, mesh)))
        for r, coordinate in enumerate(coordinates):
            held, needed = (set(itertools.product(*map(list, local_indices(shape, x, mesh, coordinate)))) for x in (u, v))
            assert flows.elements[flows.receivers == r].sum() == len(needed - held)
        for s, r in zip(flows.senders, flows.receivers):
            assert _sender(u, v, mesh, coordinates[r], coordinates[s]) == coordinates[s]


def _sender(before, after, mesh, receiver, holding):
    """The sender by its definition, for one pair of ranks."""
    old, new = sharding_axes(before), sharding_axes(after)
    rank = [h if a in old else r for a, (h, r) in enumerate(zip(holding, receiver))]
    if tuple(rank) == receiver:
        return receiver
    slowest = next(a for a in sorted(old) if receiver[a] != holding[a])
    spare = [a for a in range(slowest, len(mesh)) if a in new and a not in old]
    same = [a for a in sorted(old) if a not in new]
    if spare and same:
        i = list(itertools.product(*(range(mesh[a]) for a in same))).index(tuple(receiver[a] for a in same))
        holders = list(itertools.product(*(range(mesh[a]) for a in spare)))
        for a, c in zip(spare, holders[i % len(holders)]):
            rank[a] = c
    return tuple(rank)


def test_messages_cross_no_slower_axis_than_they_must():
    rng, choices, messages = random.Random(2), 0, 0
    for _ in range(80):
        problem = random_problem(rng, most_axes=4, most_dims=2, partial=False)
        mesh, u, v = problem.mesh, problem.source, problem.target
        ranks = list(itertools.product(*map(range, mesh)))
        holds = [set(itertools.product(*map(list, local_indices(problem.shape, u, mesh, c)))) for c in ranks]
        flows = traffic(problem.shape, u, v, mesh)
        for s, r in zip(flows.senders, flows.receivers):
            possible = {_first_difference(c, ranks[r]) for c, held in zip(ranks, holds) if held == holds[s]}
            assert _first_difference(ranks[s], ranks[r]) == max(possible)
            choices, messages = choices + (len(possible) > 1), messages + 1
    assert choices > 100 and messages > 1000


def _first_difference(one, other):
    return next(a for a, (x, y) in enumerate(zip(one, other)) if x != y)


def test_an_exchange_with_a_replicated_axis_is_a_swap_of_pairs():
    mesh = (4, 4)
    u, v = BlockLayout(((0,),), (2,)), BlockLayout(((1,),), (2,))
    flows = traffic((8,), u, v, mesh)
    assert flows.most_sent() == 2 and len(flows.elements) == 12  # all but the diagonal swap their two elements
    assert flows.crossed() == (0, 1)
    back = traffic((8,), v, u, mesh)  # now every group along axis 1 holds everything
    assert len(back.elements) == 12 and back.crossed() == (1,)


# ---- text and placements


TEXTS = ["D_[4,2,4]⊥{(0,1),∅,∅,∅}(1,∅,∅,∅)", "D_[4,2]⊥{1,0}(3,2)", "D_[2,2]⊥{(1,0),∅}(chunk,∅)", "D_[2,2,2]⊥{0,∅}(4,∅)P(1,2)"]


@pytest.mark.parametrize("written", TEXTS)
def test_text_is_read_back(written):
    mesh, layout = BlockLayout.parse(written)
    assert layout.text(mesh) == written


@pytest.mark.parametrize("shape, mesh", [((8, 12), (2, 2)), ((10, 7), (2, 3)), ((16, 9, 5), (2, 2, 2))])
def test_placements_embed_both_ways(shape, mesh):
    for layout in itertools.product([R, P(), *(S(d) for d in range(len(shape)))], repeat=len(mesh)):
        block = from_placements(shape, layout, mesh)
        assert to_placements(block, len(mesh)) == layout
        assert canonical(shape, block, mesh) == block
        assert from_placements(shape, layout, mesh, order_of(block)) == block
    for order in ((0, 1), (1, 0)):
        block = from_placements(shape, (S(0), S(0), *(R for _ in mesh[2:])), mesh, {0: order})
        assert block.axes[0] == order


def test_torch_cuts_as_the_embedded_layouts_say():
    shape, sizes = (10, 7), (2, 3)
    for rank, coordinate in enumerate(itertools.product(*map(range, sizes))):
        mesh = DeviceMesh("cpu", torch.arange(6).reshape(sizes), _init_backend=False, _rank=rank)
        for layout in itertools.product([R, S(0), S(1)], repeat=2):
            local, offset = compute_local_shape_and_global_offset(shape, mesh, layout)
            held = local_indices(shape, from_placements(shape, layout, sizes), sizes, coordinate)
            assert tuple(map(len, held)) == tuple(local)
            assert all(some[0] == start for some, start in zip(held, offset) if len(some))


def test_strided_shards_are_block_cyclic():
    block = from_placements((16, 4), (_StridedShard(0, split_factor=2), R), (4, 2))
    assert block == BlockLayout(((0,), ()), (2, UNSHARDED))


# ---- problems


GOOD = {
    "id": "p",
    "shape": [8, 4],
    "mesh": [2, 2],
    "src": [[0], [1]],
    "src_bs": [4, 2],
    "dst": [[0, 1], []],
    "dst_bs": [2, -1],
    "mem": None,
}


def test_problems_are_read_in_all_their_forms():
    problem = read_problem(GOOD)
    assert problem.source == BlockLayout(((0,), (1,)), (4, 2)) and problem.target == BlockLayout(((0, 1), ()), (2, UNSHARDED))
    assert read_problem({"problem": GOOD}) == problem
    assert read_problems([GOOD, GOOD]) == [problem, problem] and read_problems({"problems": [GOOD]}) == [problem]
    assert read_problem({**GOOD, "src": "D_[2,2]⊥{0,1}(4,2)", "dst": "D_[2,2]⊥{(0,1),∅}(2,∅)"}) == problem
    without = {key: value for key, value in GOOD.items() if not key.endswith("_bs")}
    assert canonical(problem.shape, read_problem(without).source, problem.mesh) == problem.source


BAD = [
    ({"shape": [0, 4]}, "shape is .0, 4.; expected one or more whole numbers, each at least 1"),
    ({"mesh": [2, 0]}, "mesh is .2, 0."),
    ({"shape": []}, "0/shape holds .. has less than 1 item"),
    ({"src": [[0], [0]]}, "source: the layout uses mesh axis 0 twice"),
    ({"src": [[0, 0], []]}, "source: the layout uses mesh axis 0 twice"),
    ({"dst": [[2], []]}, "target: the layout uses mesh axis 2, the mesh .2, 2. has 2 axes; use 0 to 1"),
    ({"src_bs": [8, 2]}, "source: dim 0 of size 8 on 2 parts has block size 8; expected 1 to 7"),
    ({"src_bs": [0, 2]}, "expected a block size of at least 1"),
    ({"src_bs": 0.5}, "0/src_bs holds 0.5 is not of type"),
    ({"src_bs": [4]}, "src_bs has 1 block sizes, src 2 dims"),
    ({"shape": [8, 1]}, "source: dim 1 of size 1 is sharded into 2 parts; expected at most 1"),
    ({"src": [[0]], "src_bs": [4]}, "source: the layout has 1 dims, the tensor 2"),
    ({"mem": "lots"}, "0/mem holds .lots. is not of type"),
    ({"itemsize": 0}, "0/itemsize holds 0 is less than"),
    ({"src": "D_[4]⊥{0,∅}(1,∅)"}, "is written for the mesh .4., the problem has .2, 2."),
    ({"dst_partial": [1], "dst": [[0], []]}, "the target is partial on axes .1., the source on .., *|no step makes a tensor partial"),
    ({"shape": None}, "0/shape holds null is not of type"),
]
TOO_LITTLE = "memory limit is 3 elements .24 bytes. per rank; the source takes 8 and the target 8"
test_what_can_not_be_is_said_in_one_sentence = refusals(
    *((partial(read_problem, {**GOOD, **changes}), f"^(?:problem p|the data).*(?:{sentence})") for changes, sentence in BAD),
    *((partial(BlockLayout.parse, written), "expected the form") for written in ("D_[4]{0}(1)", "D_[4]⊥{0,1}(1)", "D_[4]⊥{0}(x)")),
    (lambda: read_problem({**GOOD, "mem": 3}).memory_limit(None, "resident"), TOO_LITTLE),
)


def test_the_limit_of_a_problem():
    assert read_problem(GOOD).memory_limit(None, "resident") == 8
    assert read_problem(GOOD).memory_limit(None, "buffers") == 16
    assert read_problem(GOOD).memory_limit(math.inf, "buffers") == math.inf


def test_an_axis_of_size_1_cuts_nothing():
    layout = canonical((8,), BlockLayout(((0, 1),), (4,), ()), (1, 2))
    assert layout == BlockLayout(((1,),), (4,)) and blocks.part_of((1,), (1, 2), (0, 1)) == 1
    assert blocks.axis_sizes((0, 1), (1, 2)) == (1, 2)
    assert BlockProblem((8,), (1, 2), BlockLayout(((0,),), (8,)), BlockLayout(((),), (UNSHARDED,))).same

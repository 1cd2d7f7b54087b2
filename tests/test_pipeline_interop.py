"""Stages and sub-meshes: the dynamic program against all cuts, all sub-meshes, all places for them."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost import axis_transfer_seconds
from autoshard.devices import link_of
from autoshard.mesh import DEVICES, Axis, LinkCurve, Mesh, default_axis_names
from autoshard.pipeline.stage_division import Nodes, Stage, SubMesh, Tiling, inter_op, least_bottleneck, seconds_of, step_seconds, submeshes
from autoshard.pipeline.submeshes import Cluster, Kind
from tests.helpers_refusals import assert_refused

CLUSTERS = [
    (Nodes(1, 8),), (Nodes(2, 4),), (Nodes(1, 6),), (Nodes(2, 3),), (Nodes(4, 2),), (Nodes(1, 2), Nodes(1, 4)), (Nodes(1, 3), Nodes(2, 2)),
    (Nodes(1, 5),), (Nodes(1, 1),),
]  # fmt: skip


def ways(kinds, subs, u, free):
    """Every way to take sub-mesh u from the free devices of each node, equal nodes once."""
    kind, n, m = subs[u]
    nodes = free[kind]
    needed = m if n == 1 else kinds[kind].devices
    able = [i for i, left in enumerate(nodes) if left >= needed]
    for chosen in {tuple(sorted(nodes[i] for i in some)): some for some in combinations(able, n)}.values():
        left = [x - m if i in chosen else x for i, x in enumerate(nodes)]
        yield [*free[:kind], left, *free[kind + 1 :]]


def brute_force(t, x, kinds, subs, K, count=None, idle=False):
    """T of the best of all divisions; inf if there is none. count: of so many stages, on all devices if some such division is and none may
    be idle."""
    best = {True: math.inf, False: math.inf}  # with all devices, and with some idle
    L = t.shape[1]

    def go(k, free, stages):
        if k == L and count in (None, len(stages)):
            full = count is not None and not idle and not any(map(sum, free))
            best[full] = min(best[full], step_seconds(*seconds_of(stages, t, x), K))
        if k == L:
            return
        for u in range(len(subs)):
            for left in ways(kinds, subs, u, free):
                for j in range(k + 1, L + 1):
                    go(j, left, [*stages, Stage(k, j, u)])

    go(0, [[nodes.devices] * nodes.number for nodes in kinds], [])
    return best[best[True] < math.inf]


def test_few_nodes_make_sub_meshes_of_any_number_and_many_of_divisors_and_powers_of_two():
    numbers = {count: [s.nodes for s in submeshes((Nodes(count, 2),)) if s.nodes > 1] for count in (3, 4, 5, 12)}
    assert numbers == {3: [2, 3], 4: [2, 3, 4], 5: [2, 4, 5], 12: [2, 3, 4, 6, 8, 12]}
    assert [s.devices for s in submeshes((Nodes(1, 6),))] == [1, 2, 3, 6] and len(submeshes((Nodes(1, 6),), every_size=True)) == 6


def test_meshes_of_sub_meshes_are_one_axis_or_two_about_equal_and_entire_nodes_also_halved():
    cluster = Cluster((Kind(3, 12), Kind(2, 4, "a100", inter_node_bandwidth=100e9)))
    shapes = {
        (1, 1): [(1,)], (1, 2): [(2,)], (1, 4): [(2, 2)], (1, 7): [(7,)], (1, 8): [(2, 4)], (1, 9): [(3, 3)], (1, 12): [(3, 4)],
        (3, 1): [(3,)], (2, 2): [(2, 2)], (2, 3): [(2, 3)], (2, 4): [(2, 4), (4, 2)], (3, 12): [(3, 12), (6, 6)],
    }  # fmt: skip
    assert {key: [mesh.shape for mesh in cluster.meshes(SubMesh(0, *key))] for key in shapes} == shapes
    assert cluster.num_devices == 44 and [cluster.memory(SubMesh(k, 1, 1)) for k in (0, 1)] == [kind.memory for kind in cluster.kinds]
    assert cluster.kinds[0].memory == DEVICES["h100"].memory and len(Cluster((Kind(1, 12),), every_size=True).submeshes) == 12
    for (devices, per_node), (nodes, of_each) in {(4, 8): (1, 4), (8, 8): (1, 8), (16, 8): (2, 8), (6, 2): (3, 2)}.items():
        (kind,) = Cluster.of(devices, per_node).kinds
        assert (kind.nodes, kind.devices) == (nodes, of_each)
    assert Cluster((Kind(2**15, 8),)).num_devices == 2**18
    for kinds, said in (((), "has no nodes"), ((Kind(2**15, 8), Kind(1, 1)), "262145 devices; expected 262144 at most")):
        assert_refused(said, Cluster, kinds)


def test_transfers_between_sub_meshes_share_the_links_of_their_nodes():
    h100, a100 = Kind(2, 8, intra_node_bandwidth=90e9), Kind(2, 4, "a100", intra_node_bandwidth=20e9, inter_node_bandwidth=100e9)
    pair, two, four = (SubMesh(k, 1, m) for k, m in ((0, 2), (1, 2), (1, 4)))
    assert Kind(1, 2).inside == link_of(DEVICES["h100"]) and h100.inside == 90e9 and h100.link is None
    for cluster, a, u, latency, bandwidth in (
        (Cluster((replace(h100, nodes=1),)), pair, pair, 5e-6, 90e9),
        (Cluster((h100,)), pair, pair, 15e-6, 400e9 / 8),
        (Cluster((h100, a100)), pair, two, 15e-6, 20e9),
        (Cluster((h100, replace(a100, intra_node_bandwidth=30e9))), four, pair, 15e-6, 25e9),
        (Cluster((h100, a100)), pair, pair, 15e-6, 50e9),
        (Cluster((h100, a100)), two, four, 15e-6, 20e9),
    ):
        assert cluster.link(a, u) == (latency, bandwidth) and cluster.seconds_between(a, u, 0) == 0.0
        assert cluster.seconds_between(a, u, 1e6) == pytest.approx(latency + 1e6 / (2 * bandwidth))
    x = (cluster := Cluster((h100, a100))).transfer_seconds((0, 1e6))
    assert not x[0].any() and x[1].tolist() == [[cluster.seconds_between(a, u, 1e6) for u in cluster.submeshes] for a in cluster.submeshes]


def test_a_measured_kind_has_its_links_and_its_curves_at_the_sizes_that_were_measured():
    curve = LinkCurve("all_gather", (1e3, 1e6), (1e-4, 1e-3), 1e-9)
    outer, inner = Axis("a", 2, 5e9, 2e-5, 4, curves=(curve,)), Axis("b", 4, 60e9, 1e-6, curves=(curve,))
    kind = Kind(2, 4, measured=Mesh((outer, inner)))
    for shape, links in {
        (4,): [(inner, 1)], (2,): [(inner, 0)], (2, 2): [(inner, 0)] * 2, (2, 4): [(outer, 1), (inner, 1)],
        (4, 2): [(outer, 0), (inner, 0)], (2, 1): [(inner, 0)] * 2, (8,): [(outer, 0)],
    }.items():  # fmt: skip
        axes = kind.mesh(shape).axes
        assert [(axis.bandwidth, len(axis.curves)) for axis in axes] == [(of.bandwidth, k) for of, k in links]
        assert tuple(axis.size for axis in axes) == shape
        assert [axis.name for axis in axes] == list(default_axis_names(len(shape)))
    one = Kind(1, 4, measured=Mesh((replace(outer, size=1), inner)))
    assert (kind.link, one.link) == (outer, inner)
    for each, link in ((kind, outer), (one, inner)):
        assert Cluster((each,)).seconds_between(SubMesh(0, 1, 4), SubMesh(0, 1, 2), 1e6) == axis_transfer_seconds(5e5, link)
    assert_refused(r"measured is a mesh of \(2, 4\); expected one of \(1, 4\), nodes x devices", Kind, 1, 4, measured=kind.measured)


def random_chain(rng, kinds, layers):
    """Seconds by layers, efficiency of each sub-mesh, and a memory limit, of a random chain; some fit nowhere."""
    subs = submeshes(kinds, every_size=bool(rng.integers(2)))
    Q = int(rng.integers(1, 5))
    work, held, saved = rng.uniform(1, 10, layers), rng.uniform(1, 6, layers), rng.uniform(0, 3, layers)
    limit = rng.uniform(3, 25)
    t = np.full((len(subs), layers, layers + 1, Q), math.inf)
    for u, s in enumerate(subs):
        speed = s.size ** rng.uniform(0.5, 1)
        for k in range(layers):
            for j in range(k + 1, layers + 1):
                for q in range(Q):
                    if (held[k:j].sum() + (q + 1) * saved[k:j].sum()) / s.size <= limit:
                        t[u, k, j, q] = work[k:j].sum() / speed
    return subs, t, rng.uniform(0, 3, (layers + 1, len(subs), len(subs)))


def compare(seed, most_layers, count=None):
    rng = np.random.default_rng(seed)
    kinds = CLUSTERS[seed % len(CLUSTERS)]
    layers, K = int(rng.integers(1, most_layers + 1)), int(rng.integers(1, 9))
    subs, t, x = random_chain(rng, kinds, layers)
    found = inter_op(t, x, Tiling(kinds, subs), K, count)
    expected = brute_force(t, x, kinds, subs, K, count)
    if expected == math.inf:
        assert found is None
        return False
    assert found is not None and found.seconds == pytest.approx(expected, rel=1e-12)
    assert count in (None, len(found.stages))
    assert step_seconds(*seconds_of(found.stages, t, x), K) == found.seconds  # its stages cost what it says
    assert [s.first for s in found.stages] == [0, *(s.last for s in found.stages[:-1])] and found.stages[-1].last == layers
    return True


def test_the_dynamic_program_equals_brute_force_on_small_chains():
    fits = [compare(seed, 4) for seed in range(54)]
    assert any(fits) and not all(fits)  # some chains fit nowhere, and that is said


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_so_many_stages_as_asked_for(count):
    fits = [compare(seed, 4, count) for seed in range(36)]
    assert any(fits) and not all(fits)


@pytest.mark.slow
def test_the_dynamic_program_equals_brute_force_on_200_chains():
    for seed in range(200):
        compare(1000 + seed, 8 if CLUSTERS[(1000 + seed) % len(CLUSTERS)] != (Nodes(1, 8),) else 6, (None, 1, 2, 3, 5)[seed % 5])


def test_brute_force_can_tell_a_wrong_answer():
    """The negative control: with transfers left out of the dynamic program some answer is worse."""
    worse = 0
    for seed in range(54):
        rng = np.random.default_rng(seed)
        kinds = CLUSTERS[seed % len(CLUSTERS)]
        layers, K = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        subs, t, x = random_chain(rng, kinds, layers)
        found = inter_op(t, np.zeros_like(x), Tiling(kinds, subs), K)
        if found is not None:
            worse += step_seconds(*seconds_of(found.stages, t, x), K) > brute_force(t, x, kinds, subs, K) * (1 + 1e-9)
    assert worse > 0


def test_six_devices_are_tiled_by_unequal_stages():
    kinds = (Nodes(1, 6),)
    subs = submeshes(kinds)
    assert [s.size for s in subs] == [1, 2, 3, 6]
    tiling = Tiling(kinds, subs)
    # three layers of work 3, 2, 1: sub-meshes of 3, 2 and 1 devices make every stage take 1
    t = np.full((4, 3, 4, 1), math.inf)
    for u, s in enumerate(subs):
        for k, work in enumerate((3.0, 2.0, 1.0)):
            t[u, k, k + 1, 0] = work / s.size
    found = inter_op(t, np.zeros((4, 4, 4)), tiling, 10)
    assert [subs[s.submesh].size for s in found.stages] == [3, 2, 1] and found.seconds == pytest.approx(3 + 9)


def test_sizes_that_do_not_divide_a_node_are_packed_exactly():
    """Two nodes of 4: stages of 3, 3 and 2 devices are 8 in all, but no node has room for the 2 beside a 3."""
    kinds, subs = (Nodes(2, 4),), (SubMesh(0, 1, 3), SubMesh(0, 1, 2))
    t = np.full((2, 3, 4, 1), math.inf)
    t[0, 0, 1], t[0, 1, 2], t[1, 2, 3] = 1.0, 1.0, 1.0
    assert inter_op(t, np.zeros((4, 2, 2)), Tiling(kinds, subs), 4) is None
    assert inter_op(t, np.zeros((4, 2, 2)), Tiling((Nodes(1, 8),), subs), 4) is not None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_more_microbatches_never_take_less(seed):
    rng = np.random.default_rng(seed)
    kinds = CLUSTERS[seed % len(CLUSTERS)]
    subs, t, x = random_chain(rng, kinds, 4)
    tiling = Tiling(kinds, subs)
    seconds = [d.seconds if (d := inter_op(t[..., :1], x, tiling, K)) else math.inf for K in (1, 2, 5)]
    assert seconds == sorted(seconds)


def test_the_least_bottleneck_is_the_least_largest_stage():
    for seed in range(18):
        rng = np.random.default_rng(seed)
        kinds = CLUSTERS[seed % len(CLUSTERS)]
        subs, t, _ = random_chain(rng, kinds, 3)
        none = np.zeros((4, len(subs), len(subs)))
        for count in (None, 2):
            largest = least_bottleneck(t, Tiling(kinds, subs), count)
            expected = brute_force(t, none, kinds, subs, 10**9, count, idle=True) / 1e9
            assert largest == pytest.approx(expected, rel=1e-6) or largest == math.inf


def test_a_table_of_the_wrong_shape_is_refused():
    tiling = Tiling((Nodes(1, 2),), submeshes((Nodes(1, 2),)))
    assert_refused("stage_seconds has shape", inter_op, np.zeros((1, 2, 3, 1)), np.zeros((3, 2, 2)), tiling, 1)
    assert_refused("transfer_seconds has shape", inter_op, np.zeros((2, 2, 3, 1)), np.zeros((2, 2, 2)), tiling, 1)

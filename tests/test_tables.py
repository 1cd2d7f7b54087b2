"""plan_tables: exact on small problems, within memory always, never above its own bound; prices, bad input; the published knapsack."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import plan_with_tables
from autoshard.mesh import Mesh
from autoshard.tables import Option, Table, dp_proposals, plan_tables
from autoshard.tables.arrays import Devices, instance_of
from autoshard.tables.bound import Bound, dual_feasible
from autoshard.tables.exact import search_all
from autoshard.tables.explain import _on_option, _on_place
from autoshard.tables.prices import Workload, distinct, options_of, reads_of_top
from autoshard.tables.with_dense import WithTables
from models import dlrm
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import refusals
from tests.helpers_tables import enumerated, loads, published, random_lists, random_tables


def check(tables, plan, devices, per_node, hbm, host):
    """The plan is what it says: every shard laid as its scope demands, nothing over its memory, the bound not above it."""
    seconds, used, used_host = loads(tables, [(p.index, p.devices) for p in plan.tables.values()], devices, per_node)
    assert max(used) <= hbm and max(used_host) <= host
    assert plan.slowest_device_seconds == pytest.approx(max(seconds), rel=1e-12)
    assert plan.bound_seconds <= plan.slowest_device_seconds * (1 + 1e-9)
    for table, placed in zip(tables, plan.tables.values()):
        option = table.options[placed.index]
        assert placed.option == option and len(placed.devices) == option.num_shards
        if option.scope == "mesh":
            assert placed.devices == tuple(range(devices))
        if option.scope == "node":
            nodes = [d // per_node for d in placed.devices]
            assert all(len(set(nodes[k : k + per_node])) == 1 for k in range(0, len(nodes), per_node))


def against_enumeration(seed, number, most_tables):
    rng = random.Random(seed)
    infeasible = 0
    for _ in range(number):
        devices, per_node = rng.choice([(3, 3), (2, 1), (3, 1), (2, 2), (1, 1)])
        tables = random_tables(rng, rng.randint(1, most_tables), 4, devices, per_node)
        hbm, host = float(rng.randint(3, 24)), float(rng.choice([0, 5, 30]))
        plan = plan_tables(tables, Mesh.from_bandwidths((devices,)), hbm=hbm, host_memory=host, devices_per_node=per_node, effort=0.01)
        best = enumerated(tables, devices, per_node, hbm, host)
        if math.isinf(best):
            assert plan.status == "infeasible" and plan.reason and not plan.tables and plan.bound_seconds == math.inf
            infeasible += 1
            continue
        assert plan.status == "optimal"
        assert plan.slowest_device_seconds == pytest.approx(best, rel=1e-12)
        check(tables, plan, devices, per_node, hbm, host)
        limits = np.full(devices, hbm), np.full(devices // per_node, host)
        instance = instance_of([table.options for table in tables], Devices(per_node, np.arange(devices) // per_node, *limits))
        assert search_all(instance, Bound(instance), math.inf, None)[::2] == (pytest.approx(best, rel=1e-12), True)
    assert 0 < infeasible < number


@pytest.mark.parametrize(("seed", "number", "most_tables"), [
    (0, 15, 4), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, 60, 4), (1, 300, 6)))  # enumeration takes a minute
])  # fmt: skip
def test_the_best_of_all_plans(seed, number, most_tables):
    against_enumeration(seed, number, most_tables)


@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_plans_fit_and_stay_above_their_bound(seed):
    rng = random.Random(seed)
    devices, per_node = rng.choice([(4, 4), (4, 2), (8, 4)])
    tables = random_tables(rng, rng.randint(5, 40), 5, devices, per_node)
    hbm = 1.3 * sum(min(sum(o.hbm_bytes) for o in t.options) for t in tables) / devices + 18
    plan = plan_tables(tables, devices, hbm=hbm, devices_per_node=per_node, effort=0.05)
    assert plan.tables, plan.reason
    check(tables, plan, devices, per_node, hbm, math.inf)


def test_the_same_plan_twice_and_another_seed_may_differ():
    tables = random_tables(random.Random(5), 30, 4, 4, 2)
    first, again, another = (plan_tables(tables, 4, hbm=200.0, devices_per_node=2, effort=0.05, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert another != first
    assert another.bound_seconds <= first.slowest_device_seconds <= 1.01 * another.slowest_device_seconds


def test_the_reason_of_an_option_is_what_it_saves():
    def reason(o, count=3, **changed):
        totals = {"seconds": [1.0, 3.0, 1.0], "hbm": [50.0, 20.0, 50.0], "host": [70.0, 10.0, 70.0], "longest": [9.0, 4.0, 9.0], **changed}
        return _on_option(SimpleNamespace(**{key: np.array(values) for key, values in totals.items()}), o, 0, count)

    more = "2 s more work than its fastest option"
    assert reason(1, 1) == "its only option" and reason(0) == reason(2) == "the least work of its 3 options"
    assert reason(1) == f"{more}, but 30 B less device memory"
    assert reason(1, hbm=[50.0, 50.0, 0.0]) == reason(1, hbm=[50.0, 60.0, 0.0]) == f"{more}, but 60 B less host memory"
    no_memory = {"hbm": [0.0] * 3, "host": [0.0] * 3}
    assert reason(1, **no_memory) == f"{more}, but in smaller shards"
    assert reason(1, **no_memory, longest=[4.0] * 3) == f"{more}; the search found no better use of the memory"


@pytest.mark.parametrize("scope, sizes, hbm, host, where", [
    ("device", 1, 5.0, 9.0, "device 0 takes 1 s; with it, device 1 would take 3 s"),
    ("device", 1, 1.5, 9.0, "device 0 takes 1 s; with it, device 3 would take 5 s"),
    ("device", 1, 0.5, 9.0, "device 0 takes 1 s, the others have no memory free for it"),
    ("device", 1, 5.0, 0.5, "device 0 takes 1 s; with it, device 1 would take 3 s"),
    ("node", 2, 5.0, 9.0, "node 0 takes 2 s; with it, node 1 would take 5 s"),
    ("mesh", 4, 5.0, 9.0, "one shard on every device"),
])  # fmt: skip
def test_the_reason_of_a_place_is_what_the_best_other_one_would_take(scope, sizes, hbm, host, where):
    """Devices of 1, 2, 3 and 4 s in nodes of two; one more shard takes 1 s and 1 byte of each memory. Device 1 and 2 have least free."""
    option = Option("x", (1.0,) * sizes, (1.0,) * sizes, (1.0,) * sizes, scope=scope)
    instance = instance_of([[option]], Devices(2, np.array([0, 0, 1, 1]), np.full(4, 9.0), np.full(2, 9.0)))
    spots = SimpleNamespace(seconds=np.array([1.0, 2.0, 3.0, 4.0]), place=np.array([[0]]))
    free = np.array([9.0, hbm if hbm != 1.5 else 0.5, hbm if hbm != 1.5 else 0.5, hbm])
    assert _on_place(instance, spots, free, np.full(2, host), 0, 0) == where


def test_the_checker_sees_a_plan_over_its_memory():
    tables = [Table("a", options=(Option("x", (1.0,), (5.0,)),)), Table("b", options=(Option("x", (1.0,), (5.0,)),))]
    plan = plan_tables(tables, 2, hbm=5.0)
    check(tables, plan, 2, 2, 5.0, math.inf)
    planted = replace(plan, tables={name: replace(p, devices=(0,)) for name, p in plan.tables.items()})
    with pytest.raises(AssertionError):
        check(tables, planted, 2, 2, 5.0, math.inf)


def test_nodes_share_host_memory():
    """Two tables on host memory of 6 bytes each: one per node, though each node has two devices."""
    tables = [Table(f"t{i}", options=(Option("x", (1.0,), (0.0,), (6.0,)),)) for i in range(2)]
    plan = plan_tables(tables, 4, hbm=1.0, host_memory=6.0, devices_per_node=2)
    assert {d // 2 for p in plan.tables.values() for d in p.devices} == {0, 1} and plan.hosts == (6.0, 6.0)
    assert plan_tables([*tables, replace(tables[0], name="t2")], 4, hbm=1.0, host_memory=6.0, devices_per_node=2).status == "infeasible"


def test_devices_may_have_different_memory():
    tables = [Table(f"t{i}", options=(Option("x", (1.0,), (size,)),)) for i, size in enumerate((3.0, 7.0))]
    plan = plan_tables(tables, 2, hbm=[3.0, 7.0])
    assert [p.devices for p in plan.tables.values()] == [(0,), (1,)]


def test_the_bound_counts_what_averages_do_not():
    """Three shards of 0.6 T can't lie on two devices, though their sum could."""
    options = [[Option("x", (0.6,), (0.0,))]] * 3
    devices = Devices(2, np.zeros(2, dtype=int), np.full(2, 1.0), np.full(1, np.inf))
    bound = Bound(instance_of(options, devices))
    assert not bound.refutes(1.0, packing=False) and bound.refutes(1.0) and bound.refutes(1.199) and not bound.refutes(1.201)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_dual_feasible_functions_are(z):
    z = np.array(z) / max(sum(z), 1.0)
    assert all(u.sum() <= 1 + 1e-9 for u in dual_feasible(z))


# -- prices


MESH = Mesh.from_bandwidths((2, 4))


def usage(mesh=MESH, per_node=4, with_host=True):
    return Workload(mesh, per_node, 512, 32e9, with_host)


def test_every_sharding_in_every_memory_is_listed():
    options = options_of(Table("t", 10**6, 64), usage())
    assert {o.sharding for o in options} == {"table_wise", "column_wise", "table_row_wise", "grid", "row_wise", "data_parallel"}
    assert {o.memory for o in options} == {"hbm", "host", "host_cached"}
    assert {o.memory for o in options_of(Table("t", 10**6, 64), usage(with_host=False))} == {"hbm"}
    counts = {(o.sharding, o.scope): o.num_shards for o in options if o.sharding in ("table_wise", "row_wise", "table_row_wise")}
    assert counts == {("table_wise", "device"): 1, ("row_wise", "mesh"): 8, ("table_row_wise", "node"): 4}


@pytest.mark.filterwarnings("error")
def test_plans_that_take_no_time_have_no_bound_and_need_no_search_for_one():
    tables = [Table(f"t{k}", options=(Option("a", 0.0, 1.0), Option("b", 2.0, 0.5))) for k in range(3)]
    plan = plan_tables(tables, 4, hbm=1e6, effort=0.01)
    assert (plan.status, plan.slowest_device_seconds, plan.bound_seconds) == ("optimal", 0.0, 0.0)


@pytest.mark.parametrize("table", [Table("t", 10**6, 64), Table("u", 10**5, 128, pooling=20.0, skew=1.1, optimizer="adam")])
def test_what_is_cut_weighs_the_same_in_all(table):
    """Weights and state: one copy however they are cut, a copy per device in data parallel; the rest is ids and pooled rows."""
    least = table.bytes + table.state_bytes
    for option in options_of(table, usage()):
        held = sum(option.hbm_bytes) if option.memory == "hbm" else sum(option.host_bytes)
        assert held >= (8 if option.sharding == "data_parallel" else 1) * least * (1 - 1e-12)
        assert all(x > 0 for x in option.seconds)


def test_options_stay_what_they_are():
    told = {}
    for table in (Table("t", 10**6, 64), Table("u", 10**5, 128, pooling=20.0, skew=1.1, optimizer="adam"), Table("v", 999, 24, features=3)):
        for mesh, per_node in ((MESH, 4), (Mesh.from_bandwidths((6,)), 3)):
            options = options_of(table, usage(mesh, per_node))
            told[f"{table.name} {mesh.shape}"] = [(o.sharding, o.memory, o.scope, o.seconds, o.hbm_bytes, o.host_bytes) for o in options]
    assert_stays("rooms/tables.json", told)


def test_a_table_read_more_takes_longer_and_host_memory_is_slower():
    def first(table):
        return {o.memory: o.seconds[0] for o in options_of(table, usage()) if o.sharding == "table_wise"}

    few, many = first(Table("t", 10**6, 64)), first(Table("t", 10**6, 64, pooling=10.0))
    assert all(many[key] > few[key] for key in few) and few["hbm"] < few["host"]
    skewed = first(Table("t", 10**6, 64, pooling=10.0, skew=1.2))
    assert skewed["host_cached"] < many["host_cached"]


def test_distinct_rows_against_a_draw():
    rng = np.random.default_rng(0)
    for rows, n, skew in ((1000, 500, 0.0), (5000, 20000, 1.0)):
        p = np.arange(1, rows + 1) ** -skew
        seen = np.mean([len(np.unique(rng.choice(rows, n, p=p / p.sum()))) for _ in range(5)])
        assert distinct(rows, n, skew) == pytest.approx(seen, rel=0.03)
        assert reads_of_top(rows, 0.2, skew) == pytest.approx(p[: rows // 5].sum() / p.sum(), rel=0.03)


# -- bad input


TABLE = Table("t", options=(Option("x", (1.0,), (1.0,)),))


test_bad_input_is_one_sentence = refusals(
    (lambda: plan_tables([], 2), "there are no tables"),
    (lambda: plan_tables([TABLE, TABLE], 2), "two tables are named 't'"),
    (lambda: plan_tables([TABLE], 2, hbm=0), "hbm is 0 bytes"),
    (lambda: plan_tables([TABLE], 2, hbm=math.nan), "hbm is nan"),
    (lambda: plan_tables([TABLE], 2, hbm=[1.0]), "hbm has 1 numbers; expected one, or 2"),
    (lambda: plan_tables([TABLE], 2, reserve=1.0), "reserve is 1.0"),
    (lambda: plan_tables([TABLE], 0), "mesh is 0; expected an autoshard.Mesh"),
    *((lambda name=name, value=value: plan_tables([TABLE], 2, **{name: value}), f"{name} is {value!r}; expected a number above 0")
      for name, value in (("batch", 0), ("batch", True), ("host_bandwidth", math.inf), ("effort", -1.0), ("effort", "1"))),
    (lambda: plan_tables([TABLE], 6, devices_per_node=4), "devices_per_node is 4; expected a whole number that divides the 6"),
    (lambda: plan_tables([TABLE], 2, devices_per_node=0), "devices_per_node is 0; expected a whole number that divides the 2"),
    (lambda: plan_tables([TABLE], 2, seed=1.5), "seed is 1.5; expected a whole number of 0 or more"),
    (lambda: Option("x", (-1.0,), (1.0,)), "seconds of option 'x' is -1.0"),
    (lambda: Option("x", (1.0,), (math.nan,)), "hbm_bytes of option 'x' is nan"),
    (lambda: Option("x", (1e308,), (1.0,)), "seconds of option 'x' is 1e.308; expected a number of 0 to"),
    (lambda: Table("t", pooling=1e308), "pooling is 1e.308; expected a number of 0 to"),
    (lambda: Option("x", (1.0, 1.0), (1.0,)), "option 'x' has 2 seconds, 1 hbm_bytes"),
    (lambda: plan_tables([Table("t", options=(Option("x", (1.0,), (1.0,), scope="mesh"),))], 2), "scope mesh has 1 shards; expected 2"),
    (lambda: plan_tables([Table("t", options=(Option("x", (1.0,) * 4, (1.0,) * 4, scope="mesh"),))], 2), "has 4 shards; expected 2 shards"),
    (lambda: plan_tables([Table("t", options=(Option("x", (1.0,) * 3, (1.0,) * 3, scope="node"),))], 4, devices_per_node=2),
     "scope node has 3 shards; expected a multiple of 2 shards, for 4 devices in nodes of 2"),
    (lambda: Table("t", rows=0), "rows is 0"),
    (lambda: Table("t", options=("x",)), "table 't': options holds a str; expected Option"),
    (lambda: Table("t", options=3), "table 't': options holds a int; expected Option"),
    (lambda: Table("t", options=[]), "table 't' has no options"),
    (lambda: Table("t", optimizer="magic"), "unknown optimizer 'magic'"),
    (lambda: dp_proposals([[1.0]], [[math.nan]], 5), "perf holds nan; expected numbers of 0 or more"),
    (lambda: dp_proposals([[-1.0]], [[1.0]], 5), "memory_in_bins holds -1; expected numbers of 0 or more"),
    (lambda: dp_proposals([[1.0]], [], 5), "memory_in_bins has 1 tables, perf 0"),
    (lambda: dp_proposals([[1.0, 2.0]], [[1.0]], 5), "table 0 has 2 in memory_in_bins, 1 in perf"),
    (lambda: dp_proposals([[]], [[]], 5), "table 0 has 0 in memory_in_bins"),
    (lambda: dp_proposals([[1.0]], [[1.0]], 0), "bins is 0; expected a whole number of 1 or more"),
    (
        lambda: plan_with_tables(*dlrm.tiny_dense(), "rows", [Table("t")], Mesh.from_bandwidths((4,)), hbm=1e6),
        "the model has no input 'rows'; its inputs are numbers, pooled, clicks",
    ),
    (
        lambda: plan_with_tables(dlrm.tiny_dense()[0], (torch.ones(2),), "pooled", [Table("t")], Mesh.from_bandwidths((4,)), hbm=1e6),
        "the example input for 'pooled' is NoneType; expected a tensor",
    ),
)


def test_why_nothing_fits():
    large = plan_tables([TABLE, Table("big", options=(Option("x", (1.0,), (9.0,)),))], 2, hbm=5.0)
    assert large.status == "infeasible" and "'big' does not fit" in large.reason
    many = plan_tables([replace(TABLE, name=f"t{i}") for i in range(11)], 2, hbm=5.0)
    assert many.status == "infeasible" and "the tables do not fit: they take at least" in many.reason
    for plan in (large, many):  # their options are given, so host memory would be no remedy
        assert "host memory" not in plan.reason and plan.reason.endswith("; hbm is 5 bytes; expected bytes per device, for example 40e9")
    host = plan_tables([Table("t", options=(Option("x", (1.0,), (0.0,), (9.0,)),))], 2, hbm=1e9, host_memory=5.0)
    assert "and 9 B on a host, where 1 GB and 5 B are free" in host.reason and "host_memory is 5 bytes; expected" in host.reason


def test_host_memory_is_offered_to_tables_that_it_was_not_given_to():
    wide, own = Table("wide", 10**7, 2**10), Table("own", options=(Option("x", (1.0,), (9e9,)),))
    assert "host_memory=" in plan_tables([wide], 2, hbm=40e6).reason
    assert "host_memory=" not in plan_tables([wide], 2, hbm=40e6, host_memory=1e6).reason
    assert "'own' does not fit" in (reason := plan_tables([Table("t", 10, 16), own], 2, hbm=1e9).reason) and "host_memory=" not in reason


def test_an_option_alone_is_a_tuple_of_one():
    option = Option("x", (1.0,), (1.0,))
    assert Table("t", options=option) == Table("t", options=[option]) == Table("t", options=(option,))


# -- the published knapsack: identical lists


PUBLISHED = json.loads((Path(__file__).parent / "data" / "tables" / "dp_proposals.json").read_text())


@pytest.mark.parametrize("item", PUBLISHED, ids=lambda item: f"{item['tables']} tables")
def test_the_published_proposals(item):
    assert dp_proposals(item["memory_in_bins"], item["perf"], item["bins"]) == item["proposals"]


def test_the_same_as_state_by_state():
    rng = random.Random(0)
    for _ in range(150):
        bins = rng.choice([1, 5, 30])
        memory, perf = random_lists(rng, rng.randint(1, 7), bins)
        assert dp_proposals(memory, perf, bins) == published(memory, perf, bins)


def test_the_reference_tells_a_wrong_tie_rule():
    """Two equal options: the first one stays."""
    assert dp_proposals([[1.0, 1.0]], [[2.0, 2.0]], 5) == [[0]] == published([[1.0, 1.0]], [[2.0, 2.0]], 5)
    assert dp_proposals([[4.0, 1.5], [1.2, 3.7]], [[1.0, 1.0], [1.0, 1.0]], 6) == published([[4.0, 1.5], [1.2, 3.7]], [[1.0, 1.0]] * 2, 6)


def test_inf_forbids_and_nothing_fits_gives_nothing():
    assert dp_proposals([[1.0, 2.0]], [[float("inf"), 3.0]], 5) == [[1]]
    assert dp_proposals([[9.0]], [[1.0]], 5) == []
    assert dp_proposals([], [], 5) == []


# -- DLRM and its tables on the same devices


@pytest.mark.slow  # five plans of the dense part
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_planned_together_is_no_slower_than_planned_apart(shape):
    mesh, tables = Mesh.from_bandwidths(shape), [Table(**record) for record in dlrm.tiny_tables(rows=1000)]
    module, inputs = dlrm.tiny_dense()
    found = plan_with_tables(module, inputs, "pooled", tables, mesh, hbm=1e6, effort=0.05)
    assert found.apart is not None and found.best.seconds <= found.apart.seconds and len(found.tried) > 1
    for one in found.tried:
        assert one.peak_bytes <= 1e6 and set(one.tables.tables) == {t.name for t in tables}
        assert (one.route_seconds == 0) == (one.pooled == ",".join(["S(0)"] * len(shape)))


def test_dense_model_tables_and_the_route_between_them_take_their_time_and_bytes_together():
    devices = [SimpleNamespace(hbm_bytes=bytes) for bytes in (30.0, 50.0)]
    tables = SimpleNamespace(slowest_device_seconds=0.25, devices=devices)
    found = WithTables(SimpleNamespace(cost=1.0, peak_bytes=100.0), tables, "R", 0.125, 200.0, "")
    assert (found.seconds, found.peak_bytes) == (1.375, 150.0)


def test_the_dense_part_computes_what_the_whole_model_does():
    torch.manual_seed(0)
    whole, dense = dlrm.DLRM((5, 6), 3, 4, (8,), (8,)), dlrm.Dense(2, 3, 4, (8,), (8,))
    dense.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("emb_l")})
    numbers, ids = torch.randn(7, 3), torch.randint(0, 5, (2, 7, 2))
    pooled = torch.stack([table(ids[t]) for t, table in enumerate(whole.emb_l)], dim=1)
    assert torch.equal(whole(numbers, ids), dense(numbers, pooled))

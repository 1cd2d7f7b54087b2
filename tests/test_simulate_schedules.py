"""Schedules against their closed forms, and against a simulation too simple to be wrong."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from autoshard.pipeline.schedule_times import RECEIVES_IN_TURN, posted_after, run
from autoshard.pipeline.schedules import SCHEDULES, Schedule, Unit, schedule_of
from tests.helpers_refusals import refusals

STAGES, MICROBATCHES = range(1, 9), (1, 2, 3, 4, 5, 7, 8, 12, 16, 17)
GRID = [
    (name, p, m, chunks)
    for name in SCHEDULES
    for p in STAGES
    for m in MICROBATCHES
    for chunks in ((2, 3, 4) if name == "interleaved_1f1b" else (1,))
]


def closed_form_seconds(name, p, m, c, t, w):
    """t: forward and backward of a device's share; w: of it the weight gradients' part."""
    return {
        "sequential": p * m * t,
        "gpipe": (m + p - 1) * t,
        "1f1b": (m + p - 1) * t,
        "interleaved_1f1b": (max(m, p) + (min(m, p) - 1) / c) * t,
        "zb_h1": m * t + (p - 1) * (t - 2 * w) + max(0, p - m) * w,
    }[name]


def closed_form_activations(name, p, m, c):
    g = math.ceil(m / max(1, m // p))  # microbatches in a round: p where p divides m
    return {
        "sequential": [1] * p,
        "gpipe": [m] * p,
        "1f1b": [min(m, p - d) for d in range(p)],
        "interleaved_1f1b": [min(c * m, 2 * (p - 1 - d) + (c - 1) * g + 1) for d in range(p)],
        "zb_h1": [min(m, p)] * p,
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_seconds_bubble_and_activations_are_the_closed_forms(name):
    for _, p, m, c in (row for row in GRID if row[0] == name):
        schedule = schedule_of(name, p, m, c)
        made = run(schedule, forward=1 / c, backward=2 / c, weight=1 / c)
        t = closed_form_seconds(name, p, m, c, t=3.0, w=1.0)
        assert made.seconds == pytest.approx(t, rel=1e-12), (name, p, m, c)
        assert made.bubble == pytest.approx(1 - m * 3.0 / t, abs=1e-12), (name, p, m, c)  # (p - 1)/(m + p - 1) for gpipe and 1f1b
        assert list(schedule.peak_activations) == closed_form_activations(name, p, m, c), (name, p, m, c)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_unit_runs_once(name):
    for _, p, m, c in (row for row in GRID if row[0] == name):
        schedule = schedule_of(name, p, m, c)
        kinds = "FBW" if name == "zb_h1" else "FB"
        for units in schedule.order:  # c m of each kind per device: the step count is 2 c m, or 3 m with W apart
            assert sorted(units) == sorted(Unit(k, i, v) for k in kinds for i in range(m) for v in range(schedule.chunks))


@pytest.mark.parametrize(("f", "b", "w"), [row for row in itertools.product((1, 2, 3), (1, 2, 3), (0, 1, 2, 3)) if row[2] <= min(row[:2])])
def test_zero_bubble_seconds_hold_while_weights_are_no_longer_than_forward_and_backward(f, b, w):
    for p, m in ((2, 2), (3, 7), (4, 9), (6, 6)):
        made = run(schedule_of("zb_h1", p, m), forward=f, backward=b + w, weight=w)
        assert made.seconds == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))


def test_one_f_one_b_is_the_textbook_order():
    order = schedule_of("1f1b", 3, 4).order
    assert ["".join(f"{u.kind}{u.microbatch}" for u in units) for units in order] == [
        "F0F1F2B0F3B1B2B3", "F0F1B0F2B1F3B2B3", "F0B0F1B1F2B2F3B3",
    ]  # fmt: skip


def posted_by_torch(schedule: Schedule):
    """By the unit that reads a transfer: how many units stand before its receive in the list that torch's runtime runs."""
    p, kinds = schedule.devices, {"F": _ComputationType.FORWARD, "W": _ComputationType.BACKWARD_WEIGHT}
    kinds["B"] = _ComputationType.BACKWARD_INPUT if schedule.splits_backward else _ComputationType.FULL_BACKWARD
    units = {d: [_Action(u.chunk * p + d, kinds[u.kind], u.microbatch) for u in order] for d, order in enumerate(schedule.order)}
    posted, receives = {}, {_ComputationType.RECV_F: "F", _ComputationType.RECV_B: "B"}
    for actions in _add_send_recv(units, lambda part: part % p, schedule.parts).values():
        before = 0
        for action in actions:
            if action.computation_type in receives:
                posted[receives[action.computation_type], action.stage_index, action.microbatch_index] = before
            before += action.computation_type in kinds.values()
    return posted


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "sequential"])
def test_receives_are_posted_where_torch_posts_them(name):
    seen = 0
    for p, m, chunks in itertools.product((2, 3, 4), (1, 3, 4, 8), (2, 3) if name == "interleaved_1f1b" else (1,)):
        schedule, posted = schedule_of(name, p, m, chunks), posted_by_torch(schedule_of(name, p, m, chunks))
        found = posted_after(schedule)
        assert posted == {unit: found[unit] for unit in posted}, (p, m, chunks)
        seen += len(posted)
    assert seen > 100


def test_on_gloo_a_receive_is_known_behind_what_its_device_sends_and_on_nccl_a_pair_sends_one_thing_at_a_time():
    """Two stages that take no time, transfers of 1: F0, then F1 beside B0, then to and fro on gloo; always to and fro on nccl."""
    times = {}
    for backend in ("gloo", "nccl"):
        made = run(schedule_of("1f1b", 2, 4), forward=1e-9, backward=1e-9, transfer=1, in_turn=False, backend=backend)
        times[backend] = [(s.device, round(s.start, 6)) for s in sorted(made.sends, key=lambda s: (s.start, s.device))]
        assert made.seconds == pytest.approx({"gloo": 7, "nccl": 8}[backend], abs=1e-6)
    assert times["gloo"] == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 3), (0, 4), (1, 5), (1, 6)]
    assert times["nccl"] == [(0, 0), (0, 1), (1, 2), (0, 3), (1, 4), (0, 5), (1, 6), (1, 7)]


def reference_seconds(schedule: Schedule, forward, backward, weight, there, back):
    """Ends by repeated relaxation; every transfer has a link of its own. In turn: received when nothing else is to run before."""
    p, n, end = schedule.devices, schedule.parts, {}
    in_turn = schedule.name in ("sequential", "gpipe", "1f1b")
    posted = {} if in_turn else posted_by_torch(schedule)
    while True:
        changed = False
        for d, units in enumerate(schedule.order):
            free, ends = 0.0, [0.0]
            for kind, i, c in units:
                v = c * p + d
                ready = 0.0
                received = free if in_turn else ends[posted.get((kind, v, i), 0)]
                if kind == "F" and v > 0:
                    made = end.get(("F", v - 1, i), math.inf)
                    ready = made if (v - 1) % p == d else max(made, received) + there[v - 1]
                if kind == "B":
                    ready = end.get(("F", v, i), math.inf)
                    if v + 1 < n:
                        made = end.get(("B", v + 1, i), math.inf)
                        ready = max(ready, made if (v + 1) % p == d else max(made, received) + back[v])
                seconds = {"F": forward[v], "B": backward[v] - (weight[v] if schedule.splits_backward else 0), "W": weight[v]}[kind]
                free = max(free, ready) + seconds
                ends.append(free)
                if end.get((kind, v, i)) != free and free < math.inf:
                    end[kind, v, i] = free
                    changed = True
        if not changed:
            return max(end.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_uneven_stages_and_transfers_equal_the_reference(name):
    rng = random.Random(3)
    for p, m in ((1, 3), (2, 4), (3, 5), (4, 4)):
        schedule = schedule_of(name, p, m, 2 if name == "interleaved_1f1b" else 1)
        n = schedule.parts
        forward, backward = [rng.uniform(0.5, 2) for _ in range(n)], [rng.uniform(1, 3) for _ in range(n)]
        weight = [b * rng.uniform(0, 1) for b in backward]
        # transfers shorter than any unit never wait for their link; where several are posted at once they wait for each other
        there, back = [rng.uniform(0, 0.1) for _ in range(n)], [rng.uniform(0, 0.1) for _ in range(n)]
        wait = 1e-12 if name in RECEIVES_IN_TURN else 0.1
        weight = [min(w, b - 0.3) for w, b in zip(weight, backward)]
        made = run(schedule, forward=forward, backward=backward, weight=weight, transfer=there, transfer_back=back)
        least = reference_seconds(schedule, forward, backward, weight, there, back)
        assert least * (1 - 1e-12) <= made.seconds <= least + wait * max(1.0, least * (wait < 0.1))


def test_no_two_units_of_a_device_and_no_two_transfers_of_a_link_overlap():
    made = run(schedule_of("interleaved_1f1b", 3, 6), forward=[1, 2, 1, 1, 3, 1], backward=2, transfer=1.5)
    lines = {}
    for span in made.spans:
        lines.setdefault(span.device, []).append((span.start, span.end))
    for send in made.sends:
        lines.setdefault((send.device, send.to), []).append((send.start, send.end))
    for spans in lines.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
    assert len(made.sends) == 2 * 6 * 5  # forwards and backwards of 6 microbatches over 5 borders


def test_transfers_wait_for_their_link():
    early = schedule_of("interleaved_1f1b", 2, 8)
    early = replace(early, chunks=1, order=schedule_of("gpipe", 2, 8).order)
    for t in (0.5, 3):  # torch's lists post a receive after the unit before: nothing hides a transfer
        assert run(early, forward=1, backward=1, transfer=t).seconds == pytest.approx(1 + 2 * 8 * (t + 1) + 1)


@pytest.mark.parametrize("t", [0, 0.5, 3])
def test_gpipe_receives_in_turn(t):
    made = run(schedule_of("gpipe", 2, 8), forward=1, backward=1, transfer=t)
    assert made.seconds == pytest.approx(1 + 8 * (t + 1) + 8 * (t + 1) + 1 if t else 18)  # a transfer before each unit that waits for one


@pytest.mark.parametrize("t", [0.5, 2.0, 7.0])
def test_one_f_one_b_receives_in_turn_both_ways_at_once(t):
    m, f, b = 6, 1.0, 2.0
    made = run(schedule_of("1f1b", 2, m), forward=f, backward=b, transfer=t)
    # the last stage: F, B, then its gradient leaves while the next activation comes; the first stage has run that F long before
    last = f + t + m * (f + b) + (m - 1) * t
    assert made.seconds == pytest.approx(last + t + b)


@pytest.mark.parametrize("chains", [1, 2, 3, 8])
@pytest.mark.parametrize("latency", [0, 0.5])
def test_pipelines_beside_each_other_take_turns_on_the_link(chains, latency):
    f, b, t = 1.0, 2.0, 3.0
    made = run(schedule_of("1f1b", 2, 1), forward=f, backward=b, transfer=t, latency=latency, chains=chains)
    one = (t - latency) / chains  # what each has the link for
    there = chains * one + latency  # the last waits for all
    back = one + latency  # then they are apart by as much as each sends for
    assert made.seconds == pytest.approx(2 * f + 2 * b + there + back)
    assert made.seconds == pytest.approx(2 * (f + b) + 2 * t - (1 - 1 / chains) * (t - latency))


@given(
    name=st.sampled_from(sorted(SCHEDULES)), p=st.integers(1, 4), m=st.integers(1, 6), t=st.floats(0, 8), latency=st.floats(0, 1),
    chains=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_pipelines_beside_each_other_lie_between_free_links_and_full_ones(name, p, m, t, latency, chains):
    schedule = schedule_of(name, p, m)

    def seconds(**given):
        return run(schedule, forward=1, backward=2, weight=1, **given).seconds

    made = seconds(transfer=t, latency=latency, chains=chains)
    assert made == seconds(transfer=t, latency=latency) or chains > 1
    assert made >= seconds() - 1e-9
    if p > 1 and t > latency:  # every microbatch of every one of them crosses each link, behind the first forward
        assert made >= m * (t - latency) + 1
    assert seconds(transfer=0, chains=chains) == seconds()


def test_memory_is_what_is_held():
    schedule = schedule_of("1f1b", 4, 8)
    assert schedule.peak_bytes([10, 20, 30, 40], [1, 2, 3, 4]) == (41, 62, 63, 44)  # fixed + (p - d) activations
    made = run(schedule, forward=1, backward=2, activation_bytes=5, finish=[0, 0, 0, 9])
    assert made.peak_bytes == (20, 15, 10, 5)
    assert made.seconds == pytest.approx(max(33, 33 - 3 * 2 + 9))  # the last stage is done three backwards before the first


def test_between_the_halves_of_a_backward_pass_only_what_the_second_reads_is_held():
    schedule = schedule_of("zb_h1", 2, 4)
    orders = ["".join(f"{u.kind}{u.microbatch}" for u in units) for units in schedule.order]
    assert orders == ["F0F1B0W0F2B1W1F3B2W2B3W3", "F0B0F1B1W0F2B2W1F3B3W2W3"]
    assert schedule.peak_bytes(10.0) == (20.0, 20.0)
    assert schedule.peak_bytes(10.0, 1.0, 4.0) == (21.0, 15.0)  # the last device has one between its halves while it runs the next
    assert schedule.peak_bytes(10.0, kept_bytes=14.0) == (24.0, 28.0)
    assert schedule_of("1f1b", 2, 4).peak_bytes(10.0, kept_bytes=14.0) == (20.0, 10.0)


F, B, THREE = Unit("F", 0), Unit("B", 0), schedule_of("zb_h1", 3, 3)
test_what_is_no_schedule_is_said = refusals(
    (lambda: schedule_of("1f2b", 2, 2, 1), "unknown schedule '1f2b'; known are sequential"),
    (lambda: schedule_of("gpipe", 0, 2, 1), "0 devices"),
    (lambda: schedule_of("gpipe", 2, 2.5, 1), "2.5 microbatches"),
    (lambda: schedule_of("gpipe", 2, 2, 3), "one chunk per device, found 3"),
    (lambda: run(THREE, forward=[1, 2], backward=2), "expected"),
    (lambda: run(THREE, forward=-1, backward=2), "expected"),
    (lambda: run(THREE, forward=math.inf, backward=2), "expected"),
    (lambda: run(THREE, forward=1, backward=2, weight=9), "expected"),
    (lambda: run(Schedule("wrong", 1, 1, ((B, F), (F, B))), forward=1, backward=1), "device 0 waits for ever to run B of microbatch 0"),
)

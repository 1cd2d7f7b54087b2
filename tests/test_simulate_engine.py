"""Streams and shared links: hand-made cases, and random programs against a simulation in small steps."""

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.simulate.engine import run_tasks


class T(NamedTuple):
    seconds: float
    stream: int = 0
    after: tuple[int, ...] = ()


def test_a_stream_runs_in_order_and_waits_for_what_it_needs():
    times = run_tasks([T(2), T(3, 1), T(1, 0, (1,)), T(1, 1, (0,))])
    assert times.begin == [0, 0, 3, 3]
    assert times.end == [2, 3, 4, 4]
    assert times.cause == [-1, -1, 1, 1]


def test_two_streams_on_one_link_share_it():
    both = run_tasks([T(1, 1), T(2, 2)], (-1, 0, 0))
    assert both.end == [2, 3]  # half speed until the first is done
    apart = run_tasks([T(1, 1), T(2, 2)], (-1, 0, 1))
    assert apart.end == [1, 2]


def test_a_late_comer_slows_what_runs():
    times = run_tasks([T(1, 0), T(3, 1), T(1, 2, (0,))], (-1, 0, 0))
    assert times.end == [1, 4, 3]  # alone to 1, shared to 3, alone to 4


def test_the_background_begins_while_nothing_else_uses_its_link_and_shares_it_from_then_on():
    tasks = [T(1, 1), T(3, 2), T(1, 0), T(1, 1, (2,)), T(3, 0, (2,)), T(1, 1, (4,))]
    times = run_tasks(tasks, (-1, 0, 0), background=(2,))
    assert times.begin == [0, 2, 0, 1, 1, 4] and times.end == [1, 6, 1, 2, 4, 6]  # both at half speed from 4
    assert times.cause[1] == 3  # for whose end it waited
    assert run_tasks(tasks, (-1, 0, 0)).begin[1] == 0


def test_the_background_lets_others_go_first_where_a_later_gap_has_room():
    """Kernels of 1, 4 and 2 seconds; collectives after the first and the second; one in the background of 3 seconds, read by the last."""
    tasks = [T(1, 0), T(1, 1, (0,)), T(3, 2), T(4, 0), T(1, 1, (3,)), T(2, 0, (2, 4))]
    times = run_tasks(tasks, (-1, 0, 0), background=(2,))
    assert times.begin[2] == 2 and times.cause[2] == 1 and times.end[1] == 2 and times.end[-1] == 8  # not at 0, where it slows the first
    soon = [T(1, 0), T(1, 1, (0,)), T(3, 2), T(1, 0, (2,)), T(3, 0), T(1, 1, (4,)), T(2, 0, (5,))]
    assert run_tasks(soon, (-1, 0, 0), background=(2,)).begin[2] == 0  # the second kernel reads it


def test_a_list_out_of_order_is_an_error():
    with pytest.raises(ValueError, match="waits for ever"):
        run_tasks([T(1, 1, (1,)), T(1, 1), T(1, 2)], (-1, 0, 0))


def random_program(rng, streams):
    tasks = []
    for i in range(rng.randint(1, 12)):
        after = tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 2)))))
        tasks.append(T(rng.randint(0, 4), rng.randrange(streams), after))
    return tasks


def random_blocks(rng):
    """Kernels, collectives after some of them that the next kernels may read, and one in the background before each, read later."""
    tasks, fetched = [], []
    for _ in range(rng.randint(3, 5)):
        tasks.append(T(rng.randint(1, 4), 2))
        fetched.append(len(tasks) - 1)
        read = tuple(i for i in fetched[:-1] if rng.random() < 0.3)
        tasks.append(T(rng.randint(1, 5), 0, read))
        tasks.append(T(rng.randint(1, 2), 1, (len(tasks) - 1,)))
        tasks.append(T(rng.randint(1, 2), 0, (len(tasks) - 1,) if rng.random() < 0.7 else ()))
    return tasks


def in_small_steps(tasks, links, step, slowed=0.0, background=()):
    """Every step each running task gets step/n of its work done, n the tasks on its link; step/(1 + l slowed) of that while kernels
    (stream 0) run beside tasks on l links."""
    left, done, now = [float(t.seconds) for t in tasks], [None] * len(tasks), 0.0
    begun = set()

    def waits(i):
        """Whether a task in the background has not begun, and one of its link that isn't there is running, or is let go first."""
        others = [j for j in range(len(tasks)) if links[tasks[j].stream] == links[tasks[i].stream] and tasks[j].stream not in background]
        running = [j for j in range(len(tasks)) if done[j] is None and runs(tasks, done, j)]
        if tasks[i].stream not in background or i in begun:
            return False
        kernel = next((j for j in running if tasks[j].stream == 0 and left[j] > 1e-9), None)
        return any(j in running for j in others) or kernel is not None and stands_back(tasks, others, i, kernel, left[kernel], background)

    while None in done:
        for _ in range(len(tasks)):  # what has nothing left ends at once, and may let others end
            for i in range(len(tasks)):
                if done[i] is None and left[i] < 1e-9 and runs(tasks, done, i) and not waits(i):
                    done[i] = now
        running = [i for i in range(len(tasks)) if done[i] is None and runs(tasks, done, i) and not waits(i)]
        begun.update(running)
        used = {links[tasks[i].stream] for i in running if links[tasks[i].stream] >= 0}
        beside = 1 + slowed * len(used) if any(tasks[i].stream == 0 for i in running) else 1
        for i in running:
            link = links[tasks[i].stream]
            slower = beside if link >= 0 or tasks[i].stream == 0 else 1
            left[i] -= step / slower / (1 if link < 0 else sum(links[tasks[j].stream] == link for j in running))
        now += step
    return done


def stands_back(tasks, others, i, kernel, left, background):
    """Whether task i, beside a kernel with seconds left, lets others of its link go first: it would not end before the next of them can
    begin, but would between two that follow, the kernel that reads it, and what is behind it, still in time."""
    kernels = [j for j in range(len(tasks)) if tasks[j].stream == 0]

    def before(j):
        """Seconds of the kernels that end before task j can begin."""
        seen, left = set(), [j]
        while left:
            k = left.pop()
            new = {m for m in range(k) if tasks[m].stream == tasks[k].stream or m in tasks[k].after} - seen
            seen |= new
            left += new
        last = max((kernels.index(k) + 1 for k in seen if k in kernels), default=0)
        return sum(tasks[k].seconds for k in kernels[:last]), last

    def until(j):
        limits = [math.inf]
        for k in range(j + 1, len(tasks)):
            if j in tasks[k].after:
                limits.append(sum(tasks[m].seconds for m in kernels if m < k) if k in kernels else until(k) - tasks[k].seconds)
        behind = [k for k in range(j + 1, len(tasks)) if tasks[k].stream == tasks[j].stream]
        if tasks[j].stream in background and behind:
            limits.append(until(behind[0]) - tasks[behind[0]].seconds)
        return min(limits)

    now = sum(tasks[j].seconds for j in kernels if j <= kernel) - left
    begins = sorted({before(j) for j in others if tasks[j].seconds and before(j)[1] > kernels.index(kernel)}, key=lambda pair: pair[1])
    begins = [seconds for seconds, _ in begins]
    if not begins or now + tasks[i].seconds <= begins[0] + 1e-6:
        return False
    fits = [a + tasks[i].seconds <= min(b, until(i)) + 1e-6 for a, b in zip(begins, begins[1:])]
    return any(fits)


def runs(tasks, done, i):
    mine = [j for j in range(i) if tasks[j].stream == tasks[i].stream]
    return all(done[j] is not None for j in (*mine, *tasks[i].after))


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_equal_small_steps(seed):
    rng = random.Random(seed)
    links = rng.choice([(-1, 0, 1), (-1, 0, 0), (0, 0, 0)])
    tasks = random_program(rng, 3)
    assert run_tasks(tasks, links).end == pytest.approx(in_small_steps(tasks, links, 1 / 12))  # shares of 1, 1/2, 1/3 of whole seconds
    if links[0] < 0:
        assert run_tasks(tasks, links, slowed=1.0).end == pytest.approx(in_small_steps(tasks, links, 1 / 24, 1.0))
        for program in (tasks, random_blocks(rng)):
            patient = run_tasks(program, links, slowed=1.0, background=(2,)).end
            assert patient == pytest.approx(in_small_steps(program, links, 1 / 24, 1.0, (2,)))


@given(kernels=st.floats(0, 10), collectives=st.floats(0, 10), slowed=st.floats(0, 1))
def test_kernels_and_collectives_slow_each_other(kernels, collectives, slowed):
    end = max(run_tasks([T(kernels, 0), T(collectives, 1)], (-1, 0), slowed=slowed).end)
    assert end == pytest.approx(max(kernels, collectives) + slowed * min(kernels, collectives))


@pytest.mark.parametrize("seed", range(20))
def test_one_pass_equals_events_where_nothing_is_shared(seed):
    """A link that only one stream uses changes nothing; one that a silent stream shares takes the other way through the code."""
    tasks = random_program(random.Random(seed), 3)
    silent = [*tasks, T(0, 3)]
    fast, slow = run_tasks(tasks, (-1, 0, 1)), run_tasks(silent, (-1, 0, 1, 1))
    assert slow.end[:-1] == pytest.approx(fast.end)

"""Streams and shared links: hand-made cases, and random programs against a simulation in small steps."""

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


def test_a_list_out_of_order_is_an_error():
    with pytest.raises(ValueError, match="waits for ever"):
        run_tasks([T(1, 1, (1,)), T(1, 1), T(1, 2)], (-1, 0, 0))


def random_program(rng, streams):
    tasks = []
    for i in range(rng.randint(1, 12)):
        after = tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 2)))))
        tasks.append(T(rng.randint(0, 4), rng.randrange(streams), after))
    return tasks


def in_small_steps(tasks, links, step, slowed=0.0, background=()):
    """Every step each running task gets step/n of its work done, n the tasks on its link; step/(1 + slowed) of that while kernels
    (stream 0) run beside tasks with links."""
    left, done, now = [float(t.seconds) for t in tasks], [None] * len(tasks), 0.0
    begun = set()

    def waits(i):
        """Whether a task in the background has not begun, and one of its link that isn't there is running."""
        others = [j for j in range(len(tasks)) if links[tasks[j].stream] == links[tasks[i].stream] and tasks[j].stream not in background]
        return tasks[i].stream in background and i not in begun and any(done[j] is None and runs(tasks, done, j) for j in others)

    while None in done:
        for _ in range(len(tasks)):  # what has nothing left ends at once, and may let others end
            for i in range(len(tasks)):
                if done[i] is None and left[i] < 1e-9 and runs(tasks, done, i) and not waits(i):
                    done[i] = now
        running = [i for i in range(len(tasks)) if done[i] is None and runs(tasks, done, i) and not waits(i)]
        begun.update(running)
        both = any(tasks[i].stream == 0 for i in running) and any(links[tasks[i].stream] >= 0 for i in running)
        for i in running:
            link = links[tasks[i].stream]
            beside = 1 + slowed if both and (link >= 0 or tasks[i].stream == 0) else 1
            left[i] -= step / beside / (1 if link < 0 else sum(links[tasks[j].stream] == link for j in running))
        now += step
    return done


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
        patient = run_tasks(tasks, links, slowed=1.0, background=(2,)).end
        assert patient == pytest.approx(in_small_steps(tasks, links, 1 / 24, 1.0, (2,)))


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

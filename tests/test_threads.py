"""Two threads of a process: verbs that trace wait for each other, and give what one thread gives."""

import threading
from functools import partial

import torch

import autoshard
from autoshard.capture import capture, in_turn
from models import gpt2, mlp
from tests.helpers import fast_mesh


def planned(make, progress=None):
    return autoshard.plan(*make(), fast_mesh((2,)), training=True, baselines=False, progress=progress)


def test_a_second_plan_begins_when_the_first_has_ended():
    """The second one is started from within the first, in another thread; without a lock it reports progress at once."""
    began, order, second = threading.Event(), [], []

    def other() -> None:
        planned(mlp.tiny, lambda *_: (order.append("second"), began.set()))

    def report(message: str, fraction: float) -> None:
        if not second:
            second.append(threading.Thread(target=other))
            second[0].start()
            assert not began.wait(0.5), "the second plan began within the first"
        order.append("first")

    planned(mlp.tiny, report)
    second[0].join()
    assert order == sorted(order) and {"first", "second"} == set(order)


def test_plans_and_captures_of_two_threads_are_those_of_one():
    models = {"mlp": partial(mlp.tiny, layers=1), "gpt2": partial(gpt2.tiny, layers=1)}
    made, expected = {}, {name: planned(make) for name, make in models.items()}

    def work(name) -> None:
        for _ in range(2):
            capture(*models[name](), training=False)
        made[name] = planned(models[name])

    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: s.fingerprint["graph"] for name, s in made.items()} == {name: s.fingerprint["graph"] for name, s in expected.items()}
    assert {name: s.layouts for name, s in made.items()} == {name: s.layouts for name, s in expected.items()}


def test_a_thread_may_trace_within_a_trace():
    assert in_turn(lambda: in_turn(torch.ones)(2).sum().item())() == 2

"""Settings for every test: the same examples in every run, no deadline on a busy machine, and captures that many tests ask for once."""

import gc
import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("autoshard", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("autoshard")
gc.set_threshold(100_000, 50, 100)  # most objects of a test process live as long as it does: an eighth of its time went into looking

# Ranks are forked. Where torch is built for CUDA and there is no GPU, autograd would start threads for one at the first backward among fake
# tensors, and then no child can run backward; it starts none at a first one like this.
torch.ones(1, requires_grad=True).sum().backward()

# pytest listens to every logger that does not propagate, and torch prints its graphs for whoever listens to this one.
logging.getLogger("torch.__trace").propagate = True

CAPTURING = ("test_capture", "test_depth", "test_tile", "test_threads", "test_chunked_loss")

SLOW = json.loads(Path(__file__).with_name("slow.json").read_text())  # {file::test: cases, [] for all}, by benchmarks/quick_suite.py


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items) -> None:
    there: dict[str, set[str]] = {}
    for item in items:
        test, _, case = f"{item.path.stem}::{item.name}".partition("[")
        there.setdefault(test, set()).add(case[:-1])
        if test in SLOW and (not SLOW[test] or case[:-1] in SLOW[test]):
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):  # whole files
        files = {test.partition("::")[0] for test in there}
        named = {test: set(cases) for test, cases in SLOW.items() if test.partition("::")[0] in files}
        if unknown := sorted(test for test, cases in named.items() if test not in there or cases - there[test]):
            raise pytest.UsageError(f"tests/slow.json names cases that are not there, of: {', '.join(unknown)}")


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def captures_are_kept(request):
    if request.module.__name__.rpartition(".")[2].startswith(CAPTURING):
        yield
        return
    from tests import captures  # here: it imports torch, which some tests see imported late

    with pytest.MonkeyPatch.context() as monkeypatch:
        captures.keep(monkeypatch)
        yield

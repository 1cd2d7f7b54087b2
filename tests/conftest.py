"""Settings for every test: the same examples in every run, no deadline on a busy machine, and captures that many tests ask for once."""

import gc

import pytest
from hypothesis import settings

settings.register_profile("autoshard", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("autoshard")
gc.set_threshold(100_000, 50, 100)  # most objects of a test process live as long as it does: an eighth of its time went into looking

CAPTURING = ("test_capture", "test_depth", "test_tile", "test_graph", "test_witness", "test_threads", "test_chunked_loss")


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

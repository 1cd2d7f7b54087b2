"""A pytest plugin with the fixture `autoshard_check`, which fails a test when a committed plan is stale or too far from the best plan now.

    def test_plan_is_current(autoshard_check):
        autoshard_check("plans/net.json", *net(), within=0.05)

pytest finds this module through the package's entry point and imports it in every run, so it imports torch only when a plan is checked.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def autoshard_check(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function (solution_path, model, example_inputs, within=0.05, **options) that checks a plan (`autoshard.check`).

    The model is the one that the test passes; the model that the plan's file names is never run. A relative path is taken
    from pytest's root folder. The options are those of `autoshard.check`. Returns its record; fails the test with
    one sentence where the plan does not fit the model, or may be more than `within` above the best plan now.
    """

    def checked(solution_path: str | os.PathLike[str], model: Any, example_inputs: Any, within: float = 0.05, **options: Any) -> Any:
        from autoshard import api  # here: see above

        record = api.check(model, example_inputs, api.load(Path(request.config.rootpath) / solution_path), within=within, **options)
        if not record.ok:
            pytest.fail(record.sentence(str(solution_path)), pytrace=False)
        return record

    return checked

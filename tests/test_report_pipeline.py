"""The page of a pipeline: stages over time, and what `autoshard show` makes of a pipeline's file."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.report import html
from autoshard.report.charts import WIDTH
from autoshard.report.pipeline import chart, time_line
from autoshard.report.step_tables import hidden_rows, saved_rows
from autoshard.solution import Pipeline, PipelineStage
from tests.helpers_report import HOSTILE, Elements
from tests.helpers_solutions import linear_solution

STAGE = PipelineStage(0, 2, 0, (0, 1), "h100", (2,), 1.0, 2.0, 0.0, 0.0, 1e9, 2, False, {"a": "S(0)"})
ROW = {"way": "grid", "schedule": "1f1b", "pipeline": 2, "microbatches": 3, "seconds": 12.0, "fits": True}
PIPELINE = Pipeline(12.0, 9.0, 1e9, 0.25, 0.0, "1f1b", 3, "grid", (STAGE, replace(STAGE, first=2, last=4, group=1, devices=(2, 3))), (ROW,))


def test_units_run_when_their_inputs_are_there():
    times = time_line(PIPELINE)  # 3 microbatches, 2 stages: (3 + 2 - 1) * (1 + 2) seconds
    assert times.seconds == 12.0 and times.busy == (9.0, 9.0)
    first = [span for span in times.spans if span.device == 1 and span.microbatch == 0]
    assert [(span.kind, span.start, span.end) for span in first] == [("F", 1.0, 2.0), ("B", 2.0, 4.0)]


def test_every_unit_is_a_box_as_wide_as_it_takes():
    drawn = chart(time_line(PIPELINE))
    assert drawn["kinds"] == ["forward", "backward"] and len(drawn["rows"]) == 2
    forward = drawn["rows"][1]["paths"][0]["path"]
    assert [int(left) for left in re.findall(r"M(\d+) 0", forward)] == [round(WIDTH * t / 12) for t in (1, 4, 7)]
    assert all(0.9 * WIDTH / 12 < int(width) <= WIDTH / 12 for width in re.findall(r"h(\d+)", forward))


def test_a_zero_bubble_schedule_has_weight_gradients():
    drawn = chart(time_line(replace(PIPELINE, schedule="zb_h1")))
    assert drawn["kinds"] == ["forward", "backward", "weight_gradients"]


def test_a_pipeline_s_page_names_its_stages_and_says_where_its_seconds_are_others():
    page = Elements(html.html_report(PIPELINE))
    assert page.crossed == [] and page.open == []
    assert "0-1 0 0-1 (h100)" in page.text and "2-3 1 2-3 (h100)" in page.text and "stages' own seconds" not in page.text
    assert "which make 12 s" in Elements(html.html_report(replace(PIPELINE, seconds=13.0))).text
    hostile = html.html_report(replace(PIPELINE, assumptions={"model": HOSTILE}))
    assert HOSTILE not in hostile and HOSTILE in Elements(hostile).text


def test_the_verb_reports_a_pipeline_s_file(tmp_path, capsys):
    PIPELINE.save(tmp_path / "pipe.json")
    assert main(["show", str(tmp_path / "pipe.json"), "--html", str(tmp_path / "page.html")]) == 0
    assert "Stages over time" in (tmp_path / "page.html").read_text()
    assert main(["show", str(tmp_path / "pipe.json"), "--model", "models/gpt2.py:tiny", "--html", str(tmp_path / "page.html")]) == 2
    assert "whose page needs nothing else" in capsys.readouterr().err


def test_the_verb_shows_what_the_search_printed(tmp_path, capsys):
    PIPELINE.save(tmp_path / "pipe.json")
    assert main(["show", str(tmp_path / "pipe.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(PIPELINE.to_dict(layouts=False)))
    assert main(["show", str(tmp_path / "pipe.json")]) == 0
    assert "Stages" in capsys.readouterr().out


def test_show_compares_two_pipelines(tmp_path, capsys):
    moved = replace(PIPELINE.stages[1], parameters={**PIPELINE.stages[1].parameters, "w": "S(0)"}, devices=(3, 2))
    for name, plan in (("a", PIPELINE), ("b", replace(PIPELINE, microbatches=8, stages=(PIPELINE.stages[0], moved)))):
        plan.save(tmp_path / f"{name}.json")
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert main(["show", *paths, "--json", "--exit-code"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["same"] and record["microbatches"] == [PIPELINE.microbatches, 8]
    assert record["stages"][0]["parameters"] == {} and record["stages"][1]["parameters"] == {"w": [None, "S(0)"]}
    assert main(["show", *paths]) == 0 and "Stage 1" in capsys.readouterr().out
    assert main(["show", paths[0], paths[0], "--exit-code"]) == 0
    linear_solution().save(tmp_path / "one.json")
    assert main(["show", paths[0], str(tmp_path / "one.json")]) == 2
    assert "one plan is of stages and the other of one program" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["explain", "simulate"])
def test_other_verbs_refuse_it(tmp_path, capsys, verb):
    PIPELINE.save(tmp_path / "pipe.json")
    assert main([verb, str(tmp_path / "pipe.json")]) == 2
    assert "is a pipeline" in capsys.readouterr().err


# -- recomputed values and hidden transfers ----------------------------------------------------------------------------------------------


GELU = {"aten.gelu.default": ["recomputed"]}
SAVED = {"h.0.mlp": GELU, "h.1.mlp": GELU, "": {"aten.mm.default": ["kept"]}}


def timeline(*tasks: tuple[str, int, float, float]) -> SimpleNamespace:
    """Of tasks: kind, stream, begin, end."""
    times = SimpleNamespace(begin=[task[2] for task in tasks], end=[task[3] for task in tasks])
    named = tuple(SimpleNamespace(kind=kind, stream=stream) for kind, stream, *_ in tasks)
    return SimpleNamespace(tasks=named, times=times, streams=("compute", "link a", "link b"))


def test_equal_blocks_are_one_row_and_what_is_not_kept_comes_first():
    solution = replace(linear_solution(), assumptions={"saved": {**SAVED, "h.2.mlp": {"aten.gelu.default": ["kept"]}}})
    assert [(row["way"], row["module"], row["target"], row["modules"]) for row in saved_rows(solution, None)] == [
        ("recomputed", "h.*.mlp", "gelu", 2), ("kept", "", "mm", 1), ("kept", "h.2.mlp", "gelu", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("recompute", [0, 3])
def test_the_page_says_what_is_computed_again(recompute):
    solution = replace(linear_solution(), assumptions={"saved": {} if recompute else SAVED, "recompute": recompute})
    text = Elements(html.html_report(solution)).text
    assert ("Values that are kept: 1 kinds" in text) is not bool(recompute)
    assert ("3 repeated blocks are recomputed" in text) is bool(recompute)


def test_a_transfer_is_hidden_where_a_kernel_runs():
    rows = hidden_rows(timeline(
        ("compute", 0, 0.0, 2.0), ("optimizer", 0, 5.0, 6.0),
        ("all_gather", 1, 1.0, 4.0), ("all_gather", 1, 5.0, 5.5), ("split", 2, 0.5, 1.0),
        ("all_reduce", 2, 2.0, 3.0),
    ))  # fmt: skip
    said = [(row["stream"], row["kind"], row["seconds"], row["hidden"], row["exposed"]) for row in rows]
    assert said == [
        ("link a", "all_gather", 3.5, 1.5, 2.0), ("link b", "all_reduce", 1.0, 0.0, 1.0), ("link b", "split", 0.5, 0.5, 0.0),
    ]  # fmt: skip


def test_hidden_seconds_are_those_of_a_fine_grid():
    draw = np.random.default_rng(0)
    starts, kinds = draw.integers(0, 60, 40), draw.choice(["compute", "all_reduce", "all_gather"], 40)
    tasks = [(str(kind), int(kind != "compute"), int(a), int(a + n)) for kind, a, n in zip(kinds, starts, draw.integers(1, 12, 40))]
    covered = {t for kind, _, a, b in tasks if kind == "compute" for t in range(a, b)}
    for row in hidden_rows(timeline(*tasks)):
        alike = [task for task in tasks if task[0] == row["kind"]]
        assert row["hidden"] == pytest.approx(sum(t in covered for _, _, a, b in alike for t in range(a, b)))
        assert row["seconds"] == pytest.approx(sum(b - a for _, _, a, b in alike))

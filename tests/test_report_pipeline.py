"""The page of a pipeline: stages over time, and what `autoshard show` makes of a pipeline's file."""

import json
import re
from dataclasses import replace

import pytest

from autoshard.cli import main
from autoshard.report import html
from autoshard.report.charts import WIDTH
from autoshard.report.pipeline import chart, time_line
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
    assert main(["show", str(tmp_path / "pipe.json"), "--mesh", "2"]) == 2
    assert "says itself for which devices" in capsys.readouterr().err


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

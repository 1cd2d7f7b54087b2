import json
import math

import pytest

from autoshard import report
from autoshard.report.blocks import sections
from autoshard.report.planned import planned_report
from autoshard.report.serving import _reasons, _styles
from autoshard.report.tables import ROWS, bars, devices_of, table_of
from autoshard.report.terminal import as_text, exported_text
from autoshard.report.values import by_kind
from autoshard.units import hundredths, percent, seconds, size
from tests.helpers_solutions import linear_solution


def parameters(num_blocks: int, odd: tuple[int, ...] = ()) -> dict:
    """Blocks of one weight and one bias each; the odd ones are replicated."""
    found = {"wte.weight": {"layout": "R,S(0)", "shape": [50304, 768], "dtype": "float32", "local_bytes": 38633472}}
    for k in range(num_blocks):
        found[f"h.{k}.attn.weight"] = {
            "layout": "R,R" if k in odd else "R,S(0)", "shape": [2304, 768], "dtype": "float32", "local_bytes": 1769472,
        }  # fmt: skip
        found[f"h.{k}.attn.bias"] = {"layout": "R,S(0)", "shape": [2304], "dtype": "float32", "local_bytes": 2304}
    return found


@pytest.mark.parametrize("page", report._PAGES)
def test_modules_are_loaded_when_they_are_used(page):
    assert report.__getattr__(page) is getattr(report, page) and getattr(report, page).__name__ == f"autoshard.report.{page}"


def test_a_module_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="'autoshard.report' has no attribute 'launcher'"):
        report.launcher  # noqa: B018


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (1.5, "1.5 s"),
        (0.99999e-3, "1 ms"),
        (12.3456e-3, "12.3 ms"),
        (4e-6, "4 us"),
        (3e-10, "0.3 ns"),
        (1234.0, "1234 s"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_seconds_are_said_in_three_digits(value, said):
    assert seconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(80e9, "80 GB"), (1769472, "1.77 MB"), (12, "12 B"), (999.9e9, "1 TB"), (4e11, "400 GB")])
def test_sizes_are_decimal(value, said):
    assert size(value) == said


def test_percent_of_nothing_is_no_number():
    assert (percent(1, 4), percent(1, 0)) == ("25%", "-")
    shares = {0.0: "0", 0.0123: "1.2", 0.5: "50", 0.994: "99", 0.996: "100", 1.0: "100", 2.345: "235", -1.5: "-150"}
    assert {share: hundredths(share) for share in shares} == shares
    assert (hundredths(0.031, "+"), hundredths(1.5, "+")) == ("+3.1", "+150")


@pytest.mark.parametrize(
    ("num_blocks", "odd", "titles"),
    [
        (12, (), ["", "h.0 .. h.11: same"]),
        (12, (5,), ["", "h.0 .. h.4, h.6 .. h.11: same", "h.5"]),
        (3, (0,), ["", "h.0", "h.1 .. h.2: same"]),
        (9, (1, 3, 5, 7), ["", "h.0, h.2, h.4 and 2 more: same", "h.1, h.3, h.5 and 1 more: same"]),
        (1, (), ["", "h.0"]),
        (0, (), [""]),
    ],
)
def test_blocks_that_are_laid_out_alike_are_shown_once(num_blocks, odd, titles):
    assert [section.title for section in sections(parameters(num_blocks, odd), {})] == titles


def test_blocks_of_different_families_are_not_mixed():
    row = parameters(0)["wte.weight"]
    found = sections({"encoder.0.w": row, "decoder.0.w": row, "decoder.1.w": row}, {})
    assert [section.title for section in found] == ["encoder.0", "decoder.0 .. decoder.1: same"]


def test_a_folded_block_shows_its_own_bytes_and_the_mean_time():
    found = sections(parameters(2), {"h.0": {"compute": 1.0, "communication": {"axis0": 1.0}}, "h.1": 4.0})
    assert (found[1].local_bytes, found[1].seconds) == (1769472 + 2304, 3.0)


def test_outside_blocks_a_module_shows_its_time_at_its_first_parameter():
    row = parameters(0)["wte.weight"]
    (section,) = sections({"wte.weight": row, "ln_f.weight": row, "ln_f.bias": row}, {"wte": {"compute": 2.0}, "ln_f": 1.0, "": 9.0})
    assert section.row_seconds == {"wte.weight": 2.0, "ln_f.weight": 1.0}


def test_the_time_of_modules_without_parameters_is_not_lost():
    blocks = {"h.0": 1.0, "wte": 2.0, "": {"compute": 3.0, "communication": 4.0}}
    said = report_of(parameters=parameters(1), breakdown={"compute": {}, "communication": {}, "blocks": blocks})
    (line,) = [line for line in said.splitlines() if "where no parameters are" in line]
    assert "7 s" in line


def report_of(**changes) -> str:
    return as_text(planned_report(linear_solution(**changes)))


@pytest.mark.parametrize("width", [100, 80])
def test_a_long_report_fits_the_width_and_loses_no_layout(width):
    deep = {
        "model.layers.3.block_sparse_moe.experts.7.a_projection_with_a_very_long_name_indeed.weight": {
            **parameters(0)["wte.weight"],
            "layout": "S(0),S(1)",
        }
    }
    solution = linear_solution(
        parameters={**parameters(40), **deep},
        assumptions={"model": "models/gpt2.py:small", "set": {"batch": 512, "vocab": 50304}, "note": "x" * 200, "odd": "[red]brackets[/]"},
        baselines={
            name: {"cost_seconds": 1.0, "peak_bytes": 1e9, "status": "optimal", "matched": "6 of 7 " * 9}
            for name in ("data_parallel", "megatron_sp")
        },
    )
    said = as_text(planned_report(solution), width)
    assert max(map(len, said.splitlines())) <= width
    assert "h.0 .. h.39: same" in said and "S(0),S(1)" in said and "[red]brackets[/]" in said


def test_at_100_columns_no_name_of_a_llama_is_folded():
    row = {"layout": "S(0),S(1)", "shape": [128256, 4096], "dtype": "bfloat16", "local_bytes": 16416768}
    names = ("self_attn.q_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight")
    rows = {"embed_tokens.weight": row, **{f"layers.{k}.{name}": row for k in range(32) for name in names}}
    said = report_of(parameters=rows, breakdown={"compute": {}, "communication": {}, "blocks": {f"layers.{k}": 1.22e-2 for k in range(32)}})
    assert max(map(len, said.splitlines())) <= 100
    assert all(f"  {name} " in said for name in names) and "layers.0 .. layers.31: same, each " in said and "12.2 ms" in said


def test_what_is_plain_is_exported_as_it_is():
    assert json.loads(exported_text({"a": [1, "x", None]}).plain) == {"a": [1, "x", None]}


def test_styles_of_serving_are_those_that_shard():
    _, heading, table = _styles({"tp_plan": {"model.layers.*.mlp.up_proj": "colwise", "model.norm": "replicate"}})
    assert heading.startswith("styles") and "up_proj" in as_text(table) and "norm" not in as_text(table)
    assert _styles({"tp_plan": {"model.norm": "replicate"}}) == [] == _styles({})


def test_reasons_of_serving_degrees_are_said_once_and_replicated_weights_from_a_tenth_on():
    def row(tensor, replicated, pipeline=1, copies=1, why="", memory=1.0):
        sizes = {"replicated_bytes": replicated, "weight_bytes": 100e6, "memory_bytes": memory}
        return {"tensor": tensor, "pipeline": pipeline, "copies": copies, "why": why, **sizes}

    said = "MB of weights are on every device: no tensor parallel style shards them"
    cases = [
        ([row(1, 11e6)], [f"tp 1 pp 1: 11 {said}"]), ([row(1, 9e6)], []),
        ([row(1, 21e6, 2)], [f"tp 1 pp 2: 21 {said}"]), ([row(1, 19e6, 2)], []), ([row(1, 11e6, memory=None)], []),
        ([row(4, 0, copies=2), row(8, 0, copies=2)], ["tp 4 pp 1, tp 8 pp 1: 2 copies of each key-value head"]),
        ([row(3, 0, why="heads"), row(1, 0)], ["tp 3 pp 1: heads"]),
    ]  # fmt: skip
    for rows, lines in cases:
        assert _reasons(rows) == (["", *lines] if lines else [])


def test_tables_that_take_longest_are_shown_first_with_runs_of_their_devices():
    runs = {"3": [3], "0,1": [0, 1], "0-2": [0, 1, 2], "4-7": [4, 5, 6, 7], "0,2,4": [0, 2, 4], "3,5": [3, 5]}
    assert {said: devices_of(some) for said, some in runs.items()} == {said: said for said in runs}
    loads = {f"t{k}": {"seconds": [0.5, k + 1.0], "devices": [0, 1], "sharding": "s", "memory": "hbm", "why": "w"} for k in range(ROWS + 1)}
    devices = [{"seconds": s, "hbm_bytes": 1e9 * s, "host_bytes": 0} for s in (3.0, 6.0, 0.0)]
    plan = {
        "status": "optimal", "tables": loads, "devices": devices, "hbm_limit_bytes": [12e9] * 3, "slowest_device_seconds": 6.0,
        "bound_seconds": 6.0, "gap": 0.0,
    }  # fmt: skip
    few, every = (as_text(table_of(plan, every=every)) for every in (False, True))
    assert "\nt0 " not in few and "\nt1 " in few and "... and 1 tables" in few and "\nt0 " in every and "... and" not in every
    assert [(row[2], *row[3:5]) for row in bars(plan).rows] == [("█" * 12, "3 GB", "25%"), ("█" * 24, "6 GB", "50%"), ("", "0", "0%")]
    assert [row[2] for row in bars({**plan, "slowest_device_seconds": 0.0}).rows] == [""] * 3


@pytest.mark.parametrize(
    "parts",
    [{"all_reduce": 1.0, "forward": 3.0, "update": 0.0}, {"a": 0.01, "b": 0.99}, {"a": 0.005, "b": 0.995}, {"forward": 0.0}, {}],
)
def test_a_table_by_kind_has_a_bar_of_each_share_and_the_sum(parts):
    table, total = by_kind("Time", "seconds", parts, seconds, {"forward": "compute"}), sum(parts.values())
    *rows, together = table.full_rows()
    assert [row.share for row in rows] == pytest.approx([100 * part / (total or 1.0) for part in parts.values()])
    shares = ["-" if total == 0 else "<1%" if 0 < part <= 0.005 * total else f"{100 * part / total:.0f}%" for part in parts.values()]
    assert [row.cells for row in rows] == [(kind.replace("_", " "), seconds(x), share) for (kind, x), share in zip(parts.items(), shares)]
    assert [row.kind for row in rows] == ["compute" if kind == "forward" else kind for kind in parts]
    assert together.cells == ("together", seconds(total), "") and together.strong

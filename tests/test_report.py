import math
from dataclasses import replace

import pytest

from autoshard import report
from autoshard.report.blocks import sections
from autoshard.report.planned import planned_report, summary, verify_report
from autoshard.report.serving import _reasons, _styles
from autoshard.report.terminal import as_text, exported
from autoshard.report.values import by_kind
from autoshard.solution import Placed
from autoshard.units import percent, seconds, size
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


def test_the_report_says_what_one_asks_first():
    said = report_of()
    for words in (
        "optimal, gap 0: no plan is faster under these prices", "2 ms per forward pass; no plan takes less than 2 ms",
        "1 GB per device at the peak",
        "2x4 of h100; axis0 x2 400 GB/s shared by 4, 15 us; axis1 x4 338 GB/s, 5 us", "optimizer adamw, memory_limit 80 GB",
        "by ilp (3 nodes, 20 choices, 2 edges) in 1 s of CPU",
    ):  # fmt: skip
        assert words in said


def test_baselines_stand_beside_ours_with_their_ratio():
    lines = {line.split()[1]: line for line in report_of().splitlines() if line.startswith("│ ") and "ms" in line}
    assert "1.00x" in lines["ours"] and "1.50x" in lines["fsdp"] and "1 of 1" in lines["fsdp"]


def test_a_baseline_that_does_not_fit_has_no_ratio():
    said = report_of(baselines={"megatron": {"cost_seconds": None, "peak_bytes": None, "status": "infeasible"}})
    (line,) = [line for line in said.splitlines() if "megatron" in line]
    assert "infeasible" in line and "x" not in line.replace("infeasible", "")


def test_a_baseline_over_the_memory_limit_says_so():
    row = {"cost_seconds": 1e-3, "peak_bytes": 9e10, "status": "optimal", "fits": False}
    (line,) = [line for line in report_of(baselines={"data_parallel": row}).splitlines() if "data_parallel" in line]
    assert "0.50x" in line and "over the memory limit" in line


def test_a_tied_parameter_says_with_what():
    row = {**parameters(0)["wte.weight"], "tied_to": "wte.weight"}
    assert "50304x768 float32, is wte.weight" in " ".join(report_of(parameters={"lm_head.weight": row}).split())


def test_the_time_adds_up():
    lines = [line.split() for line in report_of().splitlines() if "%" in line]
    assert [(row[1], *row[-5:-1]) for row in lines] == [
        ("compute", "1.5", "ms", "│", "75%"), ("│", "1.5", "ms", "│", "75%"), ("communication", "500", "us", "│", "25%"),
        ("│", "500", "us", "│", "25%"),
    ]  # fmt: skip


def test_replicated_ops_are_listed():
    said = report_of(replicated_ops=({"target": "aten.foo.default", "count": 3, "seconds": 1e-5, "bytes": 1e6},))
    assert "Replicated for want of rules" in said and "aten.foo.default │     3 │ 10 us │  1 MB" in said
    assert "Replicated" not in report_of()


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


def test_a_gap_of_rounding_is_none():
    assert "optimal, gap 0:" in report_of(cost=1.0, bound=1.0 - 1e-15) and "gap 0.1:" in report_of(cost=1.0, bound=0.9)


def test_an_unjudged_plan_has_a_report_too():
    bare = {"parameters": {}, "baselines": {}, "breakdown": {}, "counts": {}, "assumptions": {}, "seconds": {}}
    said = report_of(
        layouts={"w": Placed((), ("R,R",))}, cost=math.inf, bound=0.0, peak_bytes=math.inf, status="unjudged", solver="", **bare
    )
    assert "unjudged, no bound: layouts only" in said and "inf" not in said


def test_the_summary_has_the_keys_that_scripts_rely_on():
    record = summary(linear_solution())
    assert set(record) >= {
        "status", "cost_seconds", "bound_seconds", "gap", "solver", "peak_bytes", "mesh", "nodes", "choices", "edges",
        "distinct_signatures", "baselines", "replicated_ops", "parameters", "fingerprint", "cpu_seconds", "wall_seconds",
    }  # fmt: skip
    assert record["parameters"] == {"w": "R,S(1)"} and record["mesh"]["shape"] == [2, 4] and record["gap"] == 0.0


def test_an_unknown_cost_is_none_in_the_summary():
    record = summary(linear_solution(cost=math.inf, bound=0.0))
    assert (record["cost_seconds"], record["gap"]) == (None, None)


def test_a_check_is_reported_plan_by_plan():
    row = {"max_relative_error_outputs": 1e-7, "max_relative_error_gradients": None, "placement_mismatches": [], "redistributes": 12}
    wrong = {**row, "placement_mismatches": [{"op": "mm", "output": 0, "planned": "R,R", "found": "P,R"}]}
    said = as_text(verify_report({"ok": False, "ranks": 8, "plans": [{"seed": None, **row}, {"seed": 3, **wrong}]}))
    assert "mm, output 0: planned R,R, found P,R" in said
    assert "NOT OK, on 8 simulated ranks" in said and "│ plan " in said and "│ random, seed 3 " in said and "1.0e-07" in said


def test_what_is_plain_is_exported_as_it_is():
    assert exported({"a": [1, "x", None]}) == {"a": [1, "x", None]}


def test_an_optimal_plan_within_a_gap_is_not_called_the_fastest():
    words = as_text(planned_report(replace(linear_solution(), status="optimal", cost=2e-3, bound=2e-3 * (1 - 5e-4))))
    assert "no plan is faster by more than 0.05 %" in words and "no plan is faster under" not in words


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


@pytest.mark.parametrize("parts", [{"all_reduce": 1.0, "forward": 3.0, "update": 0.0}, {"a": 0.005, "b": 0.995}, {"forward": 0.0}, {}])
def test_a_table_by_kind_has_a_bar_of_each_share_and_the_sum(parts):
    table, total = by_kind("Time", "seconds", parts, seconds, {"forward": "compute"}), sum(parts.values())
    *rows, together = table.full_rows()
    assert [row.share for row in rows] == pytest.approx([100 * part / (total or 1.0) for part in parts.values()])
    shares = ["-" if total == 0 else "<1%" if 0 < part <= 0.005 * total else f"{100 * part / total:.0f}%" for part in parts.values()]
    assert [row.cells for row in rows] == [(kind.replace("_", " "), seconds(x), share) for (kind, x), share in zip(parts.items(), shares)]
    assert [row.kind for row in rows] == ["compute" if kind == "forward" else kind for kind in parts]
    assert together.cells == ("together", seconds(total), "") and together.strong

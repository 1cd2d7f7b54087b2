"""A launch has one speed and one peak of memory, whether `degrees` composes them of captured blocks or the time line of its whole graph is
run."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import one_answer  # noqa: E402

STEPS = {"eager": (8192, 1, "none", 0), "compiled": (8192, 1, "none", 1), "recomputed": (2048, 4, "full", 1)}


CASES = [("1B, ddp 4 x megatron 2", "eager"), ("fsdp 16", "recomputed")]  # a loss over a sharded vocabulary; what is gathered once
SLOW = [("fsdp 8", "eager"), ("ddp 8", "compiled"), ("megatron, sequences 8", "recomputed")]
SLOW += [("Qwen3 8B, fsdp 8", "eager")]  # queries and keys are normalized


@cache
def planned(scheme: str, step: str) -> tuple[float, float]:
    few = {"blocks": (2, 4)} if (scheme, step) in CASES else {}  # the seconds and bytes of these two are the same with as few
    return one_answer.planned(one_answer.row_of(one_answer.SCHEMES[scheme], STEPS[step]), **few)


@pytest.mark.parametrize(("scheme", "step"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_blocks_of_launches_and_the_time_line_agree(scheme, step):
    row = one_answer.row_of(one_answer.SCHEMES[scheme], STEPS[step])
    (seconds, bytes), launched = planned(scheme, step), one_answer.launched(row)
    assert seconds == pytest.approx(launched[0], rel=0.01)
    assert bytes == pytest.approx(launched[1], rel=0.01)


@pytest.mark.slow
def test_attention_over_a_sharded_sequence_is_a_ring_in_both():
    row = one_answer.cases()["context 8, 32768, compiled"]
    assert one_answer.planned(row) == pytest.approx(one_answer.launched(row), rel=0.01)


def test_another_constant_on_one_side_is_seen(monkeypatch):
    row = one_answer.row_of(one_answer.SCHEMES["fsdp 16"], STEPS["recomputed"])
    seconds, _ = planned("fsdp 16", "recomputed")
    constants_of = one_answer.RunConstants.of

    def slower(*names):
        constants = constants_of(*names)
        return replace(constants, device=replace(constants.device, training=1.05 * constants.device.training))

    monkeypatch.setattr(one_answer.RunConstants, "of", slower)
    assert seconds != pytest.approx(one_answer.launched(row)[0], rel=0.02)

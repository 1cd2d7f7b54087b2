"""Published runs of mixtures of experts, read as a table and predicted."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = (
    "source model gpus gpu_type dp fsdp tp pp cp ep seq global_batch micro_batch precision recompute "
    "tokens_per_s_per_gpu step_seconds notes"
)
DEEPSEEK = {
    "source": "NVIDIA-NeMo/Megatron-Bridge@067f987 docs/performance-summary.md", "model": "DeepSeekV3", "gpus": "256", "gpu_type": "GB200",
    "tp": "1", "pp": "4", "cp": "1", "ep": "64", "seq": "4096", "global_batch": "4096", "micro_batch": "1", "precision": "MXFP8",
    "tokens_per_s_per_gpu": "4912", "notes": "VP 4",
}  # fmt: skip


def compared(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES.split(), restval="")
        writer.writeheader()
        writer.writerows(rows)
    ran = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "published_runs.py"), str(path), "--json"], capture_output=True,
                         text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=True)  # fmt: skip
    return json.loads(ran.stdout)


def test_a_published_run_of_experts_is_predicted_and_what_cannot_be_expressed_is_said(tmp_path):
    twice = {**DEEPSEEK, "tokens_per_s_per_gpu": "", "step_seconds": str(2 * 4096 * 4096 / 4912 / 256)}  # measured as twice as long
    found = compared(tmp_path / "runs.csv", DEEPSEEK, twice, {**DEEPSEEK, "model": "Nemotron_3_Nano"}, {**DEEPSEEK, "gpu_type": "X9"})
    (row,) = found["sources"].values()
    assert row["n"] == found["rows"] == 2 and sum(found["inexpressible"].values()) == 2
    assert "model Nemotron_3_Nano has no sizes" in found["inexpressible"]
    first = found["rows"] * row["mean"]  # |e| + |(1 + e) / 2 - 1|
    assert 0.3 < first < 0.9 and row["mean"] == pytest.approx(found["mean"])
    assert found["mean_of_means"] == pytest.approx(row["mean"]) and found["unfitted_mean_of_means"] > 0

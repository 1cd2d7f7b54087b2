"""What a user's own run needed: a size, a line of its log, or a memory snapshot of torch; and what that says of the next answers.

    bias = exp(mean of log(measured / predicted)) over the observed runs of a launcher

Only the bias is corrected: how far single runs spread around it is what the launcher's kept runs say. Evidence is a JSON file:
{"torchtitan": [{"figure": "reserved", "measured_bytes": 7.12e10, "predicted_bytes": 6.9e10, "what": "..."}], ...}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cost import peak_of_snapshot

from .fitting import Fitting

# of logs: what the last match is, and in which unit
LINES = (
    (re.compile(r"memory:\s*([\d.]+)\s*GiB\s*\("), "reserved", 2**30, "torchtitan's memory"),
    (re.compile(r"[Pp]eak reserved:\s*([\d.]+)\s*MiB"), "reserved", 2**20, "nanotron's peak reserved"),
    (re.compile(r"max reserved:\s*([\d.]+)"), "reserved", 2**20, "Megatron's max reserved"),
    (re.compile(r"(\d+)MiB\s*/\s*\d+MiB"), "device", 2**20, "nvidia-smi's figure"),
)
# files in the stacks of allocations: the first that one has says its kind
FRAMES = (
    ("optimizer", re.compile(r"torch/optim/|/optimizer")), ("logits", re.compile(r"loss|cross_entropy")),
    ("gathered", re.compile(r"all_gather|reduce_scatter|_fsdp_|flat_param")),
    ("parameters", re.compile(r"nn/init|load_state|init_weights")),
    ("temporaries", re.compile(r"recompute|checkpoint")), ("activations", re.compile(r"forward|nn/modules")),
)  # fmt: skip


@dataclass(frozen=True)
class Observed:
    """Measured bytes of one device at its peak."""

    figure: str  # allocated, reserved (torch's) or device (nvidia-smi's): attributes of Memory
    bytes: float
    what: str
    by_kind: Mapping[str, float] | None = None  # where a snapshot says so

    @staticmethod
    def of_log(text: str, path: str) -> Observed:
        """By the last line of a log that tells memory. ValueError where none does."""
        for pattern, figure, unit, what in LINES:
            if matches := pattern.findall(text):
                return Observed(figure, float(matches[-1]) * unit, f"{what} in {path}")
        known = ", ".join(what for *_, what in LINES)
        raise ValueError(f"{path} has no line that tells memory; expected one of {known}; or write the size: --observed 71.2GB")

    @staticmethod
    def of_snapshot(snapshot: Any, path: str) -> Observed:
        """What a snapshot's first device with segments reserved at most. ValueError for other data."""
        if not isinstance(snapshot, Mapping) or not isinstance(snapshot.get("segments"), list) or not snapshot["segments"]:
            raise ValueError(f"{path} is no memory snapshot; expected the segments of a snapshot that torch dumped")
        by_kind: dict[str, float] = {}
        try:
            reserved, alive = peak_of_snapshot(snapshot, min(segment.get("device", 0) for segment in snapshot["segments"]))
            for size, frames in alive:
                kind = kind_of(frames)
                by_kind[kind] = by_kind.get(kind, 0.0) + size
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no memory snapshot: {error!r}; expected a snapshot that torch dumped") from None
        return Observed("reserved", float(reserved), f"the snapshot {path}", by_kind)

    def beside(self, fitting: Fitting) -> list[dict[str, Any]]:
        """Predicted and measured bytes by kind, the largest difference first; what no stack tells is "unknown"."""
        if fitting.memory is None or self.by_kind is None:
            return []
        predicted = max(fitting.stages(), key=lambda stage: stage["device_bytes"])["bytes_by_kind"]
        kinds = sorted({*predicted, *self.by_kind})
        rows = [{"kind": k, "predicted_bytes": predicted.get(k, 0.0), "measured_bytes": self.by_kind.get(k, 0.0)} for k in kinds]
        return sorted(rows, key=lambda row: -abs(row["measured_bytes"] - row["predicted_bytes"]))


def kind_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Of an allocation with this stack, innermost first; "unknown" without a frame that says it."""
    names = " ".join(f"{frame.get('filename', '')}:{frame.get('name', '')}" for frame in frames)
    return next((kind for kind, pattern in FRAMES if pattern.search(names)), "unknown")


@dataclass(frozen=True)
class Evidence:
    """Observed runs by launcher, as their file has them. ValueError for other data."""

    runs: Mapping[str, list[dict[str, Any]]]
    path: str = "the evidence"

    def __post_init__(self) -> None:
        if not isinstance(self.runs, Mapping) or not all(isinstance(rows, list) for rows in self.runs.values()):
            raise ValueError(f"{self.path} is no evidence; expected a file that autoshard fits --observed --evidence has written")

    def bias(self, launcher: str) -> float:
        """Measured / predicted of a launcher's runs; 1 without any. ValueError for a run without these."""
        try:
            logs = [math.log(row["measured_bytes"] / row["predicted_bytes"]) for row in self.runs.get(launcher, [])]
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{self.path} has a run of {launcher} without measured and predicted bytes: {error!r}; remove it") from None
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    def with_run(self, fitting: Fitting, observed: Observed) -> Evidence:
        """With one more. ValueError where the launch is illegal, or the run can't be of it."""
        if fitting.memory is None:
            raise ValueError(f"the launch is illegal, so nothing can be compared with {observed.what}: {fitting.reasons[0]}")
        predicted = float(getattr(replace(fitting.memory, bias=1.0), observed.figure)[0])
        if not 0.1 < observed.bytes / predicted < 10:
            off = f"{observed.bytes:.3g} bytes and {predicted:.3g} are predicted"
            raise ValueError(f"{observed.what} is {off}; expected a run of this launch")
        row = {"figure": observed.figure, "measured_bytes": observed.bytes, "predicted_bytes": predicted, "what": observed.what}
        return replace(self, runs={**self.runs, fitting.launcher: [*self.runs.get(fitting.launcher, []), row]})

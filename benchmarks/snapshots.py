"""Recorded memory snapshots of CUDA programs: what the simulation of torch's caching allocator reserves for the same allocations.

    PYTHONPATH=. python benchmarks/snapshots.py FOLDER [--json]

FOLDER has files of torch.cuda.memory._dump_snapshot (.pickle, .pkl), of any programs; those without a trace are left out. Each trace is
run again from the segments that it began with, and the peak of reserved bytes compared with the recorded one. The last column is what
expandable segments would have reserved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autoshard.api.observing import MOST_OPCODES
from autoshard.cost import replayed
from autoshard.reading import content_of
from autoshard.solution import unpickled


def compared(path: Path) -> list[dict]:
    """A row per device that has a trace."""
    snapshot = unpickled(content_of(path, "snapshot"), path, "snapshot", {}, MOST_OPCODES)
    rows = []
    for device, trace in enumerate(snapshot.get("device_traces") or [] if isinstance(snapshot, dict) else []):
        if any(entry["action"] == "alloc" for entry in trace):
            expandable = any(segment.get("is_expandable") for segment in snapshot["segments"])
            ours, recorded = replayed(snapshot, device, expandable=expandable)
            other, _ = replayed(snapshot, device, expandable=True)
            row = {"file": path.name, "device": device, "events": len(trace), "recorded": recorded, "simulated": ours.peak_reserved}
            rows.append({**row, "error": ours.peak_reserved / recorded - 1, "expandable": other.peak_reserved})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.rglob("*") if path.suffix in (".pickle", ".pkl"))
    rows = [row for path in paths for row in compared(path)]
    if arguments.json:
        return print(json.dumps({"rows": rows}))
    for row in rows:
        figures = (f"{row[name] / 1e9:8.3f}" for name in ("recorded", "simulated"))
        said = f"GB {row['error']:+.3%}, {row['expandable'] / 1e9:8.3f} GB expandable"
        print(f"{row['file'][:60]:60} {row['events']:7d} events", *figures, said)
    print(f"{len(rows)} traces, {max((abs(row['error']) for row in rows), default=0):.3%} off at most")


if __name__ == "__main__":
    main()

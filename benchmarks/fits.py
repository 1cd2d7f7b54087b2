"""Launches that were published as running or as out of memory: what `autoshard fits` says of them.

    PYTHONPATH=. python benchmarks/fits.py [tests/data/launchers/published_fits.json] [--json]

The table names each launch's source and what its figure means: torch's max_memory_allocated or max_memory_reserved. A launch is answered
rightly that ran and is said to fit (yes or tight), or was out of memory and is said not to.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from autoshard.launch import Launch, LaunchConfig, ModelSizes, Site
from autoshard.launch.fitting import will_fit

TABLE = Path(__file__).parent.parent / "tests" / "data" / "launchers" / "published_fits.json"


def answered(row: dict[str, Any]) -> dict[str, Any]:
    """One launch, with what is said of it."""
    began = time.process_time()
    model = {**row["model"], "latent": tuple(row["model"].get("latent", ()))}
    site = Site(row["device"], memory=row["memory_bytes"])
    answer = will_fit(LaunchConfig(Launch(**row["launch"]), ModelSizes(**model)), row["launcher"], site)
    told = answer.to_dict()
    predicted = None if row["figure"] is None or answer.memory is None else float(getattr(answer.memory, row["figure"])[0])
    return {
        **{key: row[key] for key in ("name", "source", "ran", "figure", "measured_bytes")}, "predicted_bytes": predicted,
        "verdict": told["verdict"], "chance": told["chance_to_fit"], "right": (told["verdict"] != "no") == row["ran"],
        "reasons": told["reasons"], "fullest": told["fullest"], "cpu_seconds": time.process_time() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [answered(row) for row in json.loads(arguments.table.read_text())]
    if arguments.json:
        return print(json.dumps({"rows": rows, "right": sum(row["right"] for row in rows)}))
    for row in rows:
        off = "" if row["measured_bytes"] is None else f"{row['predicted_bytes'] / row['measured_bytes'] - 1:+.1%} of {row['figure']}"
        device = row["fullest"] and f"{row['fullest']['device_bytes'] / 1e9:.1f} GB"
        said = f"{'ran' if row['ran'] else 'OOM':3} {row['verdict']:5} {row['chance']:4.0%} {device or '':9} {off:20}"
        print(said, row["name"], *row["reasons"])
        kinds = {} if row["fullest"] is None else row["fullest"]["bytes_by_kind"]
        print(" " * 14 + ", ".join(f"{kind} {bytes / 1e9:.1f}" for kind, bytes in kinds.items() if bytes))
    print(f"right: {sum(row['right'] for row in rows)} of {len(rows)}; {max(row['cpu_seconds'] for row in rows):.1f} CPU seconds at most")


if __name__ == "__main__":
    main()

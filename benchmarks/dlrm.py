"""DLRM and its tables planned as one, against the two planned apart.

    python benchmarks/dlrm.py [MODEL] [--json] [--meshes 8,2x4,2x8] [--rows 20000000]

MODEL: the file with criteo_dense and criteo_tables (default models/dlrm.py). `apart`: the dense part has all the memory, the tables get
what it leaves. Memory is so small that the tables nearly fill the devices.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # where models/ lies

from autoshard import Mesh, Table, plan_with_tables  # noqa: E402
from autoshard.mesh import parse_shape  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="models/dlrm.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--meshes", default="8,2x4,2x8")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch", type=int, default=8192, help="examples of all devices")
    parser.add_argument("--room", type=float, default=1.1, help="memory of all devices, in times of what the tables weigh")
    options = parser.parse_args(argv)
    spec = importlib.util.spec_from_file_location("model", options.model)
    assert spec is not None and spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    tables = [Table(**record) for record in model.criteo_tables(rows=options.rows)]
    rows = []
    for written in options.meshes.split(","):
        mesh = Mesh.from_bandwidths(parse_shape(written))
        module, inputs = model.criteo_dense(batch=options.batch)
        hbm = options.room * sum(t.bytes + t.state_bytes for t in tables) / mesh.num_devices
        start = time.process_time()
        found = plan_with_tables(module, inputs, "pooled", tables, mesh, hbm=hbm, host_memory=1e12)
        rows.append({"mesh": written, "hbm_bytes": hbm, "cpu_seconds": time.process_time() - start, **found.to_dict()})
    if options.json:
        print(json.dumps({"meshes": rows}))
        return 0
    print(f"{'mesh':6} {'':10} {'step ms':>9} {'dense':>9} {'tables':>9} {'route':>9} {'peak GB':>8} {'limit':>7}  pooled rows, told")
    for row in rows:
        for name, one in (("together", row["together"]), ("apart", row["apart"])):
            if one is None:
                print(f"{row['mesh']:6} {name:10} does not fit")
                continue
            ms = [1e3 * one[key] for key in ("seconds", "dense_seconds", "tables_seconds", "route_seconds")]
            print(f"{row['mesh']:6} {name:10} " + " ".join(f"{x:9.4g}" for x in ms)
                  + f" {one['peak_bytes'] / 1e9:8.3f} {one['limit_bytes'] / 1e9:7.3f}  {one['pooled']}, {one['how']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

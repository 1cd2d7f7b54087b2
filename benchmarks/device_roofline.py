"""Measure this machine's device: matmul and attention by size and dtype, memory bandwidth, launch. Prints one JSON object.

    PYTHONPATH=. python benchmarks/device_roofline.py [--seconds 120] [--out FILE]

Needs torch and numpy only. `rates` are what a roofline takes: FLOP/s of the largest two sizes of each op and dtype, bytes/s of the
largest two copies, seconds per launch, and the mean relative error of max(F / rate, M / memory) + launch over all that was measured.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch


def load_device_rates():
    """autoshard/calibrate/device_rates.py by its path: the package around it imports more than this machine may have."""
    path = Path(__file__).parent.parent / "autoshard" / "calibrate" / "device_rates.py"
    spec = importlib.util.spec_from_file_location("device_rates", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_rates"] = module
    spec.loader.exec_module(module)
    return module


def rate(pairs: list[tuple[float, float]], launch: float) -> float:
    """Work per second of the largest two, the launch left out; as autoshard.calibrate.rates."""
    return statistics.median(work / max(seconds - launch, seconds / 2) for work, seconds in sorted(pairs)[-2:])


def rates(ops: list) -> dict:
    launch = min(one.seconds for one in ops if one.op == "launch")
    memory = rate([(one.bytes, one.seconds) for one in ops if one.op == "memory"], launch)
    kinds = sorted({(one.op, one.dtype) for one in ops if one.flops > 0})
    rows = []
    for kind in kinds:
        members = [one for one in ops if (one.op, one.dtype) == kind]
        flops = rate([(one.flops, one.seconds) for one in members], launch)
        errors = [abs((max(one.flops / flops, one.bytes / memory) + launch) / one.seconds - 1) for one in members]
        rows.append({"op": kind[0], "dtype": kind[1], "flops_per_second": flops, "mean_error": statistics.fmean(errors)})
    return {"launch_seconds": launch, "memory_bytes_per_second": memory, "ops": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="as without: it always prints JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = load_device_rates()
    began = time.perf_counter()
    ops = list(measured.measure_device(device, clock=time.perf_counter, seconds=arguments.seconds))
    record = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - began,
        "rates": rates(ops),
        "ops": [vars(one) for one in ops],
    }
    text = json.dumps(record)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

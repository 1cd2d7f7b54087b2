"""The measurements of a live cluster, converted to a Mesh with curves and to the record of a file.

cluster.json: {"format": "autoshard.cluster/1", "mesh": Mesh.to_dict() (axes with their curves), "measured": the raw seconds,
"roofline": rates and errors by op class and dtype, "device_file": the device as autoshard/cost/devices has it,
"complete": whether the measurement finished, "assumptions": backend, ...}.

The latency and bandwidth of an axis, which price a collective without a curve, come from the alpha-beta fit t = a + x/b of its
all_reduce (else all_gather):  latency = a / (L ceil(log2 n)),  bandwidth = s V (n-1)/n b, the terms of cost/collectives.py, with
s = shared_by = seconds of an all_gather in all groups of the axis at once / in one of them alone, the median over sizes, rounded (1: not
measured).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from autoshard.calibrate.errors import Errors, held_out, pooled, summary
from autoshard.calibrate.fit import alpha_beta, fit
from autoshard.calibrate.rates import OpSample, Roofline, fit_roofline
from autoshard.cost import CLUSTER_FORMAT, COLLECTIVES, EFFICIENCY
from autoshard.devices import LAUNCHES, Device, plain_forms, relative
from autoshard.mesh import Axis, LinkCurve, Mesh, default_axis_names

Times = Mapping[tuple[int, str], Mapping[float, float]]  # (axis, collective) -> size in bytes -> seconds
Alone = Mapping[int, Mapping[float, float]]  # axis -> size in bytes -> seconds of an all_gather in one group, the others idle


def link_curve(collective: str, times: Mapping[float, float]) -> LinkCurve:
    """The default fit with its held-out mean error; in sample where there are too few sizes to hold any out."""
    x, t = np.array(list(times)), np.array(list(times.values()))
    curve = fit(x, t)
    errors = summary(*held_out(x, t, fit)) if len(x) >= 5 else Errors(0.0, 0.0, 0.0, 0)
    return LinkCurve(collective, curve.sizes, curve.times, curve.tail, float(errors.mean))


def sharing(shape: Sequence[int], axis: int, times: Times, alone: Alone) -> int:
    """The number of groups of an axis that share a link: 1 to the number of groups."""
    if not alone.get(axis):
        return 1
    ratio = median(times[axis, "all_gather"][size] / seconds for size, seconds in alone[axis].items())
    return min(max(round(ratio), 1), math.prod(shape) // shape[axis])


def mesh_of(
    shape: Sequence[int], times: Times, device: Device, backend: str, names: Sequence[str] | None = None, alone: Alone | None = None
) -> Mesh:
    """The mesh of a measured cluster. ValueError for an axis without a collective that was measured at two sizes."""
    axes = []
    for k, (n, name) in enumerate(zip(shape, names or default_axis_names(len(shape)))):
        measured = {c: t for (axis, c), t in times.items() if axis == k and len(t) >= 2}
        if n == 1:
            axes.append(Axis(name, n, 1.0, 0.0, backend=backend))
            continue
        if not measured:
            raise ValueError(f"no collective was measured yet on {name}; measure longer")
        reference = next((c for c in ("all_reduce", "all_gather") if c in measured), next(iter(measured)))
        link = alpha_beta(list(measured[reference]), list(measured[reference].values()))
        rounds, volume = COLLECTIVES[reference]
        shared = sharing(shape, k, times, alone or {})
        bandwidth, latency = shared * volume * (n - 1) / n / link.tail, link.times[0] / (rounds * (n - 1).bit_length())
        axes.append(Axis(name, n, bandwidth, latency, shared, backend, tuple(link_curve(c, t) for c, t in measured.items())))
    return Mesh(tuple(axes), device)


def device_of(name: str, roofline: Roofline, memory: float) -> Device:
    """The device whose `op_seconds`, which assume the share EFFICIENCY of its throughput, are the measured seconds."""
    narrow = [rate for (op, dtype), rate in roofline.flops.items() if op == "matmul" and dtype in ("bfloat16", "float16")]
    wide = roofline.flops.get(("matmul", "float32"), max(narrow, default=0.0))
    error = float(pooled(roofline.errors.values()).mean)
    return Device(name, max(narrow, default=wide) / EFFICIENCY, wide / EFFICIENCY, roofline.memory, memory, roofline.launch, error)


def device_file(name: str, samples: Sequence[OpSample], roofline: Roofline, mesh: Mesh) -> dict | None:
    """The measured device in the format of autoshard/cost/devices/*.json; None where no 16-bit matmul was measured.

    The largest rates measured stand for the data sheet's, so that shares of them are 1; what was not measured is as published for an H100.
    Its constants price ops more finely than the rates of the mesh do (mesh.Kernels.of_file).
    """
    dtype = next((dtype for dtype in ("bfloat16", "float16") if ("matmul", dtype) in roofline.flops), None)
    if dtype is None:
        return None
    peak, attention = roofline.flops["matmul", dtype], roofline.flops.get(("attention", dtype))
    inside = mesh.axes[-1]
    given = {
        "peak16": peak, "peak8": peak, "peak4": peak, "memory_bandwidth": roofline.memory, "link_bandwidth": inside.device_bandwidth,
        "memory_bytes": mesh.device.memory,
    }  # fmt: skip
    small = _half_rate([s for s in samples if (s.op, s.dtype) == ("matmul", dtype)], peak, lambda flops: (flops / 2) ** (1 / 3))
    short, share = 512.0, 0.28  # as on an H100, where no attention was measured
    if attention is not None:
        of = [s for s in samples if (s.op, s.dtype) == ("attention", dtype)]
        short, share = _half_rate(of, attention, lambda flops: (flops / (4 * 8 * 64)) ** 0.5), attention / peak
    matmul, _, attended = plain_forms({"matmul": peak, "matmul8": peak, "attention": share * peak}, small, short, roofline.memory)
    forms = {"matmul": matmul, "attention": attended}
    kernels = {kind: {"bfloat16": relative(form, peak, roofline.memory)} for kind, form in forms.items()}
    rates = dict.fromkeys(("training", "memory", "link", "network"), 1.0)
    rates |= {"link_latency": inside.latency, "host": roofline.launch * LAUNCHES}
    constants = {key: {"measured": value, "source": "autoshard calibrate measure"} for key, value in rates.items()}
    measured = {"source": "measured here", **kernels}
    return {"device": name, "given": given, "sheet": "the largest rates measured", "kernels": measured, "constants": constants}


def _half_rate(samples: Sequence[OpSample], rate: float, size_of: Callable[[float], float]) -> float:
    """The size c at which ops reach half of `rate`: t = F / rate (1 + c / size), the median. size_of: of FLOPs, as in device_rates."""
    return max(median((s.seconds * rate / s.flops - 1) * size_of(s.flops) for s in samples), 0.0)


def cluster(
    shape: Sequence[int],
    times: Times,
    samples: Sequence[OpSample],
    *,
    backend: str,
    device: str,
    memory: float,
    complete: bool,
    assumptions: Mapping[str, object],
    alone: Alone | None = None,
) -> dict:
    """The record of a file. alone: without it, no two groups share a link. ValueError where `mesh_of` has too few measurements."""
    roofline = fit_roofline(samples)
    mesh = mesh_of(shape, times, device_of(device, roofline, memory), backend, alone=alone)

    def raw(axis: int, collective: str, t: Mapping[float, float]) -> dict:
        return {"axis": mesh.axes[axis].name, "collective": collective, "sizes": sorted(t), "seconds": [t[x] for x in sorted(t)]}

    rows = [
        {"op": op, "dtype": dtype, "flops_per_second": roofline.flops.get((op, dtype)), "gmae": e.gmae, "mean": e.mean, "samples": e.num}
        for (op, dtype), e in roofline.errors.items()
    ]
    file = device_file(device, samples, roofline, mesh)
    return {
        "format": CLUSTER_FORMAT,
        "complete": complete,
        "mesh": mesh.to_dict(),
        **({} if file is None else {"device_file": file}),
        "roofline": {"memory_bytes_per_second": roofline.memory, "launch_seconds": roofline.launch, "ops": rows},
        "measured": {
            "collectives": [raw(*key, t) for key, t in times.items()],
            "alone": [raw(axis, "all_gather", t) for axis, t in (alone or {}).items()],
            "device": [vars(s) for s in samples],
        },
        "assumptions": dict(assumptions),
    }

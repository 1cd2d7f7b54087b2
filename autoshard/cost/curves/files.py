"""Files of fitted curves, and of measured clusters.

A file of curves is JSON: {"format": "autoshard.curves/1", "curves": [...]}, each with what it is (collective, system, devices, nodes,
dtype, source), its method and parameters in SI units, and its errors (gmae, mean, std, held_out). A file of a cluster is what
`calibrate.cluster.cluster` returns.
"""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.curves.records import Curve
from autoshard.devices import Device, Kernels
from autoshard.mesh import Mesh
from autoshard.reading import data_of
from autoshard.writing import write_json

FORMAT = "autoshard.curves/1"
CLUSTER_FORMAT = "autoshard.cluster/1"


def save(path: str, curves: Sequence[dict]) -> None:
    """Write fitted curves (`calibrate.Fitted.to_dict`) as JSON (docs/formats.md), whole or not at all; OSError where that fails."""
    write_json({"format": FORMAT, "curves": list(curves)}, path, indent=1)


def load(path: str) -> list[tuple[dict, Curve]]:
    """What `save` wrote: (what it is, its curve). ValueError where it is something else."""
    curves = []
    for one in data_of(path, "curves")["curves"]:
        known = one["parameters"]
        curves.append((one, Curve(tuple(known["sizes"]), tuple(known["times"]), known["tail"])))
    return curves


def save_cluster(path: str, record: dict) -> None:
    """Whole or not at all, so that an interruption leaves the last one."""
    write_json(record, path, indent=1)


def load_device(path: str) -> Device:
    """The device that `autoshard calibrate measure` wrote, with the constants of its kernels. ValueError where it is something else."""
    data = data_of(path, "cluster")
    if "device_file" not in data:
        raise ValueError(f"{path} has no constants of its device; expected 16-bit matmuls among its measurements, so measure again")
    rates, given = load_cluster(path).device, data["device_file"]["given"]
    kernels = Kernels.of_file(data["device_file"], path)
    try:
        return replace(rates, flops=given["peak16"], memory_bandwidth=given["memory_bandwidth"], kernels=kernels)
    except KeyError as error:
        raise ValueError(f"{path} does not say {error} of its device; measure again") from None


def load_cluster(path: str) -> Mesh:
    """The mesh that `autoshard calibrate measure` wrote, curves included. ValueError where it is something else."""
    data = data_of(path, "cluster")
    try:
        return Mesh.from_dict(data["mesh"])
    except ValueError as error:
        raise ValueError(f"{path} is no measured cluster: {error}") from None

"""The prices that autoshard ships, per device type: device, links inside a node and between nodes, and measured curves where known.

    measured.json   curves inside one node, fitted (piecewise) to public measurements by benchmarks/fit_presets.py, with the held-out
                    mean error of each; its source and licence are in the file
    ROWS            data sheets: peak throughput, memory, and links at the share of their peak that is usually reached

A price without a measurement gets the usual error of prices of its kind (mesh.UNMEASURED_LINK, UNMEASURED_DEVICE).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autoshard.cost.curves.device_counts import Family
from autoshard.mesh import DEVICES, INTER_LATENCY, INTRA_LATENCY, UNMEASURED_DEVICE, UNMEASURED_LINK, Device, LinkCurve, Mesh
from autoshard.reading import text_of

from ..curves.records import Curve

LINK_SHARE = 0.75  # of a data sheet's link bandwidth, one direction: what large messages reach on the systems measured
# The links of one node to the others: four (of 200 Gbit/s) or eight (of 400 Gbit/s) adapters, 25e9 or 50e9 bytes/s each.
EIGHT_400, EIGHT_200, ONE_100 = 8 * 50e9, 8 * 25e9, 12.5e9

# name: link inside (bytes/s one way), link between nodes, source
ROWS = {
    "a100": (300e9, EIGHT_200, "NVIDIA A100 80GB SXM data sheet"),
    "h100": (450e9, EIGHT_400, "NVIDIA H100 SXM data sheet"),
    "h200": (450e9, EIGHT_400, "NVIDIA H200 SXM data sheet"),
    "b200": (900e9, EIGHT_400, "NVIDIA HGX B200 data sheet"),
    "mi300x": (448e9, EIGHT_400, "AMD Instinct MI300X data sheet"),
    "l40s": (32e9, EIGHT_200, "NVIDIA L40S data sheet"),
    "rtx": (32e9, ONE_100, "NVIDIA GeForce RTX 4090 (Ada white paper)"),
    "cpu": (5e9, ONE_100, "order of magnitude of one core; measure yours"),
}
# Data sheets of devices without a file of constants: FLOP/s dense 16-bit, float32, bytes/s, bytes, TF32.
SHEETS = {
    "l40s": Device("l40s", 362e12, 91.6e12, 0.864e12, 48e9, flops_tf32=183e12),
    "rtx": Device("rtx", 165e12, 82.6e12, 1.008e12, 24e9, flops_tf32=82.6e12),
}


@dataclass(frozen=True)
class MeasuredLink:
    """One collective among `devices` of one node: its curve and its mean relative error on sizes that it was not fitted to."""

    devices: int
    collective: str
    curve: LinkCurve
    error: float


@dataclass(frozen=True)
class Preset:
    name: str
    device: Device
    intra_node_bandwidth: float  # bytes/s of a device to the others of its node
    inter_node_bandwidth: float  # bytes/s of a node to the others
    intra_node_latency: float  # seconds
    inter_node_latency: float
    links: tuple[MeasuredLink, ...]
    source: str
    link_error: float  # mean relative: of the curves on sizes that they were not fitted to, else the usual one
    device_error: float


def all_presets() -> list[Preset]:
    return [preset(name) for name in ROWS]


def preset(name: str) -> Preset:
    """The preset of a name; ValueError for an unknown name."""
    if name not in ROWS:
        raise ValueError(f"no prices are known for {name!r}; known are {', '.join(ROWS)}, or measure: autoshard calibrate measure")
    inside, between, source = ROWS[name]
    device = SHEETS.get(name) or DEVICES[name]
    measured = _measured().get(name, {"links": [], "source": ""})
    links = tuple(_link(row) for row in measured["links"])
    sources = f"{source}; curves: {measured['source']}" if links else source
    link_error = sum(link.error for link in links) / len(links) if links else UNMEASURED_LINK
    device_error = UNMEASURED_DEVICE if device.error is None else device.error
    speeds = inside * LINK_SHARE, between * LINK_SHARE, INTRA_LATENCY, INTER_LATENCY
    bare = Preset(name, device, *speeds, links, sources, link_error, device_error)
    return replace(bare, **measured["alpha_beta"]) if links else bare


def mesh(name: str, shape: Sequence[int], devices_per_node: int | None = None, *, tf32: bool = False) -> Mesh:
    """A cluster of such devices; axes inside a node take the measured curves, between the counts measured where need be."""
    one = preset(name)
    bare = Mesh.from_bandwidths(
        tuple(shape),
        intra_node_bandwidth=one.intra_node_bandwidth,
        inter_node_bandwidth=one.inter_node_bandwidth,
        intra_node_latency=one.intra_node_latency,
        inter_node_latency=one.inter_node_latency,
        device=one.device,
        devices_per_node=devices_per_node,
        tf32=tf32,
    )
    inside = [axis.latency == one.intra_node_latency for axis in bare.axes]
    axes = (replace(axis, curves=_curves(one, axis.size)) if here else axis for axis, here in zip(bare.axes, inside))
    return replace(bare, axes=tuple(axes))


def _curves(one: Preset, n: int) -> tuple[LinkCurve, ...]:
    if n < 2:
        return ()
    link_curves = []
    for collective in dict.fromkeys(link.collective for link in one.links):
        links = [link for link in one.links if link.collective == collective]
        curves = {(1, k.devices): Curve(k.curve.sizes, k.curve.seconds, k.curve.tail) for k in links}
        curve = Family(collective, curves, links[0].curve.sizes).at(n)
        link_curves.append(LinkCurve(collective, curve.sizes, curve.times, curve.tail, max(link.error for link in links)))
    return tuple(link_curves)


def _link(row: dict) -> MeasuredLink:
    curve = LinkCurve(row["collective"], tuple(row["sizes"]), tuple(row["seconds"]), row["tail"], row["error"])
    return MeasuredLink(row["devices"], row["collective"], curve, row["error"])


@cache
def _measured() -> dict:
    return json.loads(text_of(Path(__file__).with_name("measured.json"), "measurements"))

"""Links of a two-level cluster, worked out by hand, and the sentences for meshes that can't be."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from autoshard.mesh import DEVICES, Axis, Device, LinkCurve, Mesh, check_shape, parse_shape
from tests.helpers_refusals import assert_refused, refusals

INTRA, INTER = 300e9, 400e9

# shape, devices per node (None: default) -> per axis (crosses nodes, devices that share the link, bytes/s of one device)
LINKS = [
    ((8,), None, [(False, 1, INTRA)]),
    ((1, 8), None, [(False, 1, INTRA), (False, 1, INTRA)]),
    ((8, 1), None, [(True, 1, INTER), (False, 1, INTRA)]),
    ((2, 4), None, [(True, 4, INTER / 4), (False, 1, INTRA)]),
    ((2, 2, 2), None, [(True, 4, INTER / 4), (False, 1, INTRA), (False, 1, INTRA)]),
    ((2, 4), 8, [(False, 1, INTRA), (False, 1, INTRA)]),
    ((2, 4), 1, [(True, 1, INTER), (True, 1, INTER)]),
    ((4, 4), 4, [(True, 4, INTER / 4), (False, 1, INTRA)]),
    ((2, 2, 2), 2, [(True, 2, INTER / 2), (True, 2, INTER / 2), (False, 1, INTRA)]),
    ((2, 2, 2), 8, [(False, 1, INTRA)] * 3),
    # an axis that starts in a node and leaves it: 2 (1) rings cross the node's link, each device at most as fast as inside
    ((4, 2), 4, [(True, 2, min(INTRA, INTER / 2)), (False, 1, INTRA)]),
    ((8,), 4, [(True, 1, min(INTRA, INTER))]),
]


@pytest.mark.parametrize(("shape", "per_node", "links"), LINKS, ids=[f"{s}-{n}" for s, n, _ in LINKS])
def test_an_axis_has_the_link_that_its_ranks_are_joined_by(shape, per_node, links):
    mesh = Mesh.from_bandwidths(shape, intra_node_bandwidth=INTRA, inter_node_bandwidth=INTER, devices_per_node=per_node)
    slow = [axis.latency == Mesh.from_bandwidths((2, 1)).axes[0].latency for axis in mesh.axes]
    found = [(s, axis.shared_by, axis.device_bandwidth) for s, axis in zip(slow, mesh.axes, strict=True)]
    assert found == [pytest.approx(row) for row in links]


@pytest.mark.parametrize(("shape", "per_node"), [(s, n) for s, n, _ in LINKS], ids=[f"{s}-{n}" for s, n, _ in LINKS])
def test_who_shares_a_link_is_counted_over_nodes(shape, per_node):
    """By definition: the rings of an axis that have a neighbour in another node, per node."""
    mesh = Mesh.from_bandwidths(shape, devices_per_node=per_node)
    per_node = per_node or (math.prod(shape[1:]) if len(shape) > 1 else shape[0])
    rank = {c: r for r, c in enumerate(mesh.coordinates())}
    for k, axis in enumerate(mesh.axes):
        leaving = {  # (node, ring) pairs of which some member sits in another node
            (rank[c] // per_node, c[:k] + c[k + 1 :])
            for c in rank
            for i in range(axis.size)
            if rank[(*c[:k], i, *c[k + 1 :])] // per_node != rank[c] // per_node
        }
        nodes = {node for node, _ in leaving}
        assert axis.shared_by == max((sum(n == node for n, _ in leaving) for node in nodes), default=1)


def test_ranks_are_row_major_as_torch_counts_them():
    mesh = Mesh.from_bandwidths((2, 3, 4))
    ranks = torch.arange(24).reshape(2, 3, 4)
    assert [int(ranks[c]) for c in mesh.coordinates()] == list(range(24))
    assert (mesh.num_devices, mesh.shape, mesh.axis_names) == (24, (2, 3, 4), ("axis0", "axis1", "axis2"))


def slowed_by(slowed, shape=(2,)) -> Mesh:
    data = Mesh.from_bandwidths(shape).to_dict()
    return Mesh.from_dict({**data, "device": {**data["device"], "slowed": slowed}})


BAD = [
    (dict(shape=()), "mesh shape is ()"),
    (dict(shape=(0, 4)), "mesh shape is (0, 4)"),
    (dict(shape=(2, -4)), "mesh shape is (2, -4)"),
    (dict(shape=(2.0, 4)), "mesh shape is (2.0, 4)"),
    (dict(shape=(True, 4)), "mesh shape is (True, 4)"),
    (dict(shape="2x4"), "mesh shape is '2x4'"),
    (dict(shape=None), "mesh shape is None"),
    (dict(shape=(2, 4), intra_node_bandwidth=0), "intra_node_bandwidth is 0;"),
    (dict(shape=(2, 4), intra_node_bandwidth=-1e9), "intra_node_bandwidth is -1000000000.0;"),
    (dict(shape=(2, 4), inter_node_bandwidth=math.nan), "inter_node_bandwidth is nan;"),
    (dict(shape=(2, 4), inter_node_bandwidth=math.inf), "inter_node_bandwidth is inf;"),
    (dict(shape=(2, 4), inter_node_bandwidth="fast"), "inter_node_bandwidth is 'fast';"),
    (dict(shape=(2, 4), inter_node_bandwidth=True), "inter_node_bandwidth is True;"),
    (dict(shape=(2, 4), device="h1000"), "unknown device 'h1000'; known are a100, b200, b300, cpu, gb200, gb300, h100, h100_500w, h100_"),
    (dict(shape=(2, 4), device=3), "device is 3;"),
    (dict(shape=(2, 4), devices_per_node=0), "devices_per_node is 0;"),
    (dict(shape=(2, 4), devices_per_node=-4), "devices_per_node is -4;"),
    (dict(shape=(2, 4), devices_per_node=2.5), "devices_per_node is 2.5;"),
    (dict(shape=(2, 4), axis_names=("a",)), "axis_names ('a',) must be 2 different names"),
    (dict(shape=(2, 4), axis_names=("a", "a")), "axis_names ('a', 'a') must be 2 different names"),
    (dict(shape=(2, 4), backend="mpi"), "backend is 'mpi'; expected nccl or gloo"),
    (dict(shape=(2,) * 8), "mesh 2x2x2x2x2x2x2x2 has 8 axes; expected 5 at most"),
    (dict(shape=(2,) * 9), "mesh 2x2x2x2x2x2x2x2x... has 9 axes; expected 5 at most"),
    (dict(shape=(2, 2**17 + 1)), "mesh 2x131073 has too many devices; expected 262144 at most"),
    (dict(shape=(1, 10**12 - 1)), "mesh 1x999999999999 has too many devices"),
    (dict(shape=(1, 10**12)), "mesh 1x1e+12 has too many devices"),
    (dict(shape=(1, 10**400)), "mesh 1x1e+300 has too many devices"),
    (dict(shape=(2, 4), intra_node_latency=-1e-6), "intra_node_latency is -1e-06;"),
]
NO_SHAPE = ["", "x", "2x", "2xx4", "-2x4", "2.5x4", "twox4", "2x\N{SUPERSCRIPT TWO}"]
NO_SLOWED = [-0.1, 0.6, "a", math.nan]
NO_MESH = [{}, {"axes": []}, {"axes": [{"name": "a"}], "device": {}}, {"axes": "ab", "device": {}}, [], {"axes": 3}, None]
test_a_mesh_that_cannot_be_is_one_sentence = refusals(
    *((partial(Mesh.from_bandwidths, **arguments), "^" + re.escape(sentence)) for arguments, sentence in BAD),
    *((partial(parse_shape, text), "mesh is .*; expected sizes joined by x") for text in NO_SHAPE),
    (lambda: parse_shape("0x4"), "mesh shape is"),
    *((partial(Mesh.from_dict, data), "^not a mesh: ") for data in NO_MESH),
    *((partial(slowed_by, slowed), "^slowed of the device is .*; expected a number of 0 to 1/2, ") for slowed in NO_SLOWED),
    (partial(slowed_by, 0.34, (2, 2, 2)), "^slowed of the device is 0.34; expected a number of 0 to 1/3, with 3 axes$"),
    (lambda: Mesh.from_bandwidths((2,), device=replace(DEVICES["h100"], slowed=0.6)), "^slowed of the device is 0.6; "),
)


def test_what_slows_kernels_beside_collectives_is_of_the_device_or_else_of_its_kernels():
    assert [slowed_by(slowed).device.beside for slowed in (0.0, 0.3, None)] == [0.0, 0.3, DEVICES["h100"].kernels.slowed]
    assert Device("mine", 1e12, 5e11, 1e12, 16e9).beside == 0.0


@pytest.mark.parametrize(("text", "shape"), [("2x4", (2, 4)), ("8", (8,)), ("2 x 2 X 2", (2, 2, 2)), ("2,4", (2, 4)), ("2*4", (2, 4))])
def test_a_shape_is_read(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize(
    "device", [*DEVICES, Device("mine", 1e12, 5e11, 1e12, 16e9), replace(DEVICES["h100"], slowed=0.0, error=0.0)], ids=str
)
def test_a_mesh_survives_its_dict(shape, device):
    mesh = Mesh.from_bandwidths(shape, device=device, backend="gloo")
    assert Mesh.from_dict(mesh.to_dict()) == mesh
    assert Mesh.from_dict(json.loads(json.dumps(mesh.to_dict()))) == mesh


def test_a_curve_in_a_file_is_one_of_floats_and_without_an_error_where_it_has_none():
    mesh = Mesh((Axis("data", 2, 1e9, 0.0),), DEVICES["h100"])
    for curve, error in (({"error": 1}, 1.0), ({}, 0.0)):
        one = {"collective": "all_gather", "sizes": [0, 1], "seconds": [2, 2], "tail": 0, **curve}
        read = Mesh.from_dict({**mesh.to_dict(), "axes": [{**mesh.to_dict()["axes"][0], "curves": [one]}]})
        assert repr(read.axes[0].curves) == repr((LinkCurve("all_gather", (0.0, 1.0), (2.0, 2.0), 0.0, error),))


def test_device_files_are_read_when_their_device_is_asked_for():
    """The room of devices is loaded by every command; files are opened by those that name a device."""
    code = """
import sys, autoshard.reading
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and str(args[0]).endswith(".json") else None)
from autoshard.mesh import DEVICES, Mesh
assert "h100" in list(DEVICES) and len(DEVICES) == len(set(DEVICES)) and "h1000" not in DEVICES and opened == []
assert DEVICES["h100"] is Mesh.from_bandwidths((2,)).device and [path.rpartition("/")[2] for path in opened] == ["h100.json"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_wider_types_run_slower():
    h100 = DEVICES["h100"]
    assert [h100.flops_for(size) for size in (1, 2, 4, 8)] == [h100.flops, h100.flops, h100.flops32, h100.flops32]


@pytest.mark.parametrize("device", list(DEVICES.values()), ids=list(DEVICES))
def test_float32_matmuls_are_tf32_only_where_that_is_said(device):
    """As torch runs them: convolutions in TF32 by default, matmuls not, and no other type ever."""
    assert not device.tf32 and device.flops_for(4) == device.flops32
    assert device.flops_for(4, convolution=True) == (device.flops_tf32 or device.flops32)
    if device.flops_tf32 is None:
        assert_refused(f"device {device.name} has no TF32 rate; leave tf32 out", device.with_tf32)
        return
    told = Mesh.from_bandwidths((2,), device=device, tf32=True)
    assert told.device.flops_for(4) == device.flops_tf32 > 1.5 * device.flops32
    assert [told.device.flops_for(size) for size in (1, 2, 8)] == [device.flops_for(size) for size in (1, 2, 8)]
    assert Mesh.from_dict(told.to_dict()) == told and told.to_dict()["device"]["tf32"] is True
    assert "tf32" not in Mesh.from_bandwidths((2,), device=device).to_dict()["device"]


def test_a_mesh_is_a_value():
    assert Mesh.from_bandwidths((2, 4)) == Mesh.from_bandwidths((2, 4))
    assert len({Mesh.from_bandwidths((2, 4)), Mesh.from_bandwidths((2, 4)), Mesh.from_bandwidths((4, 2))}) == 2
    assert Axis("a", 2, 100.0, 0.0, shared_by=4).device_bandwidth == 25.0


def test_a_number_is_a_mesh_of_one_axis():
    assert check_shape(8) == (8,) and check_shape((2, 2**17)) == (2, 2**17) and check_shape((2,) * 5) == (2,) * 5


@pytest.mark.parametrize("names", [("", "b"), ("a", "a")])
def test_each_axis_has_a_name_of_its_own(names):
    with pytest.raises(ValueError, match="expected a name of its own for each"):
        Mesh(tuple(Axis(name, 2, 1e9, 1e-6) for name in names), Device("mine", 1e12, 5e11, 1e12, 16e9))

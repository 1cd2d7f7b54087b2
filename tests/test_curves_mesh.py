"""Measured curves on a mesh: they replace latency and bandwidth, and travel with the mesh."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost import bytes_sent, collective_seconds
from autoshard.mesh import LinkCurve, Mesh

CURVE = LinkCurve("all_gather", (1e3, 1e6), (1e-4, 2e-3), 2e-9, 0.05)


def measured_mesh():
    mesh = Mesh.from_bandwidths((2, 4))
    return replace(mesh, axes=(replace(mesh.axes[0], curves=(CURVE,)), mesh.axes[1]))


def test_a_measured_collective_takes_its_curve():
    axis = measured_mesh().axes[0]
    # constant below, half way between the two, the tail above
    expected = [(1.0, 1e-4), (1e3, 1e-4), ((1e3 + 1e6) / 2, 1.05e-3), (1e6, 2e-3), (3e6, 2e-3 + 2e6 * 2e-9)]
    for size, seconds in expected:
        assert collective_seconds("all_gather", axis, size) == pytest.approx(seconds)
    np.testing.assert_allclose(collective_seconds("all_gather", axis, np.array([size for size, _ in expected])), [t for _, t in expected])
    assert collective_seconds("all_gather", axis, 0.0) == 0.0
    assert bytes_sent("all_gather", axis, 1e6) == 5e5  # a curve says nothing about bytes


def test_the_others_take_latency_and_bandwidth():
    with_curve, without = measured_mesh().axes[0], Mesh.from_bandwidths((2, 4)).axes[0]
    assert collective_seconds("all_reduce", with_curve, 1e6) == collective_seconds("all_reduce", without, 1e6)
    alone = replace(with_curve, size=1)
    assert collective_seconds("all_gather", alone, 1e6) == 0.0


def test_curves_travel_with_the_mesh():
    mesh = measured_mesh()
    assert Mesh.from_dict(mesh.to_dict()) == mesh
    assert Mesh.from_dict(json.loads(json.dumps(mesh.to_dict()))) == mesh
    assert "curves" not in mesh.to_dict()["axes"][1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sizes": [1e6, 1e3]}, "both in order"),
        ({"sizes": [1e3]}, "1 sizes, 2 times"),
        ({"seconds": [1e-4, float("nan")]}, "something other than numbers"),
        ({"tail": -1.0}, "something other than numbers"),
        ({"bandwidth": 1.0}, "not a mesh"),
    ],
)
def test_a_curve_that_can_not_be_is_refused(change, sentence):
    data = measured_mesh().to_dict()
    data["axes"][0]["curves"] = [{**data["axes"][0]["curves"][0], **change}]
    with pytest.raises(ValueError, match=sentence):
        Mesh.from_dict(data)

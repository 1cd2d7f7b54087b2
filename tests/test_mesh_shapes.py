"""All meshes of so many devices: which there are, and that the best of their plans is taken."""

import json
import math
from itertools import product

import pytest

import autoshard
from autoshard.cost.curves import save_cluster
from autoshard.mesh import Mesh
from autoshard.planning.mesh_shapes import mesh_shapes, plan_meshes
from autoshard.planning.options import Infeasible
from models import mlp
from tests.helpers_command import refusal, run
from tests.helpers_refusals import refusals
from tests.test_calibrate import record

TINY, MLP = (f"{mlp.__file__}:{name}" for name in ("tiny", "mlp"))
MODEL = {"batch": 256, "width": 512, "hidden": 2048, "layers": 1}


def meshes_of(devices: int, per_node: int = 8) -> list[Mesh]:
    return [Mesh.from_bandwidths(shape, devices_per_node=per_node) for shape in mesh_shapes(devices, per_node)]


SHAPES = [
    (16, 8, [(16,), (2, 8), (2, 2, 4), (2, 4, 2), (1,)]),
    (16, 4, [(16,), (4, 4), (2, 2, 4), (4, 2, 2), (1,)]),
    (8, 8, [(8,), (2, 4), (4, 2), (2, 2, 2), (1,)]),
    (12, 6, [(12,), (2, 6), (2, 2, 3), (2, 3, 2), (1,)]),
    (6, 8, [(6,), (2, 3), (3, 2), (1,)]),
    (1, 8, [(1,)]),
]


@pytest.mark.parametrize(("devices", "per_node", "shapes"), SHAPES)
def test_the_shapes(devices, per_node, shapes):
    assert mesh_shapes(devices, per_node) == shapes


@pytest.mark.parametrize(("devices", "per_node"), [(16, 8), (32, 8), (24, 4), (8, 2), (9, 3)])
def test_the_shapes_are_all_that_respect_the_nodes(devices, per_node):
    """Every product of one to three sizes, where each axis ends inside its node or begins at a node's boundary."""
    expected = {(devices,), (1,)}
    for count in (1, 2, 3):
        for shape in product(range(2, devices + 1), repeat=count):
            strides = [math.prod(shape[k + 1 :]) for k in range(count)]
            inside = all(stride * n <= per_node or stride >= per_node for stride, n in zip(strides, shape))
            if math.prod(shape) == devices and inside and any(stride == per_node for stride in [*strides, devices]):
                expected.add(shape)
    found = mesh_shapes(devices, per_node)
    assert set(found) == expected and len(found) == len(expected)


def pinned(**options):
    return plan_meshes(*mlp.tiny(), meshes_of(8), **options)


NO_LIST = "meshes holds no mesh, or something else; expected a list of autoshard.Mesh"
test_what_is_no_question_about_meshes_is_one_sentence = refusals(
    (lambda: mesh_shapes(0), "^devices is 0; expected a positive whole number$"),
    (lambda: mesh_shapes(True), "^devices is True; expected a positive whole number$"),
    (lambda: mesh_shapes(16, 0), "^devices_per_node is 0; expected a positive whole number$"),
    (lambda: mesh_shapes(10**9), "^devices is 1000000000; expected 262144 at most: make the cluster smaller$"),
    (lambda: mesh_shapes(12), "^12 devices do not fill nodes of 8; give devices_per_node a divisor of 12, for example 4$"),
    (lambda: plan_meshes(*mlp.tiny(), []), f"^{NO_LIST}"),
    (lambda: plan_meshes(*mlp.tiny(), [(2, 4)]), f"^{NO_LIST}"),
    (
        lambda: pinned(pins={"layers.0.up.weight": "R,R,R,R"}),
        "^the layouts of pins have 4 placements, but no mesh has 4 axes; pin for one mesh, on that mesh$",
    ),
    (
        lambda: pinned(pins={"layers.*.up.weight": "*,S(0)"}, forbid={"*.bias": "R"}),
        "^layouts of pins have 1 and 2 placements; give all as many, one per mesh axis$",
    ),
)


def test_each_mesh_is_planned_as_alone_and_the_best_is_taken():
    said: list[str] = []
    given = {"training": True, "baselines": False, "objective": "serial"}
    found = plan_meshes(*mlp.mlp(**MODEL), meshes_of(4, 2), progress=lambda what, fraction: said.append(f"{fraction:.2f} {what}"), **given)
    alone = [autoshard.plan(*mlp.mlp(**MODEL), mesh, **given) for mesh in meshes_of(4, 2)]
    assert [plan.solution.cost for plan in found.plans] == [plan.cost for plan in alone]
    assert [plan.solution.layouts for plan in found.plans] == [plan.layouts for plan in alone]
    assert found.best.cost == min(plan.cost for plan in alone) < alone[0].cost
    rows = found.to_dicts()
    assert [row["mesh"] for row in rows] == ["4", "2x2", "1"]
    costs = [row["cost_seconds"] for row in rows]
    assert [k for k, row in enumerate(rows) if row["best"]] == [costs.index(min(costs))]
    assert all(row["status"] == "optimal" and row["gap"] <= 1e-9 and row["peak_bytes"] > 0 and row["cpu_seconds"] > 0 for row in rows)
    assert [line.split()[0] for line in said] == sorted(line.split()[0] for line in said)
    assert all(any(f"mesh {name}, {k + 1} of 3: solving" in line for line in said) for k, name in enumerate(row["mesh"] for row in rows))


def test_meshes_of_equal_cost_leave_the_first():
    found = plan_meshes(*mlp.tiny(layers=1), meshes_of(4), baselines=False, objective="serial")  # nothing is worth cutting
    assert len({plan.solution.cost for plan in found.plans}) == 1 and found.best is found.plans[0].solution


def test_a_limit_that_some_meshes_meet():
    given = {"baselines": False, "objective": "serial"}
    free = plan_meshes(*mlp.tiny(layers=1), meshes_of(4), **given)
    limit = 0.5 * free.plans[-1].solution.peak_bytes
    rows = plan_meshes(*mlp.tiny(layers=1), meshes_of(4), memory_limit=limit, **given).to_dicts()
    assert [row["status"] for row in rows] == ["optimal", "optimal", "infeasible"]
    assert rows[-1]["smallest_limit_bytes"][0] > limit and rows[-1]["message"].startswith("no plan fits in ") and not rows[-1]["best"]
    with pytest.raises(Infeasible, match="^no plan on any of 3 meshes; nearest is (4|2x2): no plan fits in ") as caught:
        plan_meshes(*mlp.tiny(layers=1), meshes_of(4), memory_limit=1000.0, **given)
    assert caught.value.smallest_limit[0] > 1000.0 and [d.kind for d in caught.value.conflict] == ["memory_limit"]


def test_pins_leave_the_meshes_of_as_many_axes():
    found = pinned(pins={"layers.*.up.weight": "*,S(0)"}, baselines=False)
    assert [row["status"] == "skipped" for row in found.to_dicts()] == [True, False, False, True, True]
    assert found.to_dicts()[0]["message"] == "the layouts of pins have 2 placements"
    assert found.best.parameters["layers.0.up.weight"]["layout"].endswith(",S(0)")


# -- the command line ---------------------------------------------------------------------------------------------------------------------


def test_auto_on_the_command_line(tmp_path):
    path = str(tmp_path / "best.json")
    words = ["plan", MLP, "--mesh", "auto", "--devices", "4", "--devices-per-node", "2", "--train", "--no-baselines"]
    words += ["--objective", "serial"]
    code, out, err = run(*words, "--json", "--out", path)
    found = json.loads(out)
    assert code == 0 and [row["mesh"] for row in found["meshes"]] == ["4", "2x2", "1"] and f"wrote {path}" in err
    (best,) = [row for row in found["meshes"] if row["best"]]
    assert best["cost_seconds"] == found["cost_seconds"] == autoshard.load(path).cost == min(row["cost_seconds"] for row in found["meshes"])
    assert best["mesh"] == "x".join(map(str, found["mesh"]["shape"]))
    code, out, _ = run(*words, "--quiet")
    assert code == 0 and out.startswith("Meshes compared") and "2x2" in out and max(map(len, out.splitlines())) <= 100


BAD_WORDS = [
    (("--mesh", "auto"), "--mesh auto compares the meshes of how many devices? Add for example --devices 16"),
    (("--mesh", "2x2", "--devices", "4"), "--devices 4 is for --mesh auto, the mesh here is 2x2; leave one out"),
    (("--mesh", "auto", "--devices", "0"), "--devices is 0; expected a whole number of 1 or more"),
    (("--mesh", "auto", "--devices", "12", "--devices-per-node", "5"), "12 devices do not fill nodes of 5"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD_WORDS, ids=[" ".join(words) for words, _ in BAD_WORDS])
def test_bad_words_are_refused_in_one_sentence(words, sentence):
    assert sentence in refusal("plan", TINY, *words)


def test_a_measured_cluster_is_of_one_mesh(tmp_path):
    path = str(tmp_path / "cluster.json")
    save_cluster(path, record())
    sentence = refusal("plan", TINY, "--mesh", "auto", "--devices", "4", "--cluster", path)
    assert "--mesh auto compares meshes, but --cluster and --keep are for one" in sentence


def test_a_limit_that_no_mesh_meets_is_the_answer_no():
    words = ("plan", TINY, "--mesh", "auto", "--devices", "2", "--memory", "1kB", "--no-baselines", "--quiet")
    code, out, err = run(*words, "--json")
    found = json.loads(out)
    assert code == 1 and found["status"] == "infeasible" and found["conflict"][0]["kind"] == "memory_limit"
    assert err == f"autoshard: {found['message']}\n" and found["smallest_limit_bytes"][0] > 1000

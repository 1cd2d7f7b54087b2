"""What the models of benchmarks/kinds found, each as a product of lists; and that they are what they are said to be."""

import pytest
import torch
from torch import nn

from autoshard.capture import module as capturing
from autoshard.mesh import Mesh
from benchmarks import coverage, kinds, trained_steps
from benchmarks.strangers import STRANGERS, build
from tests.helpers_models import Model, right_plan

FAST = Mesh.from_bandwidths((2,), intra_node_bandwidth=1e14, intra_node_latency=1e-9)
ADDED = {name: row for name, row in STRANGERS.items() if row.kind}


def test_there_are_60_models_and_more_of_every_kind():
    assert len(ADDED) >= 60 and {row.kind for row in ADDED.values()} == set(kinds.__all__)
    assert sum(True in row.modes and not row.draws for row in ADDED.values()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), [(name, mode) for name, row in ADDED.items() for mode in row.modes])
def test_a_plan_and_a_random_layout_are_right(name, training):
    module, inputs = build(name, training)
    mesh = Mesh.from_bandwidths((2, 2), **trained_steps.FAST)
    assert right_plan(module, inputs, mesh, training=training, gap=0.01, random=1).replicated_ops == ()


# -- matrices that are factored -----------------------------------------------------------------------------------------------------


DETERMINANTS = {"det": torch.linalg.det, "slogdet": lambda matrix: torch.linalg.slogdet(matrix)[1]}
COLUMNS = {"parameter": lambda w, x: w, "view": lambda w, x: w.mT, "result": lambda w, x: (w.mT * x).mT}


def determined(of, columns, batch):
    """A determinant of a matrix whose columns are dense, because the parameter's are or because it is a view."""
    torch.manual_seed(0)
    weight = torch.randn(*batch, 4, 4) + 2 * torch.eye(4)
    weight = nn.Parameter(weight.mT.contiguous().mT if columns == "parameter" else weight)
    return Model(lambda m, x: (DETERMINANTS[of](COLUMNS[columns](m.weight, x)) * x).sum(), weight=weight)


@pytest.mark.parametrize("batch", [(), (4,)], ids=["one", "batch"])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("of", DETERMINANTS)
def test_the_gradient_of_a_determinant_is_right_whatever_the_strides(of, columns, batch):
    right_plan(determined(of, columns, batch), (torch.tensor(1.5),), FAST, training=True, random=1)


def test_a_backward_for_other_strides_is_found(monkeypatch):
    """The negative control: factors of the transpose, and a backward that solves with those of the matrix."""
    monkeypatch.setattr(capturing, "with_dense_factors", lambda traced: None)
    with pytest.raises(AssertionError, match="'ok': False"):
        right_plan(determined("slogdet", "parameter", ()), (torch.tensor(1.5),), FAST, training=True, random=1)


# -- values at the border of a domain -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_at_the_end_of_their_domain_are_verified(label):
    model = Model(lambda m, x, label: nn.functional.binary_cross_entropy(m.linear(x).sigmoid(), label), linear=nn.Linear(8, 8))
    right_plan(model, (torch.randn(4, 8), torch.full((4, 8), label)), FAST, training=True, random=1)


# -- forward mode -------------------------------------------------------------------------------------------------------------------


def along(m, x, v):
    """The derivative of a net along a direction, part of which is a constant."""
    value, slope = torch.func.jvp(lambda x: torch.cat([m.net(x), torch.ones_like(x[:, :1])], -1), (x,), (v,))
    return value.square().mean() + slope.square().mean()


def test_a_derivative_in_forward_mode_has_rows_and_is_right():
    model = Model(along, net=nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 4)))
    assert right_plan(model, (torch.randn(4, 8), torch.randn(4, 8)), FAST, training=True, random=1).replicated_ops == ()


# -- steps on ranks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_are_trained_on_ranks_as_in_one_process():
    rows = trained_steps.trained(["vae_given_noise", "lora_qv", "moco"])
    assert [row["verdict"] for row in rows] == ["ok"] * 3, rows
    assert all(row["sharded"] for row in rows)


@pytest.mark.slow
def test_a_model_that_is_not_captured_is_a_row_and_the_others_go_on():
    rows = trained_steps.trained(["lazy_linear", "made"])
    assert [row["verdict"] for row in rows] == ["not capturable", "ok"]
    assert coverage.train(["made"], as_json=True) == 0

"""DLRM and its tables on the same devices."""

import pytest

from autoshard import Mesh, Table, plan_with_tables
from models import dlrm


@pytest.mark.slow  # five plans of the dense part
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_planned_together_is_no_slower_than_planned_apart(shape):
    mesh, tables = Mesh.from_bandwidths(shape), [Table(**record) for record in dlrm.tiny_tables(rows=1000)]
    module, inputs = dlrm.tiny_dense()
    found = plan_with_tables(module, inputs, "pooled", tables, mesh, hbm=1e6, effort=0.05)
    assert found.apart is not None and found.best.seconds <= found.apart.seconds and len(found.tried) > 1
    for one in found.tried:
        assert one.peak_bytes <= 1e6 and set(one.tables.tables) == {t.name for t in tables}
        assert (one.route_seconds == 0) == (one.pooled == ",".join(["S(0)"] * len(shape)))


def test_an_input_that_the_model_lacks_is_an_error():
    module, inputs = dlrm.tiny_dense()
    with pytest.raises(ValueError, match="the model has no input 'rows'; its inputs are numbers, pooled, clicks"):
        plan_with_tables(module, inputs, "rows", [Table("t")], Mesh.from_bandwidths((4,)), hbm=1e6)


def test_the_dense_part_computes_what_the_whole_model_does():
    import torch

    torch.manual_seed(0)
    whole, dense = dlrm.DLRM((5, 6), 3, 4, (8,), (8,)), dlrm.Dense(2, 3, 4, (8,), (8,))
    dense.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("emb_l")})
    numbers, ids = torch.randn(7, 3), torch.randint(0, 5, (2, 7, 2))
    pooled = torch.stack([table(ids[t]) for t, table in enumerate(whole.emb_l)], dim=1)
    assert torch.equal(whole(numbers, ids), dense(numbers, pooled))

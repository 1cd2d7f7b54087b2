"""torch's own simulator runs the same rank programs and agrees."""

import pytest

from autoshard import Mesh
from autoshard.api import plan, verify
from models import gpt2, llama, mlp

LONGER = [pytest.param(build, marks=pytest.mark.slow) for build in (gpt2.tiny, llama.tiny)]


@pytest.mark.parametrize("build", [mlp.tiny, *LONGER], ids=["mlp", "gpt2", "llama"])
def test_local_tensor_mode_computes_what_the_module_computes(build):
    model, inputs = build()
    solution = plan(model, inputs, Mesh.from_bandwidths((2, 2), device="cpu"), training=True, baselines=False)
    found = verify(model, inputs, solution, random=1, local_tensor_mode=True)
    assert found["ok"]
    assert all(row["max_relative_error_gradients"] <= 1e-5 for row in found["plans"])
    assert found["plans"][1]["redistributes"] > 0  # the drawn layouts move tensors

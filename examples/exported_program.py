"""An exported program, as an inference compiler receives it: read from its file, sharded, and checked on simulated ranks.

    python examples/exported_program.py

The file holds a graph of ATen ops, weights and a signature, and no Python code of the model. Every tensor node of the annotated graph has
a DTensorSpec in `node.meta["autoshard"]`; the solution says the same by name.
"""

import tempfile
from pathlib import Path

import torch
from torch.export import ExportedProgram

import autoshard
from models import gpt2

TOKENS = torch.arange(8 * 32).reshape(8, 32) % 128


def exported(path: Path) -> ExportedProgram:
    model = gpt2.GPT2(layers=2, heads=4, width=64, positions=32, vocab=128).eval()
    torch.export.save(torch.export.export(model, (TOKENS,)), path)
    return torch.export.load(path)


def local_shapes(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor on rank 0, whose parts are the largest."""
    shapes = {}
    for node in program.graph.nodes:
        spec = node.meta.get("autoshard")
        if spec is not None and not isinstance(spec, tuple):
            shape = list(spec.shape)
            for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
                if placement.is_shard():
                    shape[placement.dim] = -(-shape[placement.dim] // size)
            shapes[node.name] = tuple(shape)
    return shapes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        program = exported(Path(folder) / "gpt2.pt2")
    module = program.module()
    program, info = autoshard.autosharding_pass(program, mesh_shape=(2, 2))
    print(f"{info['status']}: {info['cost_seconds']:.3g} s per call, proven at least {info['bound_seconds']:.3g} s")
    for name, shape in local_shapes(program).items():
        print(f"{name:>40} {shape}")
    print("verified:", autoshard.verify(module, (TOKENS,), info["solution"])["ok"])

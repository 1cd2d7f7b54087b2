"""The kernels and collectives of a transformer's block and of its ends, from captured graphs, with sizes as letters.

    PYTHONPATH=. python benchmarks/captured_blocks.py [--write]

Families: llama (gated MLP, RMSNorm, rotary positions, grouped queries), qwen3 (llama with queries and keys normalized) and gpt2 (MLP of
two matrices, LayerNorm, biases), each under the layouts of Megatron with and without sequence parallelism, as libraries fuse it or not;
and as a compiler does, with what it computes again in the backward pass (a norm not where its result is gathered, which compilers keep),
also of blocks that are recomputed, whose backward holds all of that. Every size of the captured model is a prime of its own, times the
number of devices where devices divide it, so each dim of each tensor is a product of sizes in one way only. --write: into
autoshard/launch/captured; without it, exit 1 where a file differs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from operator import gt
from typing import Any

from autoshard.baselines import baseline
from autoshard.capture import capture_deep
from autoshard.devices import DEVICE_FILES
from autoshard.formulate import with_pins
from autoshard.formulate.build import worked_shapes
from autoshard.graph import Graph, checkpointed, recompute_ops
from autoshard.layout import local_shape
from autoshard.mesh import Mesh
from autoshard.planning.baselining import masks_of
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Options, Stopwatch, checked_options
from autoshard.planning.question import ModelGraphs, Question
from autoshard.simulate.tasks import program_of
from autoshard.solvers import solve
from autoshard.strategies import computed_again, fused, internal_passes, share_of_flops
from autoshard.strategies.fusion import MATMULS
from models import gpt2, llama

T, LAYERS = 7, 3  # devices, blocks
# letters of the files: microbatch, tokens of a sequence, width, heads and those of keys, width of a head, of the MLP, vocabulary
SIZES = {"b": 11, "s": 13 * T, "h": 17 * T, "g": 5, "k": 19 * T, "d": 2 * 23, "f": 29 * T, "v": 31 * T}
PRIMES = {letter: max(p for p in (5, 11, 13, 17, 19, 23, 29, 31) if size % p == 0) for letter, size in SIZES.items()}
OUT = DEVICE_FILES.parent.parent / "launch" / "captured"
SCHEMES = ("megatron", "megatron_sp")


def monomial(number: Fraction | int) -> str:
    """A size as letters: "3*g*k*d/t"; t the number of devices."""
    left, letters = Fraction(number), []
    if not left:
        return "0"
    for letter, prime in PRIMES.items():
        while left.numerator % prime == 0:
            left /= SIZES[letter]
            letters.append(letter)
    shards = 0
    while left.denominator % T == 0:
        left, shards = left * T, shards + 1
    while left.numerator % T == 0:
        left, shards = left / T, shards - 1
    parts = ([] if left == 1 and letters else [str(left)]) + letters
    return "*".join(parts) + "/t" * shards + "*t" * -shards


def tensor(shape: tuple[int, ...], dtype: str) -> str:
    return ", ".join(monomial(n) for n in shape) + ": " + dtype


def models() -> dict[str, Any]:
    n = SIZES["g"] * SIZES["k"]
    common: dict[str, Any] = {
        "layers": LAYERS, "heads": n, "width": SIZES["h"], "vocab": SIZES["v"], "batch": SIZES["b"], "seq": SIZES["s"], "loss": True,
        "dtype": "bfloat16", "hidden": SIZES["f"], "head_width": SIZES["d"],
    }  # fmt: skip
    of_llama = {name: llama.build(kv_heads=SIZES["k"], qk_norm=name == "qwen3", **common) for name in ("llama", "qwen3")}
    return {**of_llama, "gpt2": gpt2.build(positions=SIZES["s"], **common)}


def captured(model: Any, inputs: Any) -> dict[str, list]:
    """By the names of files, without the family."""
    graph, _ = capture_deep(model, inputs, training=True)
    mesh = Mesh.from_bandwidths((T,), devices_per_node=T, device="h100")
    rows = {}
    for scheme in SCHEMES:
        rows[scheme] = tasks(graph, scheme, mesh, UNPARTITIONED)
        for kind, one in ("compiled", graph), ("recomputed", checkpointed(graph, LAYERS)):
            compiled = recompute_ops(one, computed_again(one, "" if scheme == "megatron" else "norms"))
            rows[f"{scheme}_{kind}"] = tasks(compiled, scheme, mesh, {kind: fused})
    return rows


def norms_fused(graph: Graph) -> Graph:
    ops = fused(graph, within_modules=True).ops
    return replace(graph, ops=tuple(replace(op, fused=None) if op.module.endswith("mlp") else op for op in ops))


UNPARTITIONED = {"fused": fused, "library": partial(fused, within_modules=True), "norms": norms_fused}


def tasks(graph: Graph, scheme: str, mesh: Mesh, grouped: dict[str, Callable[[Graph], Graph]]) -> list[dict[str, Any]]:
    options = checked_options(Options, {"training": True, "master_weights": True})
    instance = instance_of(Question(ModelGraphs(graph), mesh, options, Stopwatch(None)))
    pinned = with_pins(instance.formulated, masks_of(instance.formulated, baseline(graph, mesh, instance.formulated.candidates, scheme)))
    choice = solve(replace(pinned, usage_limit=None), gap=1e-4, time_limit=20.0).choice
    program, part = program_of(instance.formulated, choice), parts(graph)
    kinds = {kind: of(graph).ops for kind, of in grouped.items()}
    own_part = None if grouped is UNPARTITIONED else part
    number: dict[int, int] = {}
    rows: list[dict[str, Any]] = []
    for at, task in enumerate(program.tasks):
        if task.phase == "update" or not part[task.op]:
            continue
        op = graph.ops[task.op]
        after = [number[j] for j in task.after if j in number]
        row: dict[str, Any] = {"part": part[task.op], "after": [j for j in after if rows[j]["part"] == part[task.op]]}
        if task.kind == "compute" and program.of_op[task.op][0] == at:
            candidate, tensors = instance.formulated.candidate(task.op, choice), graph.input_tensors(task.op)
            ins = zip(worked_shapes(op, tensors, candidate.inputs, mesh), tensors, strict=True)
            outs = zip(op.outputs, candidate.outputs, strict=True)
            row |= {
                "op": op.target, "in": [tensor(shape, t.dtype) for shape, t in ins],
                "out": [None if t is None or layout is None else tensor(local_shape(t.shape, layout, mesh), t.dtype) for t, layout in outs],
                "share": share_of_flops(op, tensors, candidate.inputs, mesh), "kept": is_kept(graph, task.op, own_part),
            }  # fmt: skip
            if passes := internal_passes(op, tensors, candidate.inputs, mesh):
                row["passes"] = passes // (4 * math.prod(local_shape(tensors[0].shape, candidate.inputs[0], mesh)))
            for kind, ops in kinds.items():
                if (group := ops[task.op].fused) is not None and op.target not in MATMULS:
                    row[kind] = [list(group.reads), list(group.writes), group.launches]
                    if kind == "recomputed" and any(map(gt, group.held, group.writes)):  # in memory, though no kernel writes it
                        row[kind].append(list(group.held))
        elif task.bytes:
            size = Fraction(task.bytes).limit_denominator(10**6) * T / (T - 1) / (2 if task.kind == "all_reduce" else 1)
            row |= {"collective": task.kind, "bytes": monomial(size)}
        else:
            continue  # a split
        number[at] = len(rows)
        rows.append(row)
    return rows


def is_kept(graph: Graph, i: int, part: list[str] | None) -> bool:
    """Whether the backward reads what a forward op computes; with parts, that of its own part."""
    readers = [a for k, t in enumerate(graph.ops[i].outputs) if t is not None for a in users(graph, (i, k)) if graph.ops[a].backward]
    return not graph.ops[i].backward and any(part is None or part[a].split()[1:] == part[i].split()[1:] for a in readers)


def users(graph: Graph, value: tuple[int, int]) -> list[int]:
    """The ops that read a value or a view of it."""
    found = []
    for a, k in graph.users.get(value, ()):
        found.append(a)
        if graph.ops[a].alias == k:
            found += [b for o in range(len(graph.ops[a].outputs)) for b in users(graph, (a, o))]
    return found


def parts(graph: Graph) -> list[str]:
    """Of each op: of the second of three blocks, of the ends, or of another block (an empty name)."""
    names, layer = [], -1  # -1: the ends
    for op in graph.ops:
        if op.module:
            layer = int(op.module.split(".")[1]) if op.module.startswith(("layers.", "h.")) else -1
        direction = "backward" if op.backward else "forward"
        names.append({-1: f"{direction} ends", 1: f"{direction} block"}.get(layer, ""))
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    for family, (model, inputs) in models().items():
        for scheme, rows in captured(model, inputs).items():
            print(family, scheme, len(rows), "tasks")
            text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
            path = OUT / f"{family}_{scheme}.json"
            if arguments.write:
                OUT.mkdir(exist_ok=True)
                path.write_text(text)
            elif path.read_text() != text:
                raise SystemExit(f"{path.name} is not what is captured now; run with --write")


if __name__ == "__main__":
    main()

"""Prices of single kernels against measured ones: matmuls, attention, latent attention and experts, on every kind of device.

    PYTHONPATH=. python benchmarks/kernels.py DIR [--json] [--kept-away]    DIR: gemm, attention, decode, mla, moe.csv[.gz]; those it has
    PYTHONPATH=. python benchmarks/kernels.py DIR --fit [KIND ...] [--write]    constants of device files, from three quarters of the shapes

Prints per device, kind and dtype the median of |predicted / measured - 1| over shapes of 512 tokens or more, and the 90th percentile. A
decode (attention of one query to so many tokens) has the constants of attention.
--kept-away: of those shapes alone that --fit doesn't see, a quarter by their hash; all measurements of a shape are in one part.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from autoshard.cost import attention_seconds, decode_seconds, experts_seconds, matmul_seconds, presets
from autoshard.devices import (
    DEVICE_FILES,
    Amount,
    AttentionKernel,
    ExpertsKernel,
    MatmulKernel,
    device_file,
    kernel_form,
    known_devices,
)

SOURCE = "ai-dynamo/aiconfigurator, commit 095f58a (Apache-2.0): newest vllm and trtllm collections, three quarters of the shapes"
OURS = {
    "a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300",
    "rtx_pro_6000_server": "rtx_pro_6000",
}  # fmt: skip
FEWEST_TOKENS = 512
MOST_ROWS = 10000  # of a fit
ROBUST = 0.02  # relative errors beyond count by their size, not its square
Columns = Mapping[str, np.ndarray]


Bounds = tuple[float, float, float]  # where a fit begins, the least and the most


@dataclass(frozen=True)
class Kind:
    """A kind of kernel."""

    file: str
    shape: tuple[str, ...]  # columns that make a shape
    tokens: Callable[[Columns], np.ndarray]
    form: type
    fields: Mapping[str, Bounds]  # of `form` that are fitted; the others are the data sheet's and the dtype's
    seconds: Callable[[Columns, Any], np.ndarray]
    constants: str = ""  # whose it has, where it has none of its own


def of_matmul(c: Columns, form: MatmulKernel) -> np.ndarray:
    return matmul_seconds(c["m"], c["k"], c["n"], form)


def of_attention(c: Columns, form: AttentionKernel) -> np.ndarray:
    b, s, h, g, d = (c[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim"))
    return attention_seconds(b * h * s * s / 2, s, 2 * d, 2 * b * s * d * (2 * h + 2 * g), form)


def of_decode(c: Columns, form: AttentionKernel) -> np.ndarray:
    b, s, h, g, d = (c[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim"))
    return decode_seconds(b * h * s, b * g, 2 * d, 4 * b * d * (g * s + h), form)


@dataclass(frozen=True)
class LatentAttentionKernel(AttentionKernel):
    """Multi-head latent attention: its bytes miss the cache where they are more than that holds."""

    cache: Amount = math.inf  # bytes
    beyond: Amount = math.inf  # bytes/s of those that miss it, beside the scores


def latent_attention_seconds(scores: Amount, keys: Amount, dims: Amount, moved: Amount, of: LatentAttentionKernel) -> Amount:
    """As `attention_seconds`, with c its seconds without launch and M:

    missed    M min(max(2 (M / cache - 1), 0), 1)
    t         launch + sqrt( c^2 + (missed / beyond)^2 ) + M / bandwidth
    """
    computing = attention_seconds(scores, keys, dims, 0.0, replace(of, launch=0.0))
    missed = moved * np.clip(2 * (moved / of.cache - 1), 0.0, 1.0)
    return of.launch + np.hypot(computing, missed / of.beyond) + moved / of.bandwidth


def of_latent_attention(c: Columns, form: LatentAttentionKernel) -> np.ndarray:
    """Scores of 128 + 64 dims, values of 128, a latent of 512 + 64; heads are those of a rank."""
    b, s, h = (c[name] for name in ("batch", "seq", "heads"))
    return latent_attention_seconds(b * h * s * s / 2, s, 192 + 128, 2 * b * s * (h * (2 * 192 + 3 * 128) + 576), form)


def of_experts(c: Columns, form: ExpertsKernel) -> np.ndarray:
    """Those of the fullest rank. Nemotron 3 (hidden size 2688, or 22 experts per token) has no gate, so two matrices rather than three."""
    matrices = np.where((c["hidden"] == 2688) | (c["topk"] == 22), 2, 3)
    rows, experts = loads(c)
    return experts_seconds(rows, experts, c["tokens"] * c["topk"], c["hidden"], c["inter"] / c["tp"], matrices, form)


def loads(c: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the fullest rank's experts, and how many of them have any: the collector draws an expert's share as x^-alpha."""
    names = ("tokens", "experts", "topk", "ep")
    alpha = np.array([float(text.split("_")[-1]) if text.startswith("power_law_") else 0.0 for text in c["distribution"].tolist()])
    keys, where = np.unique(np.stack([*(c[name] for name in names), alpha], axis=1), axis=0, return_inverse=True)
    return tuple(np.array([load(*key) for key in keys.tolist()])[where.ravel()].T)  # type: ignore[return-value]


@cache
def load(tokens: float, experts: float, topk: float, ranks: float, alpha: float, draws: int = 20) -> tuple[float, float]:
    pairs, of_rank = tokens * topk, experts / ranks
    if alpha == 0:
        return pairs / ranks, min(of_rank, pairs / ranks)
    rng = np.random.default_rng(int(tokens * 7919 + experts * 31 + topk * 7 + ranks))
    low, high = (1.0, tokens * 0.8) if pairs > experts else (0.01, 2.0)
    x = ((high ** (1 - alpha) - low ** (1 - alpha)) * rng.random((draws, int(experts))) + low ** (1 - alpha)) ** (1 / (1 - alpha))
    x = np.round(np.minimum(x / x.sum(1, keepdims=True) * pairs, tokens)).reshape(draws, int(ranks), -1)
    fullest = x[np.arange(draws), x.sum(2).argmax(1)]
    return float(fullest.sum(1).mean()), float((fullest >= 1).sum(1).mean())


NO_RULE = (("l40s", "fp8"), ("rtx_pro_6000", "fp8"))  # attention whose rate at a head dim tells nothing of others
LAUNCH: Bounds = (1e-5, 1e-7, 1e-3)
OF_ATTENTION: Mapping[str, Bounds] = {
    "rate": (0.6, 0.05, 3.0), "exponentials": (3e13, 1e11, 1e14), "short": (500, 1, 8000), "tail": (0.5, 1e-3, 10),
    "bandwidth": (0.7, 0.1, 20), "launch": LAUNCH,
}  # fmt: skip
KINDS = {
    "matmul": Kind(
        "gemm", ("m", "n", "k"), lambda c: c["m"], MatmulKernel,
        {"rate": (0.8, 0.1, 1.2), "deep": (64, 1, 2000), "waves": (0.7, 0.01, 1.0), "tiles": (5.0, 1.0, 100.0), "split": (2e-6, 1e-7, 1e-4),
         "heat": (0.1, 1e-3, 1.0), "warm": (1e-3, 1e-5, 1e-1), "bandwidth": (1.0, 0.2, 20.0), "beyond": (0.85, 0.5, 1.0),
         "cast": (1.0, 1e-3, 50.0),
         "launch": (3e-6, 1e-7, 1e-3)}, of_matmul,
    ),
    "attention": Kind(
        "attention", ("batch", "seq", "heads", "kv_heads", "head_dim"), lambda c: c["batch"] * c["seq"], AttentionKernel, OF_ATTENTION,
        of_attention,
    ),
    "decode": Kind(
        "decode", ("batch", "seq", "heads", "kv_heads", "head_dim"), lambda c: np.full(len(c["seq"]), FEWEST_TOKENS), AttentionKernel, {},
        of_decode, "attention",
    ),
    "mla": Kind(
        "mla", ("heads", "batch", "seq"), lambda c: c["batch"] * c["seq"], LatentAttentionKernel,
        OF_ATTENTION | {"beyond": (0.5, 0.1, 3.0)}, of_latent_attention,
    ),
    "experts": Kind(
        "moe", ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep", "distribution"), lambda c: c["tokens"], ExpertsKernel,
        {"rate": (0.4, 0.05, 1.5), "narrow": (64, 0.1, 5000), "bandwidth": (0.7, 0.1, 5.0), "others": (0.2, 1e-4, 10.0),
         "dense": (0.05, 1e-3, 1.0), "launch": (3e-5, 1e-7, 1e-2)}, of_experts,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    columns: Columns
    seconds: np.ndarray
    kept_away: np.ndarray

    def __getitem__(self, mask: np.ndarray) -> Table:
        return Table({key: column[mask] for key, column in self.columns.items()}, self.seconds[mask], self.kept_away[mask])


def read(directory: Path, kind: Kind) -> Table | None:
    path = next((p for p in (directory / f"{kind.file}.csv.gz", directory / f"{kind.file}.csv") if p.exists()), None)
    if path is None:
        return None
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        reader = csv.reader(file)
        names, rows = next(reader), list(zip(*reader))
    if missing := {"gpu", "dtype", "ms", *kind.shape} - set(names):
        raise SystemExit(f"{path} lacks {', '.join(sorted(missing))}; expected the columns that shared tables of kernels have")
    texts = dict(zip(names, rows))
    columns = {name: np.array(column) if name in ("gpu", "framework", "dtype", "distribution") else np.array(column, float)
               for name, column in texts.items() if name != "ms"}  # fmt: skip
    columns["gpu"] = np.array([OURS.get(name, name) for name in texts["gpu"]])
    hashes = np.array([zlib.crc32(" ".join(shape).encode()) for shape in zip(*(texts[name] for name in kind.shape))])
    return Table(columns, np.array(texts["ms"], float) / 1e3, hashes % 4 == 0)


def constants_of(name: str, gpu: str, dtype: str) -> Mapping[str, float] | None:
    """Those of a device file; None where it has none."""
    return device_file(gpu).get("kernels", {}).get(name, {}).get(dtype) if gpu in known_devices() else None


def predicted(kind: Kind, table: Table, gpu: str, dtype: str, constants: Mapping[str, float]) -> np.ndarray:
    """vllm's kernels take `vllm` times as long as others, and are `vllm heat` times as much slower where they are long: they were measured
    on cooler devices."""
    of_vllm, form = table.columns["framework"] == "vllm", kernel_form(kind.form, device_file(gpu)["given"], dtype, constants)
    if "vllm heat" in constants:
        form = replace(form, heat=form.heat * np.where(of_vllm, constants["vllm heat"], 1.0))
    if kind.seconds is of_decode:  # as in a plan
        form = replace(form, bandwidth=max(form.bandwidth, presets.mesh(gpu, (1,)).device.memory_rate))
    return kind.seconds(table.columns, form) * np.where(of_vllm, constants["vllm"], 1.0)


def fitted(kind: Kind, table: Table, gpu: str, dtype: str) -> dict[str, float]:
    """The constants whose robust sum of squared logarithms of predicted / measured is least."""
    fields = dict(kind.fields)
    if len(set(table.columns["framework"].tolist())) > 1:
        fields |= {"vllm": (1.0, 0.1, 10.0)} | ({"vllm heat": (0.5, 1e-3, 10.0)} if "heat" in fields else {})
    if kind.form is MatmulKernel and dtype == "fp8_block":  # measured with the host's seconds, and a kernel that pads rows
        fields |= {"host": (1e-4, 1e-6, 1e-3), "padding": (5e-5, 1e-7, 1e-3)}
    if dtype == "bfloat16":
        fields.pop("cast", None)
    if kind.form is AttentionKernel and (gpu, dtype) in NO_RULE:
        fields |= {f"dim {d:g}": (1.0, 0.1, 10.0) for d in np.unique(table.columns["head_dim"])}
    few = table[np.random.default_rng(0).permutation(len(table.seconds))[:MOST_ROWS]]
    low, high = (np.log([row[i] for row in fields.values()]) for i in (1, 2))

    def constants(x: np.ndarray) -> dict[str, float]:
        return {**({"cast": 0.0} if "cast" in kind.fields else {}), "vllm": 1.0, **dict(zip(fields, np.exp(x).tolist()))}

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log(predicted(kind, few, gpu, dtype, constants(x)) / few.seconds)

    x = np.clip(np.log([row[0] for row in fields.values()]), low + 1e-6, high - 1e-6)
    for _ in range(2):
        x = least_squares(residuals, x, bounds=(low, high), loss="soft_l1", f_scale=ROBUST, max_nfev=60, diff_step=1e-3).x
    return {name: float(f"{value:.4g}") for name, value in constants(x).items()}


def figures(error: np.ndarray) -> dict[str, float]:
    size = np.abs(error)
    return {"rows": len(error), "median": float(np.median(size)), "p90": float(np.quantile(size, 0.9)), "bias": float(np.median(error))}


def cells(directory: Path, kinds: Iterable[str] = tuple(KINDS)) -> Iterator[tuple[str, Kind, str, str, Table]]:
    """Per kind, device and dtype the rows of enough tokens."""
    for name, kind in ((name, KINDS[name]) for name in kinds):
        if table := read(directory, kind):
            table = table[kind.tokens(table.columns) >= FEWEST_TOKENS]
            of = np.char.add(np.char.add(table.columns["gpu"], " "), table.columns["dtype"])
            for cell in sorted(set(of.tolist())):
                yield name, kind, *cell.split(), table[of == cell]


def fit(directory: Path, kinds: list[str], write: bool) -> None:
    for name, kind, gpu, dtype, table in cells(directory, [name for name in kinds if KINDS[name].fields]):
        if gpu not in known_devices():
            print(f"{name} {gpu}: no device file")
            continue
        constants = fitted(kind, table[~table.kept_away], gpu, dtype)
        kept = table[table.kept_away]
        error = figures(predicted(kind, kept, gpu, dtype, constants) / kept.seconds - 1)
        sizes = f"{error['rows']:6} {100 * error['median']:5.1f} {100 * error['p90']:5.1f}"
        print(f"{name:9} {gpu:13} {dtype:10} {sizes}  {constants}", flush=True)
        if write:
            path = DEVICE_FILES / f"{gpu}.json"
            data = json.loads(path.read_text())
            kernels = data.setdefault("kernels", {"source": SOURCE})
            kernels.setdefault(name, {})[dtype] = constants | {"error": float(f"{error['median']:.3g}")}
            path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kept-away", action="store_true")
    parser.add_argument("--fit", nargs="*", metavar="KIND", choices=[*KINDS, []])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.fit is not None:
        return fit(arguments.directory, arguments.fit or list(KINDS), arguments.write)
    rows = []
    for name, kind, gpu, dtype, table in cells(arguments.directory):
        part, known = table[table.kept_away] if arguments.kept_away else table, constants_of(kind.constants or name, gpu, dtype)
        if len(part.seconds):
            error: dict = {"rows": len(part.seconds), "median": None}
            if known is not None:
                error = figures(predicted(kind, part, gpu, dtype, known) / part.seconds - 1)
            rows.append({"device": gpu, "kind": name, "dtype": dtype, **error})
    if arguments.json:
        return print(json.dumps(rows, indent=1))
    for row in rows:
        error = "no constants" if row["median"] is None else f"{100 * row['median']:6.1f} {100 * row['p90']:6.1f} {100 * row['bias']:6.1f}"
        print(f"{row['kind']:9} {row['device']:13} {row['dtype']:10} {row['rows']:7} {error}")


if __name__ == "__main__":
    main()

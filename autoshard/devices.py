"""Kinds of devices: what their data sheets say, and what kernels reach of it. SI units.

A kernel's seconds are a formula of its shape (cost/measured_kernels.py) with constants of the device and the dtype; the constants stand in
cost/devices/NAME.json, each with its source, and are records here, which a plan keeps with its mesh.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from autoshard.reading import text_of


@dataclass(frozen=True)
class TestedSteps:
    """How far off prices were on published training steps that they were not fitted to: measured / predicted seconds."""

    devices: str  # on which kinds of devices
    runs: int
    error: float  # median of |predicted / measured - 1|
    low: float  # 80 % of the measured steps took between low and high times the predicted seconds
    high: float


KNOWN_FROM = ("measured", "fitted", "published")  # figures of a constant in a device file, the first that it has counts


Amount = Any  # a number, or an array of them: one entry per run


@dataclass(frozen=True)
class MatmulKernel:
    """Matmuls of one dtype on one kind of device; or columns, one entry per run."""

    rate: Amount  # FLOP/s of full waves of the largest tiles
    deep: Amount  # of k: what a tile's begin and end take
    waves: Amount  # 0 to 1
    small: Amount  # how much slower a tile is per halving; of older constants
    split: Amount  # seconds to add up the parts of a split k
    heat: Amount  # how much slower a warm device is
    bandwidth: Amount  # bytes/s of reads and writes, cached ones among them
    cast: Amount  # bytes per element of the left matrix, where it is cast to the dtype first
    launch: Amount  # seconds
    multiprocessors: Amount
    cache: Amount  # bytes of the last level
    memory_bandwidth: Amount  # bytes/s of those that miss the cache
    itemsize: Amount  # bytes of an element of the matrices; the result has two
    warm: Amount = 1e-3  # seconds after which a device is half as warm as it gets
    unaligned: Amount = 1.0  # how much longer matmuls take whose rows have an odd number of elements
    loads: Amount = 0.0  # seconds per byte of the matrices that tiles load
    host: Amount = 0.0  # seconds in which the host launches it, where it was measured so
    padding: Amount = 0.0  # that it takes more where m is no multiple of 4


@dataclass(frozen=True)
class AttentionKernel:
    """Fused causal attention, forward, of one dtype on one kind of device."""

    rate: Amount  # FLOP/s of the products, beside the exponentials
    exponentials: Amount  # per second
    short: Amount  # of the keys: what a tile's begin takes
    tail: Amount  # of the longest tile: how much of it is waited for
    bandwidth: Amount
    launch: Amount
    multiprocessors: Amount
    combine: Amount = 0.0  # seconds per part of the keys of a decode's head, which a second kernel adds up one after the other
    wide: Amount = 1.0  # how much longer heads of more than WIDE dims take
    by_dims: tuple[tuple[float, float], ...] = ()  # of kernels that follow no rule: head dims, and the rate there relative to `rate`


@dataclass(frozen=True)
class ExpertsKernel:
    """Fused experts, forward, of one dtype on one kind of device."""

    rate: Amount
    narrow: Amount  # of the hidden size inside: what a tile's begin and end take
    bandwidth: Amount
    others: Amount  # of the pairs that are routed: how much is moved where their expert is elsewhere
    dense: Amount  # 0 to 1: how many of those pairs are computed, too
    launch: Amount
    memory_bandwidth: Amount
    itemsize: Amount  # bytes of an element of the weights


PEAKS = {"bfloat16": "peak16", "fp8": "peak8", "fp8_block": "peak8", "nvfp4": "peak4"}
ITEMSIZE = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}  # nvfp4 with a scale of 8 bits per 16 elements


def kernel_form(form: type, sheet: Mapping[str, float], dtype: str, constants: Mapping[str, float]) -> Any:
    """A form with the constants of a device file, whose rates are shares of the data sheet's. Attention's are of 16 bits in every dtype."""
    peak = sheet["peak16" if issubclass(form, AttentionKernel) else PEAKS[dtype]]
    bandwidth = sheet["memory_bandwidth"]
    misses = {"memory_bandwidth": constants.get("beyond", 1.0) * bandwidth, "loads": 1 / (constants.get("tiles", math.inf) * bandwidth)}
    known: dict[str, Any] = {**sheet, "itemsize": ITEMSIZE[dtype], "small": 0.0, **misses, **constants}
    dims = tuple((float(name.split()[1]), value) for name, value in constants.items() if name.startswith("dim "))
    moved = {name: constants[name] * bandwidth for name in ("bandwidth", "beyond") if name in constants}
    unaligned = sheet.get("unaligned", 1.0) if ITEMSIZE[dtype] == 2 else 1.0
    known |= {"by_dims": dims, "rate": constants["rate"] * peak, **moved, "unaligned": unaligned}
    return form(**{field.name: known[field.name] for field in fields(form) if field.name in known})


@dataclass(frozen=True)
class Kernels:
    """What kernels reach on a device, by which cost/compute.py prices an op: constants of cost/devices."""

    source: str  # the file, and what its constants were measured on
    matmul: MatmulKernel  # of 16-bit matrices
    matmul8: MatmulKernel  # of float8 ones
    attention: AttentionKernel  # of 16 bits, as torch runs it
    memory: float  # share of the memory bandwidth
    host: float  # seconds in which the host launches one kernel, beside the kernels that run; 0 where a graph of kernels is replayed
    norms: float = 0.0  # bytes/s of softmax and norms that are kernels of their own, of which multiprocessors do too much; 0: as others
    slowed: float = 0.0  # how much longer kernels and collectives take beside each other, of the shorter one
    serial: TestedSteps | None = None  # of the seconds of a plan, in which nothing overlaps
    overlapped: TestedSteps | None = None  # of its simulated time line

    @staticmethod
    def of_file(data: Mapping[str, Any], name: str) -> Kernels:
        """The constants of a device file (cost/devices): measured where it has them, else fitted, else published. ValueError for others."""
        try:
            of = constants_of(data["constants"])
            if "kernels" not in data:  # measured by an older version: two constants per kind of kernel
                sheet = data["given"]
                rates = {"matmul": sheet["peak16"] * of["matmul16"], "matmul8": sheet["peak8"] * of["matmul8"]}
                rates["attention"] = sheet["peak16"] * of["attention"]
                plain = plain_forms(rates, of["small"], of["short"], sheet["memory_bandwidth"] * of["memory"])
                return Kernels(f"{name}: measured", *plain, of["memory"], of["host"] / LAUNCHES, slowed=SLOWED)
            rows, steps = data.get("fitted_rows", 0), data.get("steps", {})
            said = f"{name}: kernels of {data['kernels']['source'].split(',')[0]}"
            said += f"; fitted to {rows} published training steps" if rows else ""
            matmul, matmul8, attention = (kernels_of_file(data, *kernel) for kernel in FORMS.values())
            memory = data["given"]["memory_bandwidth"] * of["memory"]
            matmul, matmul8 = (in_program(form, min(form.bandwidth, memory), of["training"]) for form in (matmul, matmul8))
            matmul8 = replace(matmul8, cast=0.0, launch=matmul.launch)  # graphs have ops that cast
            sdpa = data["given"].get("sdpa", 1.0)  # own measurements are of what torch runs
            attention = replace(slower(attention, of["training"] * sdpa), wide=data["given"].get("flash2", sdpa) / sdpa)
            tested: dict[str, Any] = {kind: TestedSteps(**errors) for kind, errors in steps.items()}
            norms = NORMS * data["given"].get("multiprocessors", 0)
            return Kernels(said, matmul, matmul8, attention, of["memory"], of["host"] / LAUNCHES, norms, SLOWED, **tested)
        except (KeyError, TypeError, AttributeError, StopIteration, ZeroDivisionError) as error:
            lacks = "a figure above 0" if isinstance(error, ZeroDivisionError) else str(error) or "a figure"
            raise ValueError(f"{name} is no device file, for lack of {lacks}; expected one as autoshard/cost/devices has them") from None

    @staticmethod
    def of_dict(data: Mapping[str, Any], device: Mapping[str, Any]) -> Kernels:
        """As meshes keep them. Those of files that know two constants per kind of kernel are read as `rate` and what short ones take."""
        known: dict[str, Any] = {kind: TestedSteps(**data[kind]) for kind in ("serial", "overlapped") if data.get(kind) is not None}
        if "small" not in data:
            known |= {name: form(**data[name]) for name, (form, _) in FORMS.items()}
            return Kernels(**{**data, **known, "attention": replace(known["attention"], by_dims=())})
        rates = {kind: data[kind] * device["flops"] for kind in ("matmul", "attention")} | {"matmul8": data["flops8"]}
        forms = plain_forms(rates, data["small"], data["short"], device["memory_bandwidth"] * data["memory"])
        return Kernels(data["source"], *forms, data["memory"], data["host"], **known)


FORMS: dict[str, tuple[type, str]] = {  # of plans: their kinds and dtypes
    "matmul": (MatmulKernel, "bfloat16"),
    "matmul8": (MatmulKernel, "fp8"),
    "attention": (AttentionKernel, "bfloat16"),
}
NORMS = 1.66e12 / 132  # bytes/s per multiprocessor of torch's softmax and layer norm, 1.1 to 2.5 TB/s of an H200: docs/gpu.md
WIDE = 128  # cuDNN's kernel, where torch takes it, is for heads of at most so many dims; then FlashAttention-2 runs


def in_program(matmul: MatmulKernel, bandwidth: Amount, training: Amount) -> MatmulKernel:
    """As in a program: other kernels have been in the caches since its weights were read, and clocks are lower than of a kernel alone.
    bandwidth: bytes/s, of memory at most. training: how much longer that takes."""
    slower = {"rate": matmul.rate / training, "loads": matmul.loads * training}
    return replace(matmul, **slower, bandwidth=bandwidth, memory_bandwidth=bandwidth, cache=0.0 * bandwidth)


def slower(attention: AttentionKernel, by: Amount) -> AttentionKernel:
    """Attention that takes `by` times as long for its scores."""
    return replace(attention, rate=attention.rate / by, exponentials=attention.exponentials / by)


def plain_forms(
    rates: Mapping[str, float], small: float, short: float, bandwidth: float
) -> tuple[MatmulKernel, MatmulKernel, AttentionKernel]:
    """Of kernels that take their FLOPs at a rate, longer by small / k or short / keys: of which no more was measured."""
    matmul = MatmulKernel(
        rates["matmul"], small, waves=0.0, small=0.0, split=0.0, heat=0.0, bandwidth=bandwidth, cast=0.0, launch=0.0, multiprocessors=1.0,
        cache=0.0, memory_bandwidth=bandwidth, itemsize=2.0,
    )  # fmt: skip
    attention = AttentionKernel(rates["attention"], 1e30, short, tail=0.0, bandwidth=bandwidth, launch=0.0, multiprocessors=1.0)
    return matmul, replace(matmul, rate=rates["matmul8"], itemsize=1.0), attention


def relative(form: Any, peak: float, memory_bandwidth: float) -> dict[str, float]:
    """The constants of a form as device files have them: `kernel_form`'s inverse."""
    shares = {"rate": form.rate / peak, "bandwidth": form.bandwidth / memory_bandwidth}
    return {**{key: value for key, value in asdict(form).items() if key not in ("by_dims", "itemsize")}, **shares}


KINDS = {MatmulKernel: "matmul", AttentionKernel: "attention", ExpertsKernel: "experts"}  # of kernels: their names in the files
DTYPES = ("nvfp4", "fp8", "bfloat16")  # narrowest first; the last is that of all 16-bit ones


def kernels_of_file(file: Mapping[str, Any], form: type, dtype: str) -> Any:
    """The form of a device file's kernels of a dtype; one without kernels of its own runs as the next wider one.

    KeyError where the file has none.
    """
    kernels = file["kernels"]
    known = (device_file(kernels["as"])["kernels"] if "as" in kernels else kernels)[KINDS[form]]
    wider = DTYPES.index(dtype.removesuffix("_block")) if dtype.removesuffix("_block") in DTYPES else -1
    of_dtype = next((name for name in (dtype, *DTYPES[wider:]) if name in known), "bfloat16")
    return kernel_form(form, file["given"], of_dtype, known[of_dtype])


def constants_of(constants: Mapping[str, Mapping[str, Any]], known_from: Sequence[str] = KNOWN_FROM) -> dict[str, float]:
    """The constants of a device file by name, each the first figure of `known_from` that it has."""
    return {key: next(one[kind] for kind in known_from if kind in one) for key, one in constants.items()}


# They share multiprocessors, memory bandwidth and power. On an H100 steps take 0.17 to 0.22 of the seconds longer in which collectives run
# beside their kernels (docs/gpu.md), models on A100, H100 and MI250 0.19 in the mean (arXiv 2507.03114).
SLOWED = 0.2
# Launches in the forward and backward of a block, of which constants of devices hold the seconds: 250 are assumed there.
LAUNCHES = 250


@dataclass(frozen=True)
class Device:
    """What one device can do. `flops` is dense 16-bit matmul throughput; wider types run slower (`flops_for`).

    TF32 rounds float32 operands of a matmul to 10 bits of mantissa and runs on tensor cores. torch uses it for convolutions, but for
    matmuls only after `torch.set_float32_matmul_precision("high")`; `tf32=True` prices a program that does so.
    """

    name: str
    flops: float  # FLOP/s, bfloat16, dense
    flops32: float  # FLOP/s, float32 inputs at full precision: what torch's matmuls run at by default
    memory_bandwidth: float  # bytes/s
    memory: float  # bytes
    launch: float = 4e-6  # seconds per kernel: a typical launch of CUDA; not used with `kernels`, which know the host's
    error: float | None = None  # mean relative error of its op times, where they were measured
    flops_tf32: float | None = None  # FLOP/s, float32 inputs as TF32, dense; None: it has no such units
    tf32: bool = False  # float32 matmuls run as TF32, too
    host_bandwidth: float | None = None  # bytes/s to its host's memory, one direction; None: that of its kind (cost.host_bandwidth)
    kernels: Kernels | None = None  # without them, ops reach one assumed share of every peak (cost/compute.py)
    slowed: float | None = None  # see `beside`; None: as `kernels` say

    @property
    def beside(self) -> float:
        """s: a seconds of kernels and b of collectives take max(a, b) + s min(a, b) beside each other."""
        return self.slowed if self.slowed is not None else self.kernels.slowed if self.kernels is not None else 0.0

    @property
    def memory_rate(self) -> float:
        """Bytes/s that kernels reach."""
        return self.memory_bandwidth * (1.0 if self.kernels is None else self.kernels.memory)

    def flops_for(self, itemsize: int, *, convolution: bool = False) -> float:
        """FLOP/s of a matmul, or of a convolution, whose first input has elements of so many bytes."""
        if itemsize == 4 and self.flops_tf32 is not None and (self.tf32 or convolution):
            return self.flops_tf32
        return self.flops if itemsize <= 2 else self.flops32

    def with_tf32(self) -> Device:
        """The same device running float32 matmuls as TF32. ValueError where it has no units for it."""
        if self.flops_tf32 is None:
            raise ValueError(f"device {self.name} has no TF32 rate; leave tf32 out, or give a Device with flops_tf32")
        return replace(self, tf32=True)


NVLINK = 300e9  # bytes/s of one device, one direction: of A100s, by their data sheet
DEVICE_FILES = Path(__file__).with_name("cost") / "devices"  # NAME.json of each kind of device, and stacks.json


@cache
def known_devices() -> tuple[str, ...]:
    """The kinds of devices that have a file, in order of their names."""
    return tuple(sorted(path.stem for path in DEVICE_FILES.glob("*.json") if path.stem != "stacks"))


@cache
def device_file(name: str) -> dict[str, Any]:
    """What the file holds: data sheet, and the constants of kernels with their sources."""
    return json.loads(text_of(DEVICE_FILES / f"{name}.json", "measurements"))


def link_of(device: Device) -> float:
    """Bytes/s that collectives reach inside a node of such devices: of its file, NVLINK for others."""
    if device.name not in known_devices():
        return NVLINK
    file = device_file(device.name)
    return float(file["given"]["link_bandwidth"] * constants_of(file["constants"])["link"])


class _Devices(Mapping[str, Device]):
    """The devices by name: those that have a file, which is read when the device is asked for, and one core of a CPU."""

    def __init__(self) -> None:
        self._known = {"cpu": Device("cpu", 50e9, 50e9, 20e9, 8e9, launch=2e-6)}

    def __iter__(self) -> Iterator[str]:
        return iter((*known_devices(), "cpu"))

    def __len__(self) -> int:
        return len(known_devices()) + 1

    def __getitem__(self, name: str) -> Device:
        if name not in self._known:
            if name not in known_devices():
                raise KeyError(name)
            sheet, kernels = device_file(name)["given"], Kernels.of_file(device_file(name), f"{name}.json")
            rates = sheet["peak16"], sheet["peak32"], sheet["memory_bandwidth"], sheet["memory_bytes"]
            self._known[name] = Device(name, *rates, flops_tf32=sheet["peak_tf32"], kernels=kernels)
        return self._known[name]


DEVICES = _Devices()



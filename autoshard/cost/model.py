"""Where seconds come from: the formulas of this package, or a cost model of the user's, which a mesh carries.

    compute      of one kernel, from the local shapes of its inputs and outputs
    collective   of one collective on one mesh axis, from the bytes of a rank's largest buffer
    transfer     of a copy to the host's memory or back
    memory       of reading and writing the device's memory: an optimizer's update, gradients added up, a local slice

Beside a model, `register_price` states the seconds or the bytes of a single operator.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cost.collectives import PricedCollective, bytes_sent, collective_seconds
from autoshard.cost.compute import PRICES, Price, op_seconds, stated
from autoshard.cost.links import offload_seconds
from autoshard.cost.several_kernels import Described
from autoshard.devices import Device
from autoshard.graph import Fused
from autoshard.mesh import Axis, Mesh


class DefaultCosts:
    """The cost model of this package: four methods that return seconds. To change some, derive from it, and call `super()` for the others.
    A plan notes the name and the fingerprint, which should differ where the seconds do."""

    name, fingerprint = "autoshard", "1"

    def compute(
        self, target: str, inputs: Sequence[Described], outputs: Sequence[Described | None], alias: int | None, device: Device,
        share: float = 1.0, fused: Fused | None = None,
    ) -> float:  # fmt: skip
        """Of op `target`, "aten.mm.default", on local (shape, dtype)s; an output that is not computed is None. alias: the input of which
        the output is a view; share: of its FLOPs that are computed; fused: in a compiled program, what it adds to its kernel."""
        return op_seconds(target, inputs, outputs, alias, device, share, fused)

    def collective(self, collective: str, axis: Axis, size: Any) -> Any:
        """Of an all_gather, reduce_scatter, all_reduce or all_to_all. size: bytes of a rank's largest buffer, one number or an array."""
        return collective_seconds(collective, axis, size)

    def transfer(self, size: float, exposed: float, device: Device) -> float:
        """That a copy of `size` bytes to or from the host adds, of which the share `exposed` is hidden behind nothing."""
        return offload_seconds(size, exposed, device)

    def memory(self, kind: str, size: Any, device: Device) -> Any:
        """To move so many bytes, a number or an array; kind: update, accumulate, split or passes."""
        return size / (device.memory_bandwidth if kind == "split" else device.memory_rate)


DEFAULT = DefaultCosts()


def cost_of(mesh: Mesh) -> DefaultCosts | CheckedCosts:
    """The mesh's own cost model, whose seconds are checked, or that of this package."""
    model = mesh.cost_model
    return DEFAULT if model is None else CheckedCosts(model, model.name, model.fingerprint)


@dataclass
class CheckedCosts:
    """A cost model of the user's: ValueError where it returns anything but seconds; inf is allowed, and forbids."""

    of: Any  # with the methods of DefaultCosts
    name: str
    fingerprint: str

    def compute(self, target: str, *arguments: Any, **more: Any) -> float:
        return self._seconds(self.of.compute(target, *arguments, **more), "compute", target)

    def collective(self, collective: str, axis: Axis, size: Any) -> Any:
        return self._seconds(self.of.collective(collective, axis, size), "collective", f"{collective} on {axis.name}")

    def transfer(self, size: float, exposed: float, device: Device) -> float:
        return self._seconds(self.of.transfer(size, exposed, device), "transfer", f"{size:g} bytes")

    def memory(self, kind: str, size: Any, device: Device) -> Any:
        return self._seconds(self.of.memory(kind, size, device), "memory", kind)

    def _seconds(self, seconds: Any, method: str, what: str) -> Any:
        if type(seconds) is float and seconds >= 0:  # nearly always: the sentence takes longer than the check
            return seconds
        return stated(seconds, f"{method} of {what} by the cost model {self.name!r}")


def priced(collectives: Iterable[tuple[str, int, int]], mesh: Mesh) -> tuple[PricedCollective, ...]:
    """The seconds and bytes of collectives (collective, axis, B in bytes), for example those inside an op's local program."""

    def price(name: str, axis: int, B: int) -> PricedCollective:
        seconds, sent = (one(name, mesh.axes[axis], float(B)) for one in (cost_of(mesh).collective, bytes_sent))
        return PricedCollective(name, axis, B, float(seconds), float(sent))

    return tuple(price(*one) for one in collectives)


def register_price(
    target: Any,
    *,
    seconds: Callable[[Sequence[Described], Sequence[Described | None], Device], float] | None = None,
    bytes: Callable[[Sequence[Described], Sequence[Described | None]], float] | None = None,
) -> None:
    """Registers what an operator takes, in place of the roofline of its inputs and outputs; once more replaces it.

    target: the operator, `torch.ops.mylib.scale.default`, or its name. seconds: a function of the local inputs and outputs, each (shape,
    dtype), and the device; or a number. bytes: a function of inputs and outputs that returns the bytes its kernel reads and writes, from
    which the device's memory gives the seconds. ValueError without either, or with both.

        autoshard.register_price("mylib.scale.default", seconds=lambda inputs, outputs, device: 2e-6 + math.prod(inputs[0][0]) / 1e12)
    """
    if (seconds is None) == (bytes is None):
        raise ValueError("register_price takes seconds or bytes, one of them: a function of the operator's local inputs and outputs")
    PRICES[str(target).replace("::", ".")] = Price(seconds, bytes)


def registered_prices(targets: Iterable[str]) -> dict[str, str]:
    """A hash of the code of each registered price of these operators, for fingerprints."""
    return {target: _hash_of(PRICES[target]) for target in sorted(set(targets) & set(PRICES))}


def _hash_of(price: Price) -> str:
    function = price.seconds if price.seconds is not None else price.bytes
    try:
        code = inspect.getsource(function)  # type: ignore[arg-type]
    except (OSError, TypeError):  # from a prompt, or a number
        code = repr(getattr(getattr(function, "__code__", function), "co_code", function))
    return hashlib.sha256(code.encode()).hexdigest()[:16]

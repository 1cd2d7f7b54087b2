"""Copies of parameters in another layout or on other devices, made from the originals by the route that a plan has for them.

same devices      the route's collectives
other devices     messages from the original's shards to the copy's, then the route's collectives on the copy's own mesh
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.layout import Layout, rank_bounds
from autoshard.lower import Ask, Asking, Groups, Rank, check_step, drive, run_route
from autoshard.routes import DeviceSet, Message, Step, Transfers
from autoshard.runtime.agreement import rank_lost
from autoshard.runtime.traced_call import local

Moved = Callable[[Tensor | None], Tensor | None]  # a rank's shard of the original -> its shard of the copy; None where it has none


@dataclass(eq=False)
class Copies:
    """The parameters that a program has in other layouts than home, or on other devices."""

    originals: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]  # empty on ranks that the program doesn't use
    moves: Mapping[str, Moved]
    versions: dict[str, int] = field(default_factory=dict)  # of the originals when they were copied

    @property
    def are_current(self) -> bool:
        return all(self.versions.get(name) == local(x)._version for name, x in self.originals.items())

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes all copies anew; every rank calls this."""
        with rank_lost("copying parameters for another program"):
            for name, original in self.originals.items():
                held = local(original).detach()
                moved = self.moves[name](held)
                self.versions[name] = held._version
                if moved is not None and name in self.copies:
                    aliases = moved.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
                    local(self.copies[name]).set_(moved.clone() if aliases else moved.contiguous())

    @torch.no_grad()
    def free(self) -> None:
        """From now on there are no copies."""
        self.versions.clear()
        for copy in self.copies.values():
            local(copy).set_(local(copy).new_empty(0))


@dataclass(eq=False)
class Sent:
    """How many bytes this rank has sent for copies."""

    bytes: float = 0.0

    def count(self, ask: Ask, n: int) -> None:
        """ask: a collective over n ranks."""
        to_others = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(ask.collective, (n - 1) / n)
        self.bytes += ask.tensor.nbytes * to_others

    def drive(self, groups: Groups, program: Asking) -> Tensor:
        """As `Groups.drive`, counting."""

        def answer(ask: Ask) -> Tensor:
            self.count(ask, groups.sizes[ask.axis])
            return groups.answer(ask)

        return drive(program, answer)


@dataclass(frozen=True, eq=False)
class Mover:
    """Makes copies on one family's devices."""

    source: DeviceSet
    target: DeviceSet
    transfers: Transfers
    groups: Groups | None  # of the target's mesh; None on ranks that it doesn't have
    sent: Sent
    device: torch.device

    def of(self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout) -> Moved:
        """What moves one parameter; the route that was priced."""
        if self.transfers.same_mesh:
            route = self.transfers.routes.route(shape, itemsize, source, target)
            if route is None:
                raise ValueError(f"there is no route from {source} to {target} for a parameter of {shape}; plan again")
            return self._along(route.steps, shape)
        transfer = self.transfers.transfer(shape, itemsize, source, target)
        then = self._along(transfer.route.steps, shape)

        def moved(held: Tensor | None) -> Tensor | None:
            return then(self._exchanged(transfer.messages, held, shape, source, transfer.via))

        return moved

    def _along(self, steps: tuple[Step, ...], shape: tuple[int, ...]) -> Moved:
        for step in steps:
            check_step(step)

        def moved(held: Tensor | None) -> Tensor | None:
            if held is None or self.groups is None:
                return None
            where = self._where(self.target)
            assert where is not None
            rank = Rank(self.target.mesh, tuple(torch.tensor(c, device=self.device) for c in where), where)
            return self.sent.drive(self.groups, run_route(steps, rank, held, shape))

        return moved

    def _where(self, devices: DeviceSet) -> tuple[int, ...] | None:
        """This rank's coordinate."""
        rank = dist.get_rank()
        return devices.mesh.coordinates()[devices.numbers.index(rank)] if rank in devices.numbers else None

    def _exchanged(
        self, messages: tuple[Message, ...], held: Tensor | None, shape: tuple[int, ...], source: Layout, via: Layout
    ) -> Tensor | None:
        """This rank's shard in layout `via`, put together from messages."""
        rank, ops, inbox = dist.get_rank(), [], []
        begin, wanted = (self._bounds(devices, shape, layout) for devices, layout in ((self.source, source), (self.target, via)))
        shard = None if wanted is None else torch.empty([hi - lo for lo, hi in wanted], dtype=self._dtype(held), device=self.device)
        for m in messages:
            if m.sender == rank:
                assert held is not None and begin is not None
                part = held[_slices(m.box, begin)].contiguous()
                if m.receiver == rank:
                    assert shard is not None and wanted is not None
                    shard[_slices(m.box, wanted)] = part
                    continue
                self.sent.bytes += part.nbytes
                ops.append(dist.P2POp(dist.isend, part, m.receiver))
            elif m.receiver == rank:
                part = torch.empty([hi - lo for lo, hi in m.box], dtype=self._dtype(held), device=self.device)
                inbox.append((m.box, part))
                ops.append(dist.P2POp(dist.irecv, part, m.sender))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for box, part in inbox:
            assert shard is not None and wanted is not None
            shard[_slices(box, wanted)] = part
        return shard

    @staticmethod
    def _dtype(held: Tensor | None) -> torch.dtype:
        assert held is not None, "home has all devices"
        return held.dtype

    def _bounds(self, devices: DeviceSet, shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, int], ...] | None:
        where = self._where(devices)
        return None if where is None else rank_bounds(shape, layout, devices.mesh, where)


def _slices(box: tuple[tuple[int, int], ...], within: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    """The box as slices of a shard with these bounds."""
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, within, strict=True))

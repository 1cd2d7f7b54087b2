"""Copies of parameters in another layout or on other devices, made from the originals by the route that a plan has for them.

same devices      the route's collectives
other devices     messages from the original's shards to the copy's, then the route's collectives on the copy's own mesh
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.layout import Layout
from autoshard.lower import CollectiveCall, Groups, RankGenerator, check_step, drive, run_route
from autoshard.routes import DeviceSet, Message, Step, Transfers
from autoshard.runtime.agreement import rank_lost
from autoshard.runtime.distribute import Where, local, versions
from autoshard.runtime.transfers import Held, SentBlock, StageTransfer, exchange, within

Moved = Callable[[Tensor], Tensor | None]  # a rank's shard of the original -> its shard of the copy; None where it has none


@dataclass(eq=False)
class Copies:
    """The parameters that a program has in other layouts than home, or on other devices."""

    originals: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]  # empty on ranks that the program doesn't use
    moves: Mapping[str, Moved]
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)  # of the originals when they were copied

    @property
    def are_current(self) -> bool:
        return all(self.versions.get(name) == versions(x) for name, x in self.originals.items())

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes all copies anew; every rank calls this."""
        with rank_lost("copying parameters for another program"):
            for name, original in self.originals.items():
                held = local(original).detach()
                moved = self.moves[name](held)
                self.versions[name] = versions(original)
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

    def drive(self, groups: Groups, program: RankGenerator) -> Tensor:
        """As `Groups.drive`, counting."""

        def answer(call: CollectiveCall) -> Tensor:
            n = groups.sizes[call.axis]
            to_others = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(call.collective, (n - 1) / n)
            self.bytes += call.tensor.nbytes * to_others
            return groups.answer(call)

        return drive(program, answer)


@dataclass(frozen=True, eq=False)
class Mover:
    """Makes copies on one family's devices."""

    source: DeviceSet
    target: DeviceSet
    transfers: Transfers
    where: Where  # on the target's mesh
    sent: Sent

    def of(self, original: Tensor, source: Layout, target: Layout) -> Moved:
        """What moves one parameter; the route that was priced."""
        shape, itemsize = tuple(original.shape), original.element_size()
        if self.transfers.same_mesh:
            route = self.transfers.routes.route(shape, itemsize, source, target)
            if route is None:
                raise ValueError(f"there is no route from {source} to {target} for a parameter of {shape}; plan again")
            return self._along(route.steps, shape)
        priced = self.transfers.transfer(shape, itemsize, source, target)
        then, pieces = self._along(priced.route.steps, shape), self._pieces(priced.messages, original, source, priced.via)
        rank = dist.get_rank()
        sizes = (math.prod(end - begin for begin, end in p.source) for p in pieces.pieces if p.sender == rank != p.receiver)
        bytes_sent = sum(sizes) * itemsize

        def moved(held: Tensor) -> Tensor | None:
            self.sent.bytes += bytes_sent
            return then(exchange([pieces], rank, {"": held}, self.where.device, None).get(""))

        return moved

    def _along(self, steps: tuple[Step, ...], shape: tuple[int, ...]) -> Callable[[Tensor | None], Tensor | None]:
        for step in steps:
            check_step(step)

        def moved(held: Tensor | None) -> Tensor | None:
            if held is None or not self.where.coordinate:
                return None
            return self.sent.drive(self.where.groups, run_route(steps, self.where.rank, held, shape))

        return moved

    def _pieces(self, messages: Sequence[Message], original: Tensor, source: Layout, via: Layout) -> StageTransfer:
        """The messages that make the shards in layout `via`."""
        shape = tuple(original.shape)
        held, wanted = (Held(x, of.mesh, of.numbers).bounds(shape) for x, of in ((source, self.source), (via, self.target)))
        blocks = (SentBlock(m.sender, m.receiver, within(m.box, held[m.sender]), within(m.box, wanted[m.receiver])) for m in messages)
        shapes = {device: tuple(end - begin for begin, end in bounds) for device, bounds in wanted.items()}
        return StageTransfer("", original.dtype, tuple(blocks), shapes)

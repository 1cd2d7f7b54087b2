"""The generator from which random ops of a module draw, in one state on all its ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autoshard.lower import first_state, from_state, mixed, state_of_generator
from autoshard.runtime.agreement import of_first_rank


@dataclass(eq=False)
class SharedGenerator:
    """The state from which the ranks of a module draw, which is the first rank's when they first do so."""

    device: str
    group: ProcessGroup | None = None  # of the ranks, where these are not all ranks
    branch: int = 0  # of several that begin in one state
    state: Tensor | None = None

    def agree(self) -> None:
        """All ranks call this before the first of them draws. Their own generators go on by one draw: another module draws others."""
        if self.state is not None:
            return
        self.state = of_first_rank(lambda: state_of_generator(self.device), "agreeing on a seed", self.group)
        torch.rand((), device=self.device)
        if self.branch:
            self.state = first_state(mixed(self.state, self.branch), self.device)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside the block ops draw from the shared state."""
        assert self.state is not None
        with from_state(self.state, self.device):
            yield
            self.state = state_of_generator(self.device)

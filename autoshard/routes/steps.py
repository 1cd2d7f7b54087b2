"""The graph of layouts: every layout that a tensor of `ndim` dims can have on a mesh (state), and every collective over one mesh
axis that leads from one layout to another (move).

A state is a row of codes, one per axis: d for S(d), ndim for R, ndim + 1 for P. The number of a state is that row read
in base ndim + 2. One P stands for all reduce ops: they cost the same and never mix, so `encode` returns the op separately.

Several axes shard a dim left to right (layout.py): the rightmost of them is minor, and its groups hold neighbouring
parts. A collective on axis k concatenates or splits neighbouring parts, so no axis right of k may shard that dim:

    all_gather      S(i) -> R      no axis right of k shards i
    split           R -> S(j)      no axis right of k shards j; a local slice
    all_to_all      S(i) -> S(j)   both conditions
    all_reduce      P -> R
    reduce_scatter  P -> S(j)      no axis right of k shards j

No move leads from R or S to P. An axis of size 1 is always R. Nothing here depends on the sizes of dims: the caller checks
whether a shape divides into the parts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.layout import Layout, P, Partial, Placement, R, Replicate, S, Shard
from autoshard.mesh import Mesh

# Among equally cheap routes the one whose last step comes first here is chosen.
STEPS = ("split", "reduce_scatter", "all_to_all", "all_gather", "all_reduce")


@dataclass(frozen=True)
class Moves:
    """The graph of states. The last four columns have an entry per move, sorted by `after`, then STEPS, then axis."""

    codes: np.ndarray  # (states, axes)
    num_parts: np.ndarray  # (states, dims): the number of parts of the dim
    step: np.ndarray  # (moves,) index into STEPS
    axis: np.ndarray  # (moves,) mesh axis
    before: np.ndarray  # (moves,) state
    after: np.ndarray  # (moves,) state

    @cached_property
    def groups(self) -> tuple[tuple[str, int, np.ndarray], ...]:
        """(collective, axis, the moves that are this collective on this axis)."""
        present = sorted(set(zip(self.step.tolist(), self.axis.tolist())))
        return tuple((STEPS[s], k, np.flatnonzero((self.step == s) & (self.axis == k))) for s, k in present)


def all_moves(ndim: int, mesh: Mesh) -> Moves:
    """All states of a tensor with `ndim` dims and all moves between them."""
    num_axes, sizes = len(mesh.axes), np.array(mesh.shape)
    codes = np.indices((ndim + 2,) * num_axes).reshape(num_axes, -1).T
    weights = (ndim + 2) ** np.arange(num_axes)[::-1]
    has_code = codes[:, :, None] == np.arange(ndim + 2)  # (states, axes, codes)
    num_parts = np.where(has_code, sizes[:, None], 1).prod(axis=1)[:, :ndim]
    possible = (codes[:, sizes == 1] == ndim).all(axis=1)

    columns = [np.empty((4, 0), dtype=int)]
    for k in np.flatnonzero(sizes > 1):
        minor = has_code[:, k + 1 :].any(axis=1)  # (states, codes): an axis right of k shards the dim
        minor[:, ndim:] = False  # R and P shard no dim
        for old in range(ndim + 2):
            for new in range(ndim + 1):  # nothing becomes P
                if old != new:
                    before = np.flatnonzero(possible & (codes[:, k] == old) & ~minor[:, old] & ~minor[:, new])
                    step = STEPS.index(_collective(old, new, ndim))
                    columns.append(np.stack(np.broadcast_arrays(step, k, before, before + (new - old) * weights[k])))
    step, axis, before, after = np.concatenate(columns, axis=1)
    order = np.lexsort((axis, step, after))
    return Moves(codes, num_parts, step[order], axis[order], before[order], after[order])


def _collective(old: int, new: int, ndim: int) -> str:
    if old == ndim + 1:
        return "all_reduce" if new == ndim else "reduce_scatter"
    if old == ndim:
        return "split"
    return "all_gather" if new == ndim else "all_to_all"


def encode(layout: Layout, ndim: int, mesh: Mesh) -> tuple[int, str]:
    """The state of a layout and the reduce op of its P ("" without P); ValueError for a layout that such a tensor can't have."""
    reduce_ops = {p.reduce_op for p in layout if type(p) is Partial}
    codes = [_code(p, ndim) for p in layout]
    if len(layout) != len(mesh.axes) or -1 in codes or len(reduce_ops) > 1:
        raise ValueError(
            f"layout {layout} does not describe a tensor of {ndim} dims on a mesh of {len(mesh.axes)} axes; "
            "expected R, S(dim) or P per axis, all P of one kind"
        )
    state = 0
    for code in codes:
        state = state * (ndim + 2) + code
    return state, reduce_ops.pop() if reduce_ops else ""


def _code(placement: Placement, ndim: int) -> int:
    # exact types: a masked partial or a strided shard is not what its base class is
    if type(placement) is Shard:
        return placement.dim if 0 <= placement.dim < ndim else -1
    if type(placement) is Replicate:
        return ndim
    return ndim + 1 if type(placement) is Partial else -1


def decode(codes: np.ndarray, ndim: int, reduce_op: str) -> Layout:
    return tuple(S(int(c)) if c < ndim else R if c == ndim else P(reduce_op) for c in codes)

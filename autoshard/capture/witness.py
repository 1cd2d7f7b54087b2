"""The eager program of the full model, on fake tensors: a cheap test for differences that a capture of few layers can't see.

    program   w = the operators of one eager call, each with its literals, the shapes of what it reads and makes, and which of these
                need a gradient; a backward pass follows its forward, and what few layers of it do is compared as a graph
    alike     layers of equal fingerprints that can't know which one they are: a call of one stands for all calls with such arguments
    pieces    w = v_0 x_1 v_1 x_2 ... where x_r are the maximal repetitions, each a period repeated up to a length l_r
    grown     the programs of k, k + p and n = k + t p layers have the same v_r and periods, and
              l_r(n) - l_r(k) is t times l_r(k + p) - l_r(k), which is whole periods, or 0; for one r without
              looking for repetitions, which are others where the first layers are partly as the later ones
    sources   of k + p layers w[b_r : b_r + d_r] repeated t times are those of n: what an operator reads was made by the same operator
              as there, or by one that is whole d_r later: c d_r in the (c + 1)-th time, all (t - 1) d_r after the last   `misread`

The eager program is compared with eager programs of few layers and not with the captured graph: a model may run other code while
it is traced (Hugging Face masks do), and then does so in every layer.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard.capture.explain import explained
from autoshard.capture.inputs import arguments, static_mode, to_fake
from autoshard.graph import repetitions
from autoshard.precision import Precision
from autoshard.torch_private import TorchDispatchMode, pytree


class EagerProgram(NamedTuple):
    lines: list[str]  # an operator each, or what is returned
    sources: list[tuple[int, ...]]  # of each tensor read, the number of the line that made it; of others, of the first one that read it


class Repeated(NamedTuple):
    """Lines of the program of a period more that the full model's has several times."""

    begin: int
    length: int
    times: int


class _Log(TorchDispatchMode):
    """Records every operator that runs, and the calls of layers that stand for others."""

    def __init__(self) -> None:
        super().__init__()
        self.program = EagerProgram([], [])
        self.outputs: dict[str, Any] = {}  # by calls of such layers
        self.source: dict[int, int] = {}  # by the id of a tensor
        self.alive: list[Any] = []  # so that each id is of one tensor

    def note(self, line: str, read: Iterable[Any], outputs: Iterable[Any] = ()) -> None:
        read, outputs, at = list(read), list(outputs), len(self.program.lines)
        self.program.lines.append(line)
        self.program.sources.append(tuple([self.source.setdefault(id(one), at) for one in read]))
        self.source.update((id(one), at) for one in outputs)
        self.alive += read + outputs

    def standing_for(self, kind: str, forward: Callable) -> Callable:
        """A forward that runs where none of this kind was called with such arguments before."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = f"{kind} {torch.is_grad_enabled()} {_text((args, kwargs))}"
            if name not in self.outputs:
                self.outputs[name] = forward(*args, **kwargs)
            outputs = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t).requires_grad_(t.requires_grad), self.outputs[name])
            self.note(name, [forward, *_tensors((args, kwargs))], _tensors(outputs))
            return outputs

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not str(func).startswith("prim."):  # only asks a tensor for its device
            self.note(f"{func} {_text((args, kwargs or {}))} -> {_text(result)}", _tensors((args, kwargs)), _tensors(result))
        return result


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor))


def _text(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"{tuple(item.shape)}{' needs grad' * item.requires_grad}"
    if isinstance(item, (tuple, list)):
        return f"[{', '.join(map(_text, item))}]"
    if isinstance(item, dict):
        return f"[{', '.join(f'{key}={_text(value)}' for key, value in sorted(item.items()))}]"
    return str(item)


def eager_program(
    module: nn.Module, example_inputs: Any, *, training: bool, precision: Precision | None = None, alike: Mapping[str, str] | None = None
) -> EagerProgram:
    """The operators that one forward of the module runs, in order, and what it returns. alike: kinds of layers, by their names."""
    mode = static_mode()
    fake, args, kwargs = to_fake(mode, module, *arguments(example_inputs), precision)
    log = _Log()
    for name, kind in (alike or {}).items():
        layer = fake.get_submodule(name)
        layer.forward = log.standing_for(kind, layer.forward)
    with explained(module), mode, torch.set_grad_enabled(training), log:
        outputs = fake(*args, **kwargs)
    for leaf in pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs):
        log.note(f"returns {_text(leaf)}", _tensors(leaf))
    return log.program


def repeated_in_one_place(short: list[str], longer: list[str], deep: list[str], times: int) -> list[Repeated]:
    """The d operators that `longer` has beside d equal ones of `short`, and `deep` the same `times` times.

    With b common operators at the beginning, e at the end and n in `short`, d can be inserted anywhere from n - e to b, so that they repeat
    their neighbours if b - (n - e) >= d. None says nothing where several places grow.
    """
    more, begin = len(longer) - len(short), _common(short, longer)
    if more <= 0 or begin + _common(short[::-1], longer[::-1]) - len(short) < more:
        return []
    same = deep == short[:begin] + longer[begin : begin + more] * times + short[begin:]
    return [Repeated(begin, more, times)] if same else []


def _common(a: list[str], b: list[str]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def misread(longer: EagerProgram, deep: EagerProgram, repeated: Sequence[Repeated]) -> str:
    """The first operator of `deep` that doesn't read what it reads in `longer`, in words; "" if there is none."""
    for at, (i, later, inserted, period) in enumerate(_aligned(len(longer.lines), repeated)):
        before = longer.sources[i - period]
        for k, (a, b) in enumerate(zip(longer.sources[i], deep.sources[at])):
            step = a - before[k] if k < len(before) else -1  # from the period before
            more = {0: (0,), period: (inserted,)}.get(step, (0, inserted))
            if all(b - a != n + m for n in later for m in more):
                return f"{deep.lines[at]} (operator {at}) reads what another operator made"
    return ""


def _aligned(lines: int, repeated: Sequence[Repeated]) -> Iterator[tuple[int, set[int], int, int]]:
    """Per line of the full model its line in the program of a period more, by how much later in the full one what was made before the
    repetition may be, how many lines more what was made in it, and its period."""
    where, later = 0, {0}
    for begin, period, times in (*repeated, Repeated(lines, 0, 1)):
        yield from ((i, later, 0, 0) for i in range(where, begin))
        yield from ((i, later, c * period, period) for c, i in product(range(times), range(begin, begin + period)))
        where, later = begin + period, {n + m for n in later for m in (0, (times - 1) * period)}


def grown(short: EagerProgram, longer: EagerProgram, deep: EagerProgram, times: Collection[int], of: str = "the full model") -> str:
    """Why `deep` isn't `short` with its periods repeated `times` more often; "" if it is. times: one number per container. of: in
    words, what `deep` is the program of."""
    lines = short.lines, longer.lines, deep.lines
    repeated = repeated_in_one_place(*lines, *times) if len(times) == 1 else []
    if not repeated:
        reason, repeated = _repeated(lines, times, of)
        if reason:
            return reason
    reason = misread(longer, deep, repeated)
    return f"run eagerly, {of} does something else than few layers of it: {reason}" if reason else ""


def _repeated(lines: Sequence[list[str]], times: Collection[int], of: str) -> tuple[str, list[Repeated]]:
    """Why the last program isn't the first with its periods repeated, or "" and what is repeated."""
    numbers: dict[str, int] = {}
    programs = [[numbers.setdefault(line, len(numbers)) for line in program] for program in lines]
    where, begin, repeated = 0, 0, []
    for pieces in zip_longest(*(_pieces(program) for program in programs)):
        if None in pieces or len({(piece[0], piece[1]) for piece in pieces}) > 1:
            return f"run eagerly, {of} does something else than few layers of it: {_first(pieces, lines[2], where)}", []
        period, lengths = pieces[0][0], [piece[2] for piece in pieces]
        one, total = lengths[1] - lengths[0], lengths[2] - lengths[0]
        repeats = period and one > 0 and one % period == 0  # layers of one period may run the same operators
        if (one, total) != (0, 0) and not (repeats and total in {t * one for t in times}):
            return f"run eagerly, {lengths[0]} repeating operators become {lengths[1]} one period deeper, but {lengths[2]} in {of}", []
        where, begin = where + lengths[2], begin + lengths[1]
        if one:
            repeated.append(Repeated(begin - one, one, total // one))
    return "", repeated


Piece = tuple[int, tuple[int, ...], int]  # period (0: no repetition), its items, length


def _pieces(items: Sequence[int]) -> Iterator[Piece]:
    at = 0
    for repetition in repetitions(items):
        if repetition.start > at:
            yield (0, tuple(items[at : repetition.start]), repetition.start - at)
        at = repetition.stop
        yield (repetition.period, tuple(items[repetition.start : repetition.start + repetition.period]), at - repetition.start)
    if at < len(items):
        yield (0, tuple(items[at:]), len(items) - at)


def _first(pieces: Sequence[Piece | None], deep: list[str], where: int) -> str:
    """The first operator of the full model's piece that the piece of few layers doesn't have."""
    few, full = pieces[0], pieces[2]
    if full is None:
        return "it ends earlier"
    same = 0
    while few is not None and same < min(len(few[1]), len(full[1])) and few[1][same] == full[1][same]:
        same += 1
    return f"{deep[min(where + same, len(deep) - 1)]} (operator {where + same})"

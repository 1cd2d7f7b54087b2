"""The eager program of the full model, on fake tensors: a cheap test for differences that a capture of few layers can't see.

    program   w = the operators of one eager call, each with its literals, the shapes of what it reads and makes, and which of these
                need a gradient; a backward pass follows its forward, and what few layers of it do is compared as a graph. Which op
                a value comes from is not part of it: a late layer that reads another value of the same shape isn't told apart
    alike     layers of equal fingerprints that can't know which one they are: a call of one stands for all calls with such arguments
    pieces    w = v_0 x_1 v_1 x_2 ... where x_r are the maximal repetitions, each a period repeated up to a length l_r
    grown     the programs of k, k + p and n = k + t p layers have the same v_r and periods, and
              l_r(n) - l_r(k) is t times l_r(k + p) - l_r(k), which is whole periods, or 0; for one r without
              looking for repetitions, which are others where the first layers are partly as the later ones  `repeats_in_one_place`

The eager program is compared with eager programs of few layers and not with the captured graph: a model may run other code while
it is traced (Hugging Face masks do), and then does so in every layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from autoshard.capture.explain import explained
from autoshard.capture.inputs import arguments, static_mode, to_fake
from autoshard.graph import repetitions
from autoshard.precision import Precision
from autoshard.torch_private import TorchDispatchMode, pytree

Program = list[str]


class _Log(TorchDispatchMode):
    """Records every operator that runs, and the calls of layers that stand for others."""

    def __init__(self) -> None:
        super().__init__()
        self.program: Program = []
        self.outputs: dict[str, Any] = {}  # by calls of such layers

    def standing_for(self, kind: str, forward: Callable) -> Callable:
        """A forward that runs where none of this kind was called with such arguments before."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = f"{kind} {torch.is_grad_enabled()} {_text((args, kwargs))}"
            self.program.append(name)
            if name not in self.outputs:
                self.outputs[name] = forward(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t).requires_grad_(t.requires_grad), self.outputs[name])

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not str(func).startswith("prim."):  # only asks a tensor for its device
            self.program.append(f"{func} {_text((args, kwargs or {}))} -> {_text(result)}")
        return result


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
) -> Program:
    """The operators that one forward of the module runs, in order, and what it returns. alike: kinds of layers, by their names."""
    mode = static_mode()
    fake, args, kwargs = to_fake(mode, module, *arguments(example_inputs), precision)
    log = _Log()
    for name, kind in (alike or {}).items():
        layer = fake.get_submodule(name)
        layer.forward = log.standing_for(kind, layer.forward)
    with explained(module), mode, torch.set_grad_enabled(training), log:
        outputs = fake(*args, **kwargs)
    leaves = pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    return log.program + [f"returns {_text(leaf)}" for leaf in leaves]


def repeats_in_one_place(short: Program, longer: Program, deep: Program, times: int) -> bool:
    """Whether `longer` is `short` with d operators inserted beside d equal ones, and `deep` the same with these inserted `times` times.

    With b common operators at the beginning, e at the end and n in `short`, d can be inserted anywhere from n - e to b, so that they repeat
    their neighbours if b - (n - e) >= d. False says nothing where several places grow.
    """
    more, begin = len(longer) - len(short), _common(short, longer)
    if more <= 0 or begin + _common(short[::-1], longer[::-1]) - len(short) < more:
        return False
    return deep == short[:begin] + longer[begin : begin + more] * times + short[begin:]


def _common(a: Program, b: Program) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def grown(short: Program, longer: Program, deep: Program, times: Collection[int], of: str = "the full model") -> str:
    """Why `deep` isn't `short` with its periods repeated `times` more often; "" if it is. times: one number per container. of: in
    words, what `deep` is the program of."""
    if len(times) == 1 and repeats_in_one_place(short, longer, deep, *times):
        return ""
    numbers: dict[str, int] = {}
    programs = [[numbers.setdefault(line, len(numbers)) for line in program] for program in (short, longer, deep)]
    where = 0
    for pieces in zip_longest(*(_pieces(program) for program in programs)):
        if None in pieces or len({(piece[0], piece[1]) for piece in pieces}) > 1:
            return f"run eagerly, {of} does something else than few layers of it: {_first(pieces, deep, where)}"
        period, lengths = pieces[0][0], [piece[2] for piece in pieces]
        one, total = lengths[1] - lengths[0], lengths[2] - lengths[0]
        repeats = period and one > 0 and one % period == 0  # layers of one period may run the same operators
        if (one, total) != (0, 0) and not (repeats and total in {t * one for t in times}):
            return f"run eagerly, {lengths[0]} repeating operators become {lengths[1]} one period deeper, but {lengths[2]} in {of}"
        where += lengths[2]
    return ""


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


def _first(pieces: Sequence[Piece | None], deep: Program, where: int) -> str:
    """The first operator of the full model's piece that the piece of few layers doesn't have."""
    few, full = pieces[0], pieces[2]
    if full is None:
        return "it ends earlier"
    same = 0
    while few is not None and same < min(len(few[1]), len(full[1])) and few[1][same] == full[1][same]:
        same += 1
    return f"{deep[min(where + same, len(deep) - 1)]} (operator {where + same})"

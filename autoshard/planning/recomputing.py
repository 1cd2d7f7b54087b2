"""Kinds of variants that give memory for seconds: of blocks that are recomputed, of the hidden values of experts, of a loss in chunks.

recompute, of the repeated blocks in the backward pass:
a number, "all"   so many blocks
"blocks"          k blocks recomputed, k = 0 ... n, is k graphs, each planned with its own proof under the same memory limit. More
                  blocks mean more seconds and fewer bytes, but a tight limit also makes layouts more expensive. So no block, all
                  blocks, and by bisection the fewest that fit and the middle of what is left are planned with the solver `prices`,
                  and then the cheapest of them to within one percent. The proof is that of the chosen k
"auto"            each saved value is kept, recomputed or offloaded (selecting.py); where no such plan fits, as with "blocks". Where
                  memory binds and a plan's time line is far above its bound, all blocks recomputed compete: kernels wait for traffic
                  there, and what they compute again meanwhile costs nothing, which the sum of all seconds does not know. Where memory
                  doesn't bind, what is recomputed saves traffic, which a time line hides: there all values are kept

hidden values of experts: kept between forward and backward they save the first matmul of the backward and need memory. So plans keep them;
where no such plan fits, or where its peak shows that the memory limit binds, plans that compute them again are looked for too, and the
faster plan is the answer. With "auto" they are saved values as all others; plans that compute them again are looked for where no such plan
fits, or where it runs experts twice. With blocks recomputed they are not kept.

chunked_loss, a cross entropy in chunks of tokens:
"auto"            where no plan fits with all logits of a loss at once, and they are many: more than a chunk's tokens for each device,
                  whose logits take more than LARGE of the memory limit
"always"          in every loss that can be chunked
"never"
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.graph import KEEPING, ROWS, Graph, checkpointed, chunked_loss, forward_blocks, losses_of, with_hidden_values
from autoshard.planning.compiling import as_compiled
from autoshard.planning.question import Question
from autoshard.planning.variants import Answered, Tried, Variant, is_short
from autoshard.strategies import Keeping

GAP = 0.01  # relative: how well "auto" plans at least, the numbers of blocks that "blocks" compares and the one that it chooses
QUICK_SHARE = 1 / 4  # of the time left, for one number of blocks: the plan to within GAP needs time too
BLOCKWISE = "blocks: single tensors are chosen without tie_blocks"
LARGE = 0.02


def recomputations(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """As many blocks as asked for; or per tensor, and where that has no plan or can't be had the cheapest number of blocks."""
    options, noted = question.options, {}
    if not (options.training and options.recompute in ("auto", "blocks")):
        yield Variant("as many blocks recomputed as asked for", blocks_recomputed)
        return
    if options.recompute == "auto" and options.tie_blocks:
        noted = {"recompute_by": BLOCKWISE}
    elif options.recompute == "auto":
        yield Variant("with single tensors recomputed or offloaded", lambda part: part.with_options(gap=max(part.options.gap, GAP)))
        if (one := tried[-1].answered) is not None:
            if one.overlapped is not None and one.overlapped.is_far and is_short(question, tried[-1]) and forward_blocks(question.graph):
                yield Variant("all blocks recomputed", _all_recomputed, competes=True)
            return
    yield from _numbers_of_blocks(question, tried, noted)


def _all_recomputed(question: Question) -> Question:
    return replace(blocks_recomputed(question.with_options(recompute="all")), explains=False)


def _numbers_of_blocks(question: Question, tried: Sequence[Tried], noted: dict[str, Any]) -> Iterator[Variant]:
    """Numbers of blocks, planned quickly, and at last the cheapest of them; all blocks where none of them fits."""
    num_blocks = len(forward_blocks(question.graph))
    costs: dict[int, float | None] = {}

    def recomputing(k: int, part: Question) -> Question:
        part = replace(part, explains=part.explains and k == num_blocks).with_options(gap=max(part.options.gap, GAP))
        return _recomputing(part, k, num_blocks, **noted)

    def quickly(k: int, part: Question) -> Question:
        solver = "prices" if part.options.solver == "auto" else part.options.solver
        return replace(recomputing(k, part), explains=False).with_options(baselines=False, objective="serial", solver=solver)

    def quick(k: int) -> Iterator[Variant]:
        if k not in costs:
            yield Variant(f"{k} blocks recomputed, quickly", partial(quickly, k), QUICK_SHARE)
            costs[k] = None if (one := tried[-1].answered) is None else one.answer.cost

    yield from quick(0)
    yield from quick(num_blocks)
    if costs[0] is None and costs[num_blocks] is not None:
        low, high = 0, num_blocks  # low does not fit, high does
        while high - low > 1:
            middle = (low + high) // 2
            yield from quick(middle)
            low, high = (low, middle) if costs[middle] is not None else (middle, high)
        yield from quick((high + num_blocks) // 2)
    fitting = [(cost, k) for k, cost in costs.items() if cost is not None]
    best = min(fitting)[1] if fitting else num_blocks
    everything = f"with all {num_blocks} blocks recomputed" if num_blocks else "with no repeated blocks that could be recomputed"
    note = f"{best} blocks recomputed" if fitting else everything
    yield Variant(note, partial(recomputing, best), is_last_resort=not fitting)


def with_recomputed_blocks(question: Question, keeping: Keeping = "matmuls") -> Question:
    """The question with as many blocks recomputed as its options ask for, a number or "all", and what its compiler recomputes besides."""
    return as_compiled(blocks_recomputed(question), keeping)


def blocks_recomputed(question: Question) -> Question:
    options = question.options
    if not (options.recompute and options.training):
        return replace(question.with_options(recompute=0), recomputable=question.graph if options.training else None)
    num_blocks = len(forward_blocks(question.graph))
    k = num_blocks if options.recompute == "all" else int(options.recompute)
    if k > num_blocks:
        raise ValueError(f"recompute is {k}, but the model repeats {num_blocks} blocks; expected {num_blocks} at most, or 'all'")
    return replace(_recomputing(question, k, num_blocks), recomputable=question.graph if k < num_blocks else None)


def _recomputing(question: Question, k: int, num_blocks: int, **noted: Any) -> Question:
    """The first k of `num_blocks` blocks recomputed. Few layers correspond to many where none or all of them are."""

    def recomputed(graph: Graph) -> Graph | None:
        if graph is question.graph or k == 0:
            return checkpointed(graph, k)
        return checkpointed(graph, len(forward_blocks(graph))) if k == num_blocks else None

    return question.map(recomputed, **noted).with_options(recompute=k)


def hidden_values(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """Kept, and where memory is short computed again; only as the graph has them where it has none to keep, or blocks are recomputed."""
    parts, is_auto = question.mesh.num_devices, question.options.recompute == "auto"
    if (is_auto or question.options.recompute == 0) and with_hidden_values(question.graph, parts) is not question.graph:
        yield Variant(
            "hidden values of experts kept",
            lambda part: part.with_fallback().map(partial(with_hidden_values, parts=parts), hidden_values=parts),
        )
        one = tried[-1].answered
        if not is_short(question, tried[-1]) or (is_auto and one is not None and not _runs_experts_again(one)):
            return
    yield Variant("hidden values of experts computed again", competes=True)


def _runs_experts_again(one: Answered) -> bool:
    return any(op.backward and op.target in KEEPING.values() for op in one.instance.formulated.graph.ops)


def chunks(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """All logits of a loss at once, or some at a time, as the options ask for. ValueError where "always" finds no loss to be chunked."""
    wanted = question.options.chunked_loss
    if wanted == "always" and not losses_of(question.graph):
        raise ValueError(
            "chunked_loss is 'always', but the model has no training loss that can be chunked: a cross entropy, without class weights, "
            "of a matmul whose result nothing else reads or returns; leave the option out"
        )
    if wanted != "always":
        may_chunk = wanted == "auto" and _has_many_logits(question)
        yield Variant("all logits at once", lambda part: part.with_fallback() if may_chunk else part)
        if not (may_chunk and tried[-1].has_no_plan):
            return
    yield Variant("logits in chunks", lambda part: part.map(lambda graph: chunked_loss(graph, ROWS), chunked_loss=ROWS))


def _has_many_logits(question: Question) -> bool:
    limit, devices = question.options.memory_limit, question.mesh.num_devices
    if limit is None or not question.options.training:
        return False
    logits = [question.graph.tensor((loss.softmax, 0)) for loss in losses_of(question.graph)]
    return any(one.shape[0] > ROWS * devices and one.bytes / devices > LARGE * limit for one in logits)

"""A graph whose cross entropy holds the logits of some tokens at a time, and which computes what it computed before.

    forward     x [T, H] @ w [H, V] -> views, a cast -> log_softmax -> nll_loss         -> loss, total weight
    backward    nll_loss' -> log_softmax' -> views, a cast -> g @ w', g' @ x            -> gradients of x [T, H] and of w' [V, H]

Each line becomes one op, `autoshard.chunked_loss` and `autoshard.chunked_loss_backward`, which work through the tokens of a rank in chunks
of `rows`. The forward keeps the logsumexp of every token, from which the backward gets the probabilities of logits that it computes again:
one more matmul of the vocabulary, and in exchange no tensor of T x V elements. In mixed precision the backward casts w again (casts.py).

Only a loss whose logits nobody else reads is replaced: not one of a model that returns them, nor one with class weights.
"""

from dataclasses import dataclass, replace

from autoshard.graph.records import Graph, Op, Ref, Tensor, Value
from autoshard.graph.rewriting import Rewriting

FORWARD, BACKWARD = "autoshard.chunked_loss.default", "autoshard.chunked_loss_backward.default"
ROWS = 4096  # tokens of a chunk: as many FLOPs per byte of the weight's gradient, which every chunk reads and writes, as a device has
MATMUL, TRANSPOSE, CAST = "aten.mm.default", "aten.t.default", "aten._to_copy.default"
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.detach.default")
WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Loss:
    """A loss: values that its new ops read, and its ops by index."""

    x: Value
    w: Value
    targets: Value
    tangent: Value
    softmax: int
    forward: int  # the nll_loss
    backward: int
    grad_x: int
    grad_w: int
    again: tuple[int, ...]  # the ops that compute w again in the backward pass
    replaced: frozenset[int]
    literals: tuple[int, int]  # the index of targets that are ignored, torch's number of the reduction


def chunked_loss(graph: Graph, rows: int = ROWS) -> Graph:
    """The graph with every such loss in chunks of `rows` tokens; the same graph where it has none."""
    losses = losses_of(graph)
    return _rewritten(graph, losses, rows) if losses else graph


def losses_of(graph: Graph) -> list[Loss]:
    candidates = (_loss(graph, i) for i, op in enumerate(graph.ops) if op.target == "aten._log_softmax.default")
    return [loss for loss in candidates if loss is not None]


def _loss(graph: Graph, softmax: int) -> Loss | None:
    """The loss around a softmax; None where it is another."""
    before = _back_to_matmul(graph, graph.ops[softmax].inputs[0])
    around = _around(graph, softmax)
    if not before or around is None:
        return None
    logits, (nll, nll_backward, gradient, between) = before[-1], around
    x, w = graph.ops[logits].inputs
    after = _views_and_casts(graph, gradient)
    gradients = _gradients(graph, (after[-1], 0), x, w)
    shapes = {graph.tensor((i, 0)).shape for i in (logits, softmax, gradient, after[-1])}
    op, args = graph.ops[nll], graph.ops[nll].literals[0]
    is_plain = len(op.inputs) == 2 and len(args) == 5 and args[2] is None and args[3] in (1, 2)  # no class weights; the mean or the sum
    if gradients is None or len(shapes) > 1 or graph.tensor((softmax, 0)).dtype not in WIDE or not is_plain:
        return None
    grad_x, grad_w, again, transposes = gradients
    replaced = frozenset((*before, softmax, *between, nll, nll_backward, *after, grad_x, grad_w, *transposes))
    reduction, ignored = args[3:5]
    tangent = graph.ops[nll_backward].inputs[0]
    return Loss(x, w, op.inputs[1], tangent, softmax, nll, nll_backward, grad_x, grad_w, again, replaced, (ignored, reduction))


def _back_to_matmul(graph: Graph, value: Value) -> list[int]:
    """The ops from a value, views and casts, back to the matmul that it is of; empty where others read what is between."""
    ops: list[int] = []
    while graph.only_user(value) is not None:
        op = graph.ops[value[0]]
        ops.append(value[0])
        if op.target == MATMUL:
            return ops
        if op.target not in (*VIEWS, CAST):
            break
        value = op.inputs[0]
    return []


def _around(graph: Graph, softmax: int) -> tuple[int, int, int, list[int]] | None:
    """The nll_loss of a softmax, its backward, the softmax's backward, and the views between; None where something isn't as expected."""
    ends: dict[str, int] = {}
    views: list[int] = []
    waiting: list[Value] = [(softmax, 0)]
    while waiting:
        value = waiting.pop()
        if value in graph.returned:
            return None
        for i, _ in graph.users.get(value, ()):
            op = graph.ops[i]
            if op.target in VIEWS:
                views.append(i)
                waiting.append((i, 0))
            elif op.target in ends:
                return None
            else:
                ends[op.target] = i
    names = ("aten.nll_loss_forward.default", "aten.nll_loss_backward.default", "aten._log_softmax_backward_data.default")
    if set(ends) != set(names):
        return None
    nll, nll_backward, gradient = (ends[name] for name in names)
    alone = graph.only_user((nll_backward, 0)) == gradient and graph.only_user((nll, 1)) == nll_backward
    return (nll, nll_backward, gradient, views) if alone else None


def _views_and_casts(graph: Graph, i: int) -> list[int]:
    """An op, and the views and casts of its value that follow, as long as they have one reader each."""
    ops = [i]
    while (user := graph.only_user((ops[-1], 0))) is not None and graph.ops[user].target in (*VIEWS, CAST):
        ops.append(user)
    return ops


def _gradients(graph: Graph, g: Value, x: Value, w: Value) -> tuple[int, int, tuple[int, ...], list[int]] | None:
    """The matmuls of the gradients of x and of w', the ops that compute w again, and the transposes that only the matmuls read."""
    users = [i for i, _ in graph.users.get(g, ())]
    transposes = [i for i in users if graph.ops[i].target == TRANSPOSE]
    products = [i for i in users if graph.ops[i].target == MATMUL and graph.ops[i].inputs[0] == g]
    if g in graph.returned or len(users) != 2 or len(transposes) != 1 or len(products) != 1:
        return None
    of_w = graph.only_user((transposes[0], 0))
    turned = graph.ops[products[0]].inputs[1]
    if of_w is None or graph.ops[of_w].inputs != ((transposes[0], 0), x) or graph.ops[of_w].target != MATMUL:
        return None
    if graph.ops[turned[0]].target != TRANSPOSE or (again := _computed_again(graph, w, graph.ops[turned[0]].inputs[0])) is None:
        return None
    return products[0], of_w, again, [*transposes, *([turned[0]] if graph.only_user(turned) is not None else [])]


def _computed_again(graph: Graph, w: Value, other: Value) -> tuple[int, ...] | None:
    """The ops that compute the other value by the casts and views that compute w; none where it is w itself, None where it is no w."""
    ops: list[int] = []
    while w != other:
        one, again = graph.ops[w[0]], graph.ops[other[0]]
        if one.target not in (TRANSPOSE, CAST, *VIEWS) or (one.target, one.literals) != (again.target, again.literals):
            return None
        ops.insert(0, other[0])
        w, other = one.inputs[0], again.inputs[0]
    return tuple(ops)


def _rewritten(graph: Graph, losses: list[Loss], rows: int) -> Graph:
    starts = {loss.forward: loss for loss in losses} | {loss.backward: loss for loss in losses}
    left_out = frozenset().union(*(loss.replaced for loss in losses))
    new = Rewriting(graph)
    for i in range(len(graph.ops)):
        if i in starts:
            for j in starts[i].again if i == starts[i].backward else ():
                if (j, 0) not in new.values:
                    new.keep(j)  # earlier than it was
            op, values = _new_op(graph, starts[i], rows, backward=i == starts[i].backward)
            at, _ = new.add(replace(op, inputs=tuple(map(new.read, op.inputs))))
            new.values |= {value: (at, k) for k, value in enumerate(values)}
        elif i not in left_out and (i, 0) not in new.values:
            new.keep(i)
    return new.graph()


def _new_op(graph: Graph, loss: Loss, rows: int, *, backward: bool) -> tuple[Op, tuple[Value, ...]]:
    """The op in place of a loss, with inputs that are values of the graph, and the values of the graph that it computes."""
    total, logsumexp = (loss.forward, 1), (loss.forward, 2)
    inputs: tuple[Value, ...] = (loss.x, loss.w, loss.targets)
    if backward:
        w = (loss.again[-1], 0) if loss.again else loss.w
        inputs = (loss.tangent, loss.x, w, loss.targets, total, logsumexp)
    literals = ((*map(Ref, range(len(inputs))), *loss.literals, rows), ())
    old, target = (graph.ops[loss.backward], BACKWARD) if backward else (graph.ops[loss.forward], FORWARD)
    if backward:
        values: tuple[Value, ...] = ((loss.grad_x, 0), (loss.grad_w, 0))
        outputs = tuple(graph.tensor(value) for value in values)
    else:
        values = ((loss.forward, 0), total, logsumexp)
        outputs = (*map(graph.tensor, values[:2]), Tensor(graph.tensor(loss.targets).shape, graph.tensor(total).dtype))
    return Op(f"{old.name}.chunked", target, inputs, literals, outputs, module=old.module, backward=backward), values

"""The plan of a choice: layouts by name, with the certificate, the fingerprint, the assumptions, and what fills time and memory."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from autoshard.cost import registered_prices
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import KINDS, Formulation, op_collectives
from autoshard.graph import ACCUMULATED, KEPT, Graph, Tensor, is_drawn_in_full, is_random
from autoshard.layout import Layout, local_numel, parse, text
from autoshard.mesh import Mesh
from autoshard.planning.advice import Advice, advised
from autoshard.planning.baselining import step_seconds
from autoshard.planning.keeping import packed
from autoshard.planning.options import Options
from autoshard.planning.variants import Answered
from autoshard.problem import evaluate
from autoshard.solution import VERSION, Placed, Solution, json_hash, price_errors
from autoshard.solvers import Answer
from autoshard.strategies import is_experts

Choice = Sequence[int]


def described(answered: Answered, advice: Sequence[Advice] = ()) -> Solution:
    """The plan of an answered question, with advice unless Ctrl-C ended the search."""
    question, options = answered.question, answered.question.options
    if options.recompute == "auto":
        options = replace(options, recompute=0)  # no block: what was chosen per tensor is among the assumptions
    with question.clock.phase("describe", "writing the plan", 0.95), no_search_for_cycles():
        formulated = answered.instance.formulated
        solution = describe(formulated, answered.plan, options, answered.baselines, question.assumptions)
    if options.baselines and answered.plan.choice is not None:
        solution.breakdown["step_seconds"] = step_seconds(formulated, answered.plan.choice)
    if (shortest := answered.overlapped) is not None:
        prices = price_errors(solution.mesh, options.objective)
        solution = replace(solution, overlapped=shortest.to_dict(), status=shortest.status(options.gap).value, prices=prices)
    if advice and not answered.plan.interrupted:
        solution = advised(answered, solution, advice)
    return replace(solution, seconds=question.clock.seconds())


def describe(formulated: Formulation, answer: Answer, options: Options, baselines: Mapping[str, dict], assumptions: Mapping) -> Solution:
    """The answer by name: layouts, certificate, baselines, ops without rules, and the assumptions."""
    assert answer.choice is not None
    graph, mesh, problem, choice = formulated.graph, formulated.mesh, formulated.problem, answer.choice
    noted = {
        **options.noted(),
        "torch_version": torch.__version__.split("+")[0],
        "autoshard_version": VERSION,
        "axes": [axis.link_dict() for axis in mesh.axes],
        "device": mesh.device.name,
        "inputs": {op.name: list(op.output.shape) for op in graph.ops if op.kind == "input"},  # global shapes
        **({"cost_model": mesh.cost_model.name} if mesh.cost_model is not None else {}),
        **({"expert_imbalance": mesh.expert_imbalance} if any(map(is_experts, graph.ops)) else {}),
        **({"random_numbers_per_shard": drawn} if (drawn := drawn_per_shard(formulated, choice)) else {}),
        **assumptions,
    }
    layouts, results, peak = layouts_of(formulated, choice), results_of(formulated, choice), peak_of(formulated, choice)
    return Solution(
        layouts=layouts,
        results=results,
        mesh=mesh,
        cost=answer.cost,
        bound=min(answer.bound, answer.cost),
        status=answer.status.value,
        solver=answer.solver,
        peak_bytes=sum(peak["parts"].values()),
        peak=peak,
        training=graph.trains,
        baselines=dict(baselines),
        replicated_ops=replicated_ops(formulated, choice),
        parameters=parameters_of(formulated, choice),
        breakdown=breakdown(formulated, choice),
        counts={
            "nodes": len(problem.node_costs),
            "choices": sum(len(c) for c in problem.node_costs),
            "edges": len(problem.edges),
            "distinct_signatures": formulated.candidates.num_signatures,
        },
        fingerprint={**fingerprint(graph, mesh, options), "layouts": packed(layouts, results)},
        assumptions=noted,
        prices=price_errors(mesh),
    )


def fingerprint(graph: Graph, mesh: Mesh, options: Options) -> dict[str, str]:
    """Hashes of what a plan depends on; equal on every machine."""
    prices = mesh.to_dict()
    if own := registered_prices(op.target for op in graph.ops):
        prices["registered"] = own
    return {
        "graph": graph.fingerprint(),
        "structure": graph.structure(),
        "mesh": json_hash(list(mesh.shape)),
        "prices": json_hash(prices),
        "options": json_hash(options.compared()),
    }


def layouts_of(formulated: Formulation, choice: Choice) -> dict[str, Placed]:
    """Layouts by op name, in graph order."""
    layouts: dict[str, Placed] = {}
    shared: dict[tuple, Placed] = {}  # by candidate, which equal ops share, and layouts of hubs
    for i, op in enumerate(formulated.graph.ops):
        candidate = formulated.candidate(i, choice)
        hubs = [formulated.hub((i, k), choice) for k in range(len(op.outputs))]
        key = (id(candidate), *map(id, hubs))
        if key not in shared:
            shared[key] = Placed(tuple(map(text, candidate.inputs)), _texts(candidate.outputs), _texts(hubs))
        layouts[op.name] = shared[key]
    for second, name in formulated.graph.tied:
        if second in layouts:
            layouts[second] = layouts[name]
    return layouts


def _text(layout: Layout | None) -> str:
    assert layout is not None
    return text(layout)


def _texts(layouts: Sequence[Layout | None]) -> tuple[str | None, ...]:
    return tuple(None if layout is None else text(layout) for layout in layouts)


def results_of(formulated: Formulation, choice: Choice) -> dict[str, str]:
    """The layout of each result, `output:0` or `gradient:NAME`."""
    results = formulated.graph.results
    return {f"{results[k].kind}:{results[k].name}": text(formulated.result(k, choice)) for k in formulated.results}


def choice_of(formulated: Formulation, solution: Solution) -> tuple[int, ...]:
    """The inverse of `layouts_of` and `results_of`; ValueError where the plan has a layout that is no longer a candidate."""
    choice = [0] * len(formulated.problem.node_costs)
    tied = dict(formulated.graph.tied)
    for i, op in enumerate(formulated.graph.ops):
        placed = solution.layouts[tied.get(op.name, op.name)]
        outputs = tuple(None if written is None else parse(written) for written in placed.outputs)
        inputs = tuple(parse(written) for written in placed.inputs)
        same = [k for k, c in enumerate(formulated.candidates.of[i]) if (tuple(c.inputs), tuple(c.outputs)) == (inputs, outputs)]
        if not same:
            raise ValueError(f"{op.name}: no candidate of today's rules has the plan's input and output layouts; plan again")
        choice[i] = min(same, key=lambda k: float(formulated.problem.node_costs[i][k]))
        for k, written in enumerate(placed.hubs):
            if written is not None and (i, k) in formulated.hubs:
                choice[formulated.hubs[i, k]] = _place(formulated.hub_layouts[i, k], written, op.name)
    for k, node in formulated.results.items():
        result = formulated.graph.results[k]
        if node >= len(formulated.graph.ops):
            choice[node] = _place(formulated.result_layouts[k], solution.results[f"{result.kind}:{result.name}"], result.name)
    return tuple(choice)


def _place(layouts: Sequence[Layout], written: str, name: str) -> int:
    """Which of the layouts of a hub or a result is meant."""
    if parse(written) not in layouts:
        raise ValueError(f"{name}: the plan's layout {written} is none of today's rules; plan again")
    return list(layouts).index(parse(written))


def parameters_of(formulated: Formulation, choice: Choice) -> dict[str, dict]:
    """Layout, shape, dtype and local bytes of every parameter, second names of tied ones included."""
    graph, mesh = formulated.graph, formulated.mesh
    second = dict(graph.tied)
    rows = {}
    for name, i in graph.parameters.items():
        if name not in second:
            layout = formulated.candidate(i, choice).outputs[0]
            assert layout is not None
            rows[name] = parameter_row(graph.tensor((i, 0)), layout, mesh)
            for kind in (KEPT, ACCUMULATED):  # with several microbatches: of its copy, and of the sum of its gradients
                if (j := graph.index.get(f"{name}.{kind}")) is not None:
                    rows[name][kind] = _text(formulated.candidate(j, choice).outputs[0])
    for other, name in second.items():
        rows[other] = {**rows[name], "tied_to": name}
    return rows


def parameter_row(tensor: Tensor, layout: Layout, mesh: Mesh) -> dict:
    """Layout, shape, dtype and local bytes of one parameter."""
    local = local_numel(tensor.shape, layout, mesh) * tensor.itemsize
    return {"layout": text(layout), "shape": list(tensor.shape), "dtype": tensor.dtype, "local_bytes": local}


def peak_of(formulated: Formulation, choice: Choice) -> dict:
    """The op during which a device holds most, its bytes by kind (they add up to the peak), and the largest tensors then."""
    problem, ops = formulated.problem_as_run(choice), formulated.graph.ops
    evaluation = evaluate(problem, choice)
    parts = dict.fromkeys(KINDS, 0.0)
    holders: dict[str, float] = defaultdict(float)
    for kind, usage in zip(formulated.held, problem.usages, strict=True):
        if usage.start <= evaluation.peak_time < usage.end:
            held = usage.held(choice)
            parts[kind] += held
            holders[f"{problem.names[usage.ends[-1]]} ({kind.replace('_', ' ')})"] += held
    largest = sorted(((held, name) for name, held in holders.items() if held), key=lambda pair: (-pair[0], pair[1]))[:LARGEST]
    op = ops[evaluation.peak_time] if evaluation.peak_time < len(ops) else None  # None: after the last op, when results are handed over
    return {
        "op": "end" if op is None else op.name,
        "module": "" if op is None else op.module,
        "backward": formulated.graph.trains if op is None else op.backward,
        "parts": {kind: held for kind, held in parts.items() if held},
        "largest": [{"name": name, "bytes": held} for held, name in largest],
    }


LARGEST = 5  # tensors listed


def replicated_ops(formulated: Formulation, choice: Choice) -> tuple[dict, ...]:
    """Ops without rules, by target: how many, and the seconds and bytes that replicating them may hide."""
    graph = formulated.graph
    rows: dict[str, dict] = {}
    for i in formulated.candidates.unknown:
        op = graph.ops[i]
        row = rows.setdefault(op.target, {"target": op.target, "count": 0, "seconds": 0.0, "bytes": 0})
        row["count"] += 1
        row["seconds"] += float(formulated.problem.node_costs[i][choice[i]])
        row["bytes"] += sum(t.bytes for t in op.outputs if t is not None)
    return tuple(rows.values())


def drawn_per_shard(formulated: Formulation, choice: Choice) -> dict[str, int]:
    """By target, how many ops draw other random numbers than one device does (`graph.random.is_drawn_in_full`)."""
    alone = [(i, op) for i, op in enumerate(formulated.graph.ops) if is_random(op) and not is_drawn_in_full(op)]
    return dict(Counter(op.target for i, op in alone if any(p.is_shard() for p in formulated.candidate(i, choice).outputs[0] or ())))


def breakdown(formulated: Formulation, choice: Choice) -> dict:
    """Seconds of the plan by class of op, by collective and axis, and by block; they add up to its cost."""
    graph, mesh, costs = formulated.graph, formulated.mesh, formulated.problem.node_costs
    m = formulated.microbatches
    collectives: dict[tuple[int, int], list[tuple[str, float]]] = {}  # by candidates, which equal ops share, and choice
    compute: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    blocks: dict[str, dict[str, float]] = defaultdict(lambda: {"compute": 0.0, "communication": 0.0})
    for i, op in enumerate(graph.ops):
        seconds = float(costs[i][choice[i]])
        block = block_of(op.name if op.is_placeholder else op.module)
        key = (id(formulated.candidates.of[i]), choice[i])
        if key not in collectives:
            inside = op_collectives(op, graph.input_tensors(i), formulated.candidate(i, choice), mesh)
            collectives[key] = [(f"{one.collective} {mesh.axes[one.axis].name}", m * one.seconds) for one in inside]
        for name, part in collectives[key]:
            communication[name] += part
            blocks[block]["communication"] += part
            seconds -= part
        if seconds:
            compute["optimizer" if op.is_placeholder else ACCUMULATION if op.kind == ACCUMULATED else op_class(op.target)] += seconds
            blocks[block]["compute"] += seconds
    for link in formulated.tensor_edges:
        route = formulated.route(link, choice)
        reader = graph.ops[link.b] if link.b < len(graph.ops) else graph.ops[link.value[0]]
        block = block_of(reader.name if reader.is_placeholder else reader.module)
        for step in route.steps if route else ():
            communication[f"{step.collective} {mesh.axes[step.axis].name}"] += link.times * step.seconds
            blocks[block]["communication"] += link.times * step.seconds
    return {"compute": dict(compute), "communication": dict(communication), "blocks": dict(blocks)}


ACCUMULATION = "accumulation"  # adding up the gradients of microbatches
CLASSES = (
    ("matmul", r"\.(mm|addmm|bmm|baddbmm|linear|matmul)\."),
    ("experts", r"\.(biased_)?experts"),
    ("attention", r"scaled_dot_product|attention"),
    ("convolution", r"convolution"),
    ("recurrent", r"\.(mkldnn_rnn|recurrent)_layer|\.delta_rule"),
    ("embedding", r"embedding"),
    ("loss", r"nll_loss|log_softmax|cross_entropy|mse_loss|chunked_loss"),
    ("norm", r"norm"),
)


@lru_cache(maxsize=4096)
def op_class(target: str) -> str:
    return next((name for name, pattern in CLASSES if re.search(pattern, target)), "elementwise")


@lru_cache(maxsize=65536)
def block_of(path: str) -> str:
    """`h.0.attn.c_attn` -> `h.0`: up to the first number; without one the first part."""
    numbered = re.match(r"(.*?\.\d+)(\.|$)", path)
    return numbered[1] if numbered else path.split(".")[0]

"""Tensor and pipeline degrees for serving, each with its memory, and the seconds of prefill and decode.

D devices are r = D / (t p) replicas of t tensor parallel times p pipeline parallel devices; a replica serves b = ceil(batch / r)
sequences, in m = min(p, b) groups that follow each other through the stages. With s_k the seconds of stage k and x those of a
transfer between stages:

    time to first token    sum_k s_k + (p - 1) x                                 one prompt of `prompt` tokens, alone
    time per output token  max( sum_k (s_k + x),  m max_k (s_k + x) )            ceil(b / m) sequences per group; x = 0 where p = 1
    tokens per second      r b n / ( max( sum_k, b max_k )(prefill s_k + x) + n * time per output token ),      n = max_tokens - prompt
    memory                 weights + b sum over the stage's layers of CachedLayer.bytes(max_tokens, t) + activations, of the fullest device

Experts are sharded over the t devices: whole experts where t divides their number e, else g = t / gcd(e, t) parts of each, along the
features; either way a device has 1 / t of their bytes and of their work. With expert parallelism they are sharded over all r t devices of a
stage, whole ones; the replicas then take their steps together and send tokens to each other.

A decode step reads (prompt + max_tokens) / 2 stored tokens per sequence: the mean over the answer. Kernels are replayed from CUDA
graphs, so launching them takes no time, unless `eager`. More tensor parallel devices than key-value heads hold copies of the heads.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

from torch import nn

from autoshard.cost import axis_transfer_seconds, presets
from autoshard.graph import LARGE, Graph, resized
from autoshard.mesh import DEVICES_PER_NODE, Mesh
from autoshard.options import count
from autoshard.planning import Progress
from autoshard.serving.kv_cache import text_config
from autoshard.serving.projections import divided
from autoshard.serving.step_prices import StepPrice, price_of
from autoshard.serving.steps import Steps, expert_fields, steps_of
from autoshard.solution import Solution
from autoshard.units import size

MOST_TOKENS = 10**12  # of all sequences: torch can't describe a cache of 2 ** 63 bytes
MeshMaker = Callable[[tuple[int, int, int]], Mesh]  # of (replicas, pipeline, tensor)


@dataclass(frozen=True)
class ServeRow:
    """One pair of degrees. Bytes are those of the fullest device; nothing is known (inf) where `why` says that the model can't be shared
    out like this."""

    tensor: int
    pipeline: int
    replicas: int
    why: str = ""  # why it is not legal or does not fit; "" where it is and does
    seconds_to_first_token: float = math.inf
    seconds_per_token: float = math.inf
    tokens_per_second: float = 0.0  # of all replicas, prefills included
    weight_bytes: float = math.inf
    cache_bytes: float = math.inf
    activation_bytes: float = math.inf
    memory_bytes: float = math.inf
    most_sequences: int = 0  # that fit in memory, of all replicas
    copies: int = 1  # of every key-value head
    replicated_bytes: float = 0.0  # of the layers' matrices that every device has, all stages together
    expert_bytes: float = 0.0  # of the weights: those of experts

    @property
    def fits(self) -> bool:
        return not self.why

    def to_dict(self) -> dict:
        """The fields, and `fits`; None for what is not known."""
        return {"fits": self.fits} | {key: None if value == math.inf else value for key, value in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class ServePlan:
    """All degrees: those that fit first, most tokens per second first."""

    rows: tuple[ServeRow, ...]
    devices: int
    device: str
    batch: int
    max_tokens: int
    prompt: int
    memory_limit: float  # bytes per device
    solution: Solution | None = None  # layouts of a prefill in few layers, for `export`: module styles are equal in all layers

    @property
    def best(self) -> ServeRow | None:
        """The first row, if it fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def to_dict(self) -> dict:
        """As `autoshard serve-plan --json` prints it."""
        facts = {name: getattr(self, name) for name in ("devices", "device", "batch", "max_tokens", "prompt")}
        return {**facts, "memory_limit_bytes": self.memory_limit, "configurations": [row.to_dict() for row in self.rows]}


def serve_plan(
    model: nn.Module,
    devices: int,
    *,
    max_tokens: int,
    batch: int,
    prompt: int | None = None,
    device: str = "h100",
    memory_limit: float | None = None,
    devices_per_node: int = DEVICES_PER_NODE,
    mesh_of: MeshMaker | None = None,
    expert_parallel: bool = False,
    eager: bool = False,
    progress: Progress | None = None,
) -> ServePlan:
    """Tensor and pipeline degrees for serving a Hugging Face model on so many devices, with `batch` sequences at a time.

    max_tokens: of a sequence, prompt and answer, for which the cache has room. prompt: its tokens (default: half of them). device: one
    of `autoshard calibrate show`. memory_limit: bytes per device (default: all it has). mesh_of: other prices, a function of
    (replicas, pipeline, tensor). expert_parallel: experts are sharded over the devices of all replicas, as vLLM's --enable-expert-parallel
    and SGLang's --ep-size do it. eager: every kernel is launched from the host. The model may be on the meta device, and never runs.
    ValueError on numbers below 1, for models whose steps can't be priced, and on expert_parallel for a model without experts.
    """
    asked = {"devices": devices, "max_tokens": max_tokens, "batch": batch, "devices_per_node": devices_per_node}
    for name, value in asked.items():
        count().check(name, value)
    if batch * max_tokens > MOST_TOKENS:
        raise ValueError(f"batch is {batch} and max_tokens {max_tokens}; expected {MOST_TOKENS:.0e} tokens of all sequences at most")
    prompt = max(max_tokens // 2, 1) if prompt is None else prompt
    if type(prompt) is not int or not 1 <= prompt < max_tokens:
        raise ValueError(f"prompt is {prompt!r} tokens; expected at least 1 and fewer than max_tokens, {max_tokens}")
    make = mesh_of or (lambda shape: presets.mesh(device, shape, min(devices_per_node, devices)))
    limit = make((devices, 1, 1)).device.memory if memory_limit is None else memory_limit
    if type(limit) not in (int, float) or not limit > 0:
        raise ValueError(f"memory_limit is {limit!r}; expected bytes per device above 0, for example 80e9")
    pricer = _Pricer(model, make, eager, expert_parallel)
    pairs = [(t, p) for t in _divisors(devices) for p in _divisors(devices // t)]
    rows = []
    for k, (t, p) in enumerate(pairs):
        if progress is not None:
            progress(f"pricing tensor {t} pipeline {p}", k / len(pairs))
        rows.append(_row(pricer, ServeRow(t, p, devices // (t * p)), batch, prompt, max_tokens, limit))
    rows.sort(key=lambda row: (not row.fits, -row.tokens_per_second, row.memory_bytes, row.tensor, row.pipeline))
    apart = (row.tensor for row in rows if row.tensor > 1 and row.fits and (row.copies == 1 or pricer.steps(None, 1).latents))
    sharded = next(apart, None)
    solution = None if sharded is None else pricer.price("prefill", sharded, 1, 1, prompt, modules=True).solution
    return ServePlan(tuple(rows), devices, make((devices, 1, 1)).device.name, batch, max_tokens, prompt, limit, solution)


def _divisors(n: int) -> Iterator[int]:
    return (k for k in range(1, n + 1) if n % k == 0)


class _Pricer:
    """Prices of steps; each is worked out once."""

    def __init__(self, model: nn.Module, make: MeshMaker, eager: bool, expert_parallel: bool):
        self.config, self.make, self.eager, self.expert_parallel = text_config(model), make, eager, expert_parallel
        self.fields = expert_fields(self.config)
        if expert_parallel and self.fields is None:
            raise ValueError(f"expert_parallel is for mixtures of experts, but {type(model).__name__} has no experts; leave it out")
        self.steps = cache(lambda heads, parts: steps_of(model, heads, parts))
        self.captured = cache(lambda kind, of, batch, tokens: getattr(self.steps(*of), kind)(batch, tokens))
        self.price = cache(self._price)

    def built(self, tensor: int) -> tuple[int | None, int]:
        """The number of key-value heads with copies, where there are fewer than devices; and in how many parts an expert is."""
        heads = tensor if any(layer.copies(tensor) > 1 for layer in self.steps(None, 1).cache) else None
        parts = 1 if self.fields is None or self.expert_parallel else tensor // math.gcd(tensor, getattr(self.config, self.fields.number))
        return heads, parts

    def graph(self, kind: str, tensor: int, batch: int, tokens: int) -> Graph:
        """The step "prefill" or "decode", captured once for all batches above 1, where that is possible."""
        captured = partial(self.captured, kind, self.built(tensor))
        try:
            return captured(1, tokens) if batch == 1 else resized(captured(LARGE, tokens), batch)
        except (ValueError, RuntimeError):  # a size above LARGE, too many bytes at LARGE, or an error of the capture, which comes again
            return captured(batch, tokens)

    def _price(self, kind: str, tensor: int, replicas: int, batch: int, tokens: int, modules: bool = False) -> StepPrice:
        mesh = self.make((replicas, 1, tensor))
        device, kernels = mesh.device, mesh.device.kernels
        if not self.eager:  # a graph of kernels, which the host launches at once
            device = replace(device, launch=0.0, kernels=kernels and replace(kernels, host=0.0))
        axes = (mesh.axes[0], mesh.axes[2]) if replicas > 1 else mesh.axes[2:]
        graph = self.graph(kind, tensor, replicas * batch, tokens)
        return price_of(self.steps(*self.built(tensor)), graph if modules else divided(graph), Mesh(axes, device), modules)

    def why_not(self, tensor: int, pipeline: int, replicas: int) -> str:
        """Why the model can't be shared out like this; "" where it can."""
        steps: Steps = self.steps(None, 1)
        if self.fields is not None and self.expert_parallel and getattr(self.config, self.fields.number) % (tensor * replicas):
            return f"{getattr(self.config, self.fields.number)} experts don't divide by {tensor * replicas}"
        if pipeline > len(steps.cache):
            return f"{len(steps.cache)} layers for {pipeline} stages"
        of_experts = "" if self.fields is None else self.fields.features
        names = ["num_attention_heads", "intermediate_size", of_experts]
        for name in (one for one in names if not (self.expert_parallel and one == of_experts)):
            number = getattr(self.config, name, None)
            if isinstance(number, int) and number % tensor:
                return f"{name} {number} doesn't divide by {tensor}"
        uneven = next((one for one in steps.cache if one.heads % tensor and tensor % one.heads), None)
        return "" if uneven is None else f"{uneven.heads} key-value heads don't divide by {tensor}, nor it by them"


def _row(pricer: _Pricer, row: ServeRow, batch: int, prompt: int, max_tokens: int, limit: float) -> ServeRow:
    t, p, r = row.tensor, row.pipeline, row.replicas
    if why := pricer.why_not(t, p, r):
        return replace(row, why=why)
    sequences = -(-batch // r)
    groups = min(p, sequences)
    size = -(-sequences // groups)
    steps: Steps = pricer.steps(None, 1)
    axis = pricer.make((r, p, t)).axes[1] if p > 1 else None
    together = r if pricer.expert_parallel else 1  # replicas that take a step together
    mean = (prompt + max_tokens) // 2
    prefill, decode = pricer.price("prefill", t, together, 1, prompt), pricer.price("decode", t, together, size, mean)
    # from the last stage the new tokens go back to the first
    sent = [0.0 if axis is None else axis_transfer_seconds(tokens * steps.hidden * steps.itemsize, axis) for tokens in (prompt, size)]
    of_prompt, of_token = ([seconds + x for seconds, _, _ in price.stages(p)] for price, x in zip((prefill, decode), sent))
    first = prefill.seconds + (p - 1) * sent[0]
    token = max(sum(of_token), groups * max(of_token))
    answer = max_tokens - prompt
    stages = [(weights, sum(steps.cache[i].bytes(max_tokens, t) for i in part)) for _, weights, part in decode.stages(p)]
    activations = max(prefill.activations, decode.activations)
    weights, stored = max(stages, key=lambda stage: stage[0] + sequences * stage[1])
    memory = weights + sequences * stored + activations
    # the activations of a decode step grow with the sequences
    most = min(int(min((limit - w - prefill.activations) // s, (limit - w) // (s + decode.activations / sequences))) for w, s in stages)
    why = "" if memory <= limit else _why_too_large(weights, activations, limit, most * r)
    return replace(
        row, why=why, seconds_to_first_token=first, seconds_per_token=token,
        tokens_per_second=batch * answer / (max(sum(of_prompt), sequences * max(of_prompt)) + answer * token),
        weight_bytes=weights, cache_bytes=sequences * stored, activation_bytes=activations, memory_bytes=memory,
        most_sequences=max(most, 0) * r, copies=max(layer.copies(t) for layer in steps.cache),
        replicated_bytes=prefill.replicated, expert_bytes=prefill.experts,
    )  # fmt: skip


def _why_too_large(weights: float, activations: float, limit: float, most: int) -> str:
    if most <= 0:
        return f"weights of {size(weights)} and activations of {size(activations)} leave no room for a sequence in {size(limit)}"
    return f"the cache is too large: {most} sequences fit"

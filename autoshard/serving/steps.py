"""The steps of a serving engine as graphs of few layers: the prefill of a prompt, and the decode of one token for each of a batch.

An engine keeps keys and values in pages and reads them where they are. A decode step as transformers runs it copies them: a
DynamicCache concatenates, repeat_kv writes every key-value head once per query head. So the graphs that are priced here have another
attention and another cache: attention reads the stored keys and values once, and those of the new tokens beside them. These graphs are
priced and never run; `kv_cache.empty_cache` has the caches of transformers, for plans that run.

Multi-head latent attention keeps one compressed key c and a rotary part r per token. With W_k and W_v, the matrices that expand c to a
head's keys and values, a decode attends to the stored [c, r] themselves, as engines do (DeepSeek-V2, arXiv 2405.04434, section 2.1.2):

    q (W_k c) = (q W_k) c,    sum of weights (W_v c) = W_v (sum of weights c)    so all heads share one key, whose first part is its value

Layer i of the model is priced as layer `corresponding[i]` of the few: the first and the last periods are themselves, those between
are all like the second one (`capture.depth.containers` compares their shapes and attributes).
"""

import copy
import inspect
import re
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.cache_utils import DynamicLayer

from autoshard.capture import Container, cache_name, capture_module, containers, shrunk
from autoshard.graph import Fused, Graph, Op
from autoshard.serving.kv_cache import CachedLayer, cached_layers, on_meta, text_config

PAGED = "autoshard_paged"  # the name of the attention below in transformers' AttentionInterface
# How much of the values, a part of the keys, a kernel of latent attention reads beside them: vLLM 0.20 takes 1.46 times as long as a
# copy of the keys alone on an H200, and 1.23 times on a B200 (benchmarks/study.py latent).
READ_AGAIN = 0.375
PERIODS = 3  # of the repeated layers in the graphs: the first, one between, the last


class Stored(NamedTuple):
    """Keys, or values: those of the new tokens, and those that are stored."""

    new: torch.Tensor
    old: torch.Tensor


class PagedLayer(DynamicLayer):
    """Keys and values that stay where they are; `update` returns them beside the new ones."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return Stored(key_states, self.keys), Stored(value_states, self.values)


def paged_attention(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **unused: Any
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface: causal over new tokens, and all stored ones. Of equal cost, not of equal value: the two
    parts are added without their weights. A single new token is attended to beside stored ones without a kernel of attention of its own: an
    engine has one for both."""
    if isinstance(key, Stored) and hasattr(module, "expand_kv"):
        return _latent_attention(module, query, key, value, scaling)
    new = (key.new, value.new) if isinstance(key, Stored) else (key, value)
    if isinstance(key, Stored) and new[0].shape[2] == 1:
        own, shown = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in new)
        y = shown * (query * own).sum(3, keepdim=True).softmax(3)
    else:
        y = F.scaled_dot_product_attention(query, *new, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=True)
    if isinstance(key, Stored):
        y = y + F.scaled_dot_product_attention(query, key.old, value.old, scale=scaling, enable_gqa=True)
    # a clone: `contiguous` leaves the strides of a dim of size 1, with which torch expands the next weight to the batch (aten.bmm)
    return y.transpose(1, 2).clone(memory_format=torch.contiguous_format), None


def _latent_attention(
    module: Any, query: torch.Tensor, latent: Stored, rotary: Stored, scaling: float | None
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Of one new token, to compressed keys; `old` of both holds compressed key and rotary part beside each other."""
    rank, dims = latent.new.shape[-1], (module.qk_nope_head_dim, module.v_head_dim)
    keys, values = module.kv_b_proj.weight.view(query.shape[1], sum(dims), rank).split(dims, 1)
    plain, turned = query.split((dims[0], rotary.new.shape[-1]), 3)
    query = torch.cat((torch.bmm(plain[:, :, 0].transpose(0, 1), keys).transpose(0, 1)[:, :, None], turned), 3)
    y = latent.new * (query * torch.cat((latent.new, rotary.new), 3)).sum(3, keepdim=True).softmax(3)
    y = y + F.scaled_dot_product_attention(query, latent.old, latent.old[..., :rank], scale=scaling, enable_gqa=True)
    return torch.bmm(y[:, :, 0].transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)[:, None], None


def _reads_once(graph: Graph) -> Graph:
    """The same graph, in which attention reads values once that are a part of its keys."""

    def known(op: Op) -> Op:
        inputs = [graph.storage(value) for value in op.inputs]
        if "attention" not in op.target or inputs[1] != inputs[2]:
            return op
        return replace(op, fused=Fused((1.0, 1.0, READ_AGAIN, *(1.0,) * (len(inputs) - 3)), (1.0,) * len(op.outputs), True))

    return replace(graph, ops=tuple(map(known, graph.ops)))


@dataclass(frozen=True, eq=False)
class Steps:
    """A model as it is served: few of its layers, and what is known of all of them."""

    few: nn.Module  # on the meta device; its forward returns the logits of the last token
    blocks: tuple[str, ...]  # the modules of the few layers, "model.layers.0"
    corresponding: tuple[int, ...]  # for each layer of the model the number of its layer among the few
    cache: tuple[CachedLayer, ...]  # of each layer of the model
    hidden: int  # elements that a layer hands to the next one, per token
    itemsize: int
    latents: int = 0  # where keys are compressed: how many copies of them the tensor parallel devices have, one each

    def prefill(self, prompts: int, tokens: int) -> Graph:
        """Prompts of so many tokens; one for each replica."""
        return self._captured({"input_ids": torch.empty(prompts, tokens, dtype=torch.int64, device="meta")})

    def decode(self, batch: int, tokens: int) -> Graph:
        """One token for each of `batch` sequences, of which so many tokens are stored."""
        dtype = next(p.dtype for p in self.few.parameters() if p.is_floating_point())
        cache = transformers.DynamicCache()
        cache.layers = []
        for k in range(len(self.blocks)):
            one = self.cache[self.corresponding.index(k)]
            dims = (one.key_dim, one.value_dim) if not self.latents else (one.key_dim + one.value_dim,)
            shapes = [(batch, self.latents or one.heads, one.tokens(tokens), d) for d in dims]
            held = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
            cache.layers.append(PagedLayer(held[0], held[-1]))
        ids = torch.empty(batch, 1, dtype=torch.int64, device="meta")
        graph = self._captured({"input_ids": ids, cache_name(self.few) or "cache": cache})
        return _reads_once(graph) if self.latents else graph

    def _captured(self, inputs: dict[str, Any]) -> Graph:
        transformers.AttentionInterface.register(PAGED, paged_attention)  # transformers builds no mask for a name that it doesn't know
        return capture_module(self.few, inputs, training=False).graph


def steps_of(model: nn.Module, key_value_heads: int | None = None, parts: int = 1) -> Steps:
    """The steps of a Hugging Face model. key_value_heads: so many instead of the config's, with every head repeated. parts: an expert's
    features in so many parts, each as an expert of its own: what tensor parallel devices have of experts, whose number they don't divide.

    ValueError for a model that isn't of transformers, or whose attention is not looked up in transformers' AttentionInterface.
    """
    config = text_config(model)
    if not hasattr(sys.modules[_published(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f"{_published(model).__name__} has attention of its own, not that of transformers' AttentionInterface, so its decode step "
            "can't be priced; plan it as it is: autoshard plan hf:DIR --set cache=dynamic"
        )
    is_latent = bool(getattr(config, "kv_lora_rank", None))
    if is_latent and (getattr(config, "index_topk", None) or not any(hasattr(part, "expand_kv") for part in model.modules())):
        raise ValueError(
            f"{_published(model).__name__} keeps compressed keys of which a step reads few (sparse attention), or expands them in a way "
            "that isn't known here, so its decode step can't be priced; plan it as it is: autoshard plan hf:DIR --set cache=dynamic"
        )
    latents, key_value_heads = (key_value_heads or 1, None) if is_latent else (0, key_value_heads)
    if key_value_heads is not None or parts > 1:
        model = _rebuilt(model, key_value_heads, parts)
    name = _layers_of(model)
    total = len(model.get_submodule(name))  # type: ignore[arg-type]
    container = next((c for c in containers(model) if c.name == name), None)
    depth = total if container is None else container.depth(PERIODS)
    few = on_meta(model if depth == total else shrunk(model, {name: depth}))
    for one in {id(c): c for c in (few.config, text_config(few))}.values():
        one._attn_implementation = PAGED
    _returns_last_logits(few)
    for part in few.modules() if is_latent else ():
        _leaves_stored_keys(part)
    transformers.AttentionInterface.register(PAGED, paged_attention)
    held, corresponding = cached_layers(few), _corresponding(total, depth, container)
    if len(held) != depth:
        raise ValueError(f"{len(held)} of {depth} layers of {type(model).__name__} use the cache; expected all of them")
    blocks = tuple(f"{name}.{k}" for k in range(depth))
    itemsize = next(p.element_size() for p in few.parameters() if p.is_floating_point())
    return Steps(few, blocks, corresponding, tuple(held[k] for k in corresponding), config.hidden_size, itemsize, latents)


def _published(model: nn.Module) -> type:
    """The class of transformers: `hf:` makes subclasses of it that have its module's name."""
    return next(kind for kind in type(model).__mro__ if vars(sys.modules[kind.__module__]).get(kind.__qualname__) is kind)


def _layers_of(model: nn.Module) -> str:
    """The ModuleList of the model's layers. ValueError where there is none."""
    depth = text_config(model).num_hidden_layers
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == depth]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no ModuleList of its {depth} layers, so its steps can't be priced layer by layer")
    return lists[0]


def _corresponding(total: int, depth: int, container: Container | None) -> tuple[int, ...]:
    if container is None or depth == total:
        return tuple(range(total))
    head, period = container.head, container.period
    last = depth - head - 2 * period  # layers at the end that are themselves: a period, and what is left over
    between = [head + period + (i - head) % period for i in range(head + period, total - last)]
    return (*range(head + period), *between, *range(depth - last, depth))


class ExpertFields(NamedTuple):
    """How a config names its experts: their number, how many a token chooses, their features, and numbers that grow with the first."""

    number: str
    chosen: str
    features: str
    shared: str | None = None


def expert_fields(config: Any) -> ExpertFields | None:
    """The config's names; None where the model has no experts. ValueError where the names are others."""
    number = next((name for name in ("num_local_experts", "num_experts", "n_routed_experts") if getattr(config, name, None)), None)
    if number is None:
        return None
    features = "moe_intermediate_size" if getattr(config, "moe_intermediate_size", None) else "intermediate_size"
    if not isinstance(getattr(config, "num_experts_per_tok", None), int) or not isinstance(getattr(config, features, None), int):
        raise ValueError(f"the config has {number} but not num_experts_per_tok and {features} as numbers, so its experts can't be priced")
    return ExpertFields(number, "num_experts_per_tok", features, "n_shared_experts" if getattr(config, "n_shared_experts", None) else None)


def _rebuilt(model: nn.Module, heads: int | None, parts: int) -> nn.Module:
    """The model with so many key-value heads, and its experts in parts, on the meta device."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if heads is not None:
        if not hasattr(text, "num_key_value_heads"):
            raise ValueError(f"{type(model).__name__} has no num_key_value_heads in its config, so its heads can't be repeated")
        text.num_key_value_heads = heads
    if parts > 1:
        fields = expert_fields(text)
        assert fields is not None
        for name in (fields.number, fields.chosen, fields.shared):
            if name is not None:
                setattr(text, name, getattr(text, name) * parts)
        setattr(text, fields.features, getattr(text, fields.features) // parts)
    with torch.device("meta"):
        return type(model)._from_config(config, dtype=model.dtype).eval()  # type: ignore[attr-defined]


def _returns_last_logits(model: nn.Module) -> None:
    """Makes the model return the logits of the last token alone: its class becomes a subclass whose forward does."""
    original = type(model)
    parameters = inspect.signature(_published(model).forward).parameters  # type: ignore[attr-defined]
    asked = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def forward(self: Any, input_ids: Any, use_cache: bool | None = None, **past: Any) -> Any:
        outputs = original.forward(self, input_ids=input_ids, use_cache=bool(past), **past, **asked)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    model.__class__ = type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


def _leaves_stored_keys(module: nn.Module) -> None:
    """Makes a layer of latent attention hand stored keys on as they are."""
    original = type(module)
    if not hasattr(original, "expand_kv"):
        return

    def expand_kv(self: Any, latent: Any, rotary: Any) -> Any:
        return (latent, rotary) if isinstance(latent, Stored) else original.expand_kv(self, latent, rotary)  # type: ignore[attr-defined]

    module.__class__ = type(original.__name__, (original,), {"expand_kv": expand_kv, "__module__": original.__module__})


def block_of_layer(name: str, blocks: tuple[str, ...]) -> int | None:
    """The number of the layer that a tensor or a block is in; None where it is in none."""
    match = re.match(rf"{re.escape(blocks[0].rpartition('.')[0])}\.(\d+)(\.|$)", name)
    return int(match[1]) if match else None

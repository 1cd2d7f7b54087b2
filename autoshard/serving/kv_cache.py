"""The key-value cache of a Hugging Face model: its shape per layer, its bytes on a device, and cache objects without memory.

    bytes of one sequence in one layer on one of t devices = h_t (d_k + d_v) min(n, window) itemsize          (`CachedLayer.bytes`)
    h_t = h / t where t divides the h key-value heads; 1 where h divides t (each head is on t / h devices)    (`CachedLayer.local_heads`)

With equal layers and d_k = d_v = d this is the usual 2 layers h_t d n itemsize. The shapes come from the model itself: it runs one
token on the meta device with a DynamicCache, and what the cache then holds is what it holds when serving.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicLayer

from autoshard.capture import cache_name, copied

KINDS = ("static", "dynamic")  # transformers.StaticCache, transformers.DynamicCache


@dataclass(frozen=True)
class CachedLayer:
    """What one layer keeps of every token: keys and values of `heads` key-value heads."""

    heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    window: int | None = None  # tokens; sliding attention keeps no more

    def local_heads(self, tensor: int) -> int:
        """The heads on one of `tensor` devices. ValueError where they can't be shared out evenly."""
        if self.heads % tensor and tensor % self.heads:
            raise ValueError(f"{self.heads} key-value heads and {tensor} devices: expected that one divides the other")
        return max(self.heads // tensor, 1)

    def copies(self, tensor: int) -> int:
        """On how many of `tensor` devices each head is."""
        return max(tensor // self.heads, 1)

    def tokens(self, tokens: int) -> int:
        """How many of so many tokens are kept."""
        return tokens if self.window is None else min(tokens, self.window)

    def bytes(self, tokens: int, tensor: int = 1) -> int:
        """Of one sequence of so many tokens, on one of `tensor` devices."""
        return self.local_heads(tensor) * (self.key_dim + self.value_dim) * self.tokens(tokens) * self.itemsize


def text_config(model: nn.Module) -> Any:
    """The config of the language model. ValueError for a model that is not one of transformers'."""
    config = getattr(model, "config", None)
    generates = isinstance(model, transformers.PreTrainedModel) and model.can_generate()
    if not generates or config is None or config.is_encoder_decoder:
        unnamed = isinstance(model, transformers.PreTrainedModel) and not getattr(config, "architectures", None)
        raise ValueError(
            f"the model is a {type(model).__name__}; expected a decoder of transformers that generates text, for example hf:DIR"
            + ", whose config.json names its class, LlamaForCausalLM for example, under architectures" * unnamed
        )
    return config.get_text_config(decoder=True)


def cached_layers(model: nn.Module) -> tuple[CachedLayer, ...]:
    """The cache of every layer that the model runs. ValueError where a layer keeps something else than keys and values."""
    itemsize = next(p.element_size() for p in model.parameters() if p.is_floating_point())
    model = on_meta(model).to(torch.bfloat16)  # some meta kernels (grouped_mm) know no other dtype
    cache = transformers.DynamicCache(config=text_config(model))
    ids, name = torch.zeros(1, 1, dtype=torch.int64, device="meta"), cache_name(model) or "cache"
    with torch.no_grad():
        type(model).forward(model, input_ids=ids, use_cache=True, **{name: cache})
    layers = []
    for k, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and not layer.is_initialized:
            break  # the cache has a layer for each of the config; a model with fewer layers leaves the others as they are
        if not isinstance(layer, DynamicLayer):
            raise ValueError(f"layer {k} keeps a {type(layer).__name__}, not keys and values per token; serving it can't be priced")
        keys, values = layer.keys, layer.values
        window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
        layers.append(CachedLayer(keys.shape[1], keys.shape[-1], values.shape[-1], itemsize, window))
    if not layers:
        raise ValueError(f"{type(model).__name__} puts nothing into its cache; expected a model that generates text token by token")
    return tuple(layers)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device, with caches enabled."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.detach().to("meta")
        return nn.Parameter(there, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there

    model = copied(model, moved)
    text_config(model).use_cache = True
    return model


def empty_cache(model: nn.Module, kind: str, batch: int, tokens: int) -> Any:
    """A cache of transformers on the meta device. static: room for `tokens` tokens; dynamic: it holds tokens - 1, and a step adds one.

    ValueError on an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"cache is {kind!r}; expected {' or '.join(KINDS)}")
    layers, config = cached_layers(model), copy.deepcopy(text_config(model))
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if kind == "static":
        cache = transformers.StaticCache(config=config, max_cache_len=tokens)
        for kept, one in zip(cache.layers, layers):
            heads = torch.empty(batch, one.heads, 1, one.key_dim, dtype=dtype, device="meta")
            kept.lazy_initialization(heads, torch.empty(batch, one.heads, 1, one.value_dim, dtype=dtype, device="meta"))
        return cache
    cache = transformers.DynamicCache(config=config)
    for k, one in enumerate(layers):
        dims = (one.key_dim, one.value_dim)
        cache.update(*(torch.empty(batch, one.heads, one.tokens(tokens) - 1, d, dtype=dtype, device="meta") for d in dims), k)
    return cache

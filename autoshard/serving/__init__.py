"""Which degrees serve a language model: memory with the key-value cache, seconds of prefill and decode, per (tensor, pipeline) degree."""

from .degrees import serve_plan
from .kv_cache import CachedLayer, cached_layers, empty_cache

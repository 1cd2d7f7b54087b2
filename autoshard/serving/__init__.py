"""Which degrees serve a language model: memory with the key-value cache, seconds of prefill and decode, per (tensor, pipeline) degree."""

from autoshard.serving.degrees import serve_plan as serve_plan
from autoshard.serving.kv_cache import CachedLayer as CachedLayer
from autoshard.serving.kv_cache import cached_layers as cached_layers
from autoshard.serving.kv_cache import empty_cache as empty_cache

"""The program to plan, as frozen records without torch, and functions of its structure: repeated blocks, deeper copies, recomputation."""

from .accumulation import ACCUMULATED, KEPT, with_microbatches
from .blocks import repeated_blocks, repetitions
from .casts import REDUCE_THEN_CAST, early_casts, mixed, pending
from .chunked_loss import BACKWARD, FORWARD, ROWS, chunked_loss, losses_of
from .evaluation import is_without_dropout
from .hidden_values import KEEPING, READING, private_values, with_hidden_values
from .order import ATTENTION, Runs, SequenceOrder, in_order, stored_runs
from .random import FACTORIES, ORDER, PER_ELEMENT, RANDOM, SHAPED, drawn_by, is_drawn_in_full, is_random
from .recompute import SUFFIX, checkpointed, forward_blocks, recompute, recompute_ops, recomputed_names
from .records import (
    DELTA_CHUNK, FIRST_MATRIX, ITEMSIZE, WRITES, Const, Fused, Graph, Op, Ref, Result, Tensor, Value, grouped, hash_of, is_dense, leaves,
    reached, replace_refs,
)
from .rewriting import Rewriting
from .selective import OFFLOADED, RELOADED, SELECTED, Alternatives, Chosen, Offload, alternatives, constants, readers_of, selective
from .sized import LARGE, Range, Ranges, SizedGraph, Sizes, corners, grid, middle, resized, size_at, sizes_of, written
from .tile import check, tile
from .upsampling import UPSAMPLED

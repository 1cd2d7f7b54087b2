"""Well-known schemes as pins on a graph: data parallel, FSDP, Megatron tensor parallel, with sequence parallelism; context parallelism."""

from .classes import dim_classes, number_slots
from .context_parallel import CONTEXT_PARALLEL
from .megatron import from_parameters
from .pins import Pin, allowed
from .schemes import MEGATRON_EXPERT_PARALLEL, MEGATRON_EXPERTS, SHARDED_MEGATRON, USUAL, ZERO, baseline, baselines, launched
from .setting import Baseline
from .uses import Group, Use, Uses, parameter_uses

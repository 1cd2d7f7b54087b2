"""Well-known schemes as pins on a graph: data parallel, FSDP, Megatron tensor parallel, with sequence parallelism; context parallelism."""

from autoshard.baselines.classes import dim_classes as dim_classes
from autoshard.baselines.classes import number_slots as number_slots
from autoshard.baselines.context_parallel import CONTEXT_PARALLEL as CONTEXT_PARALLEL
from autoshard.baselines.launched import launched as launched
from autoshard.baselines.megatron import from_parameters as from_parameters
from autoshard.baselines.pins import Pin as Pin
from autoshard.baselines.pins import allowed as allowed
from autoshard.baselines.schemes import MEGATRON_EXPERT_PARALLEL as MEGATRON_EXPERT_PARALLEL
from autoshard.baselines.schemes import MEGATRON_EXPERTS as MEGATRON_EXPERTS
from autoshard.baselines.schemes import SHARDED_MEGATRON as SHARDED_MEGATRON
from autoshard.baselines.schemes import USUAL as USUAL
from autoshard.baselines.schemes import ZERO as ZERO
from autoshard.baselines.schemes import baseline as baseline
from autoshard.baselines.schemes import baselines as baselines
from autoshard.baselines.setting import Baseline as Baseline
from autoshard.baselines.uses import Group as Group
from autoshard.baselines.uses import Use as Use
from autoshard.baselines.uses import Uses as Uses
from autoshard.baselines.uses import parameter_uses as parameter_uses

"""The program to plan, as frozen records without torch, and functions of its structure: repeated blocks, deeper copies, recomputation."""

from autoshard.graph.accumulation import ACCUMULATED as ACCUMULATED
from autoshard.graph.accumulation import KEPT as KEPT
from autoshard.graph.accumulation import with_microbatches as with_microbatches
from autoshard.graph.blocks import Blocks as Blocks
from autoshard.graph.blocks import Place as Place
from autoshard.graph.blocks import repeated_blocks as repeated_blocks
from autoshard.graph.casts import REDUCE_THEN_CAST as REDUCE_THEN_CAST
from autoshard.graph.casts import mixed as mixed
from autoshard.graph.casts import pending as pending
from autoshard.graph.checkpointing import checkpointed as checkpointed
from autoshard.graph.checkpointing import forward_blocks as forward_blocks
from autoshard.graph.recompute import recompute as recompute
from autoshard.graph.records import ITEMSIZE as ITEMSIZE
from autoshard.graph.records import PLACEHOLDERS as PLACEHOLDERS
from autoshard.graph.records import Const as Const
from autoshard.graph.records import Graph as Graph
from autoshard.graph.records import Op as Op
from autoshard.graph.records import Ref as Ref
from autoshard.graph.records import Result as Result
from autoshard.graph.records import Tensor as Tensor
from autoshard.graph.records import Value as Value
from autoshard.graph.records import is_dense as is_dense
from autoshard.graph.records import leaves as leaves
from autoshard.graph.records import replace_refs as replace_refs
from autoshard.graph.tile import check as check
from autoshard.graph.tile import tile as tile

"""The layouts that each op may have on its inputs and outputs: rows for one mesh axis, crossed over all axes."""

from .attention import BACKWARD, FORWARD, LONG, internal_stages, is_long, share_of_flops
from .candidates import REPLICATED, Candidate, Candidates, KnownCandidates, candidates, code, common_candidates, one_axis_rows
from .experts import is_experts, sends_tokens, worked_shapes
from .fusion import fused
from .internal import internal_bytes, internal_collectives, internal_passes
from .partitioning import Keeping, computed_again
from .register import register_rule, registered_rows
from .rows import RULES, Row, argument, rule

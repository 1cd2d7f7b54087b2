"""The layouts that each op may have on its inputs and outputs: rows for one mesh axis, crossed over all axes."""

from autoshard.strategies.attention import BACKWARD as BACKWARD
from autoshard.strategies.attention import FORWARD as FORWARD
from autoshard.strategies.attention import LONG as LONG
from autoshard.strategies.attention import internal_stages as internal_stages
from autoshard.strategies.attention import is_long as is_long
from autoshard.strategies.attention import share_of_flops as share_of_flops
from autoshard.strategies.candidates import REPLICATED as REPLICATED
from autoshard.strategies.candidates import Candidate as Candidate
from autoshard.strategies.candidates import Candidates as Candidates
from autoshard.strategies.candidates import KnownCandidates as KnownCandidates
from autoshard.strategies.candidates import candidates as candidates
from autoshard.strategies.candidates import code as code
from autoshard.strategies.candidates import common_candidates as common_candidates
from autoshard.strategies.candidates import one_axis_rows as one_axis_rows
from autoshard.strategies.experts import is_experts as is_experts
from autoshard.strategies.experts import sends_tokens as sends_tokens
from autoshard.strategies.experts import worked_shapes as worked_shapes
from autoshard.strategies.fusion import fused as fused
from autoshard.strategies.internal import internal_bytes as internal_bytes
from autoshard.strategies.internal import internal_collectives as internal_collectives
from autoshard.strategies.internal import internal_passes as internal_passes
from autoshard.strategies.partitioning import computed_again as computed_again
from autoshard.strategies.register import register_rule as register_rule
from autoshard.strategies.rows import Row as Row
from autoshard.strategies.rows import argument as argument
from autoshard.strategies.rows import rule as rule

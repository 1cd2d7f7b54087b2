"""Seconds and bytes of single operations: collectives over one mesh axis, transfers over a link, the kernel of one op, an optimizer's
step and state. All formulas of the package for these are here.
"""

from .collectives import COLLECTIVES as COLLECTIVES
from .collectives import PricedCollective as PricedCollective
from .collectives import bytes_sent as bytes_sent
from .collectives import collective_seconds as collective_seconds
from .collectives import priced as priced
from .collectives import size_independent_seconds as size_independent_seconds
from .compute import op_flops as op_flops
from .compute import op_seconds as op_seconds
from .host import host_bandwidth as host_bandwidth
from .host import host_seconds as host_seconds
from .host import offload_seconds as offload_seconds
from .links import axes_by_link as axes_by_link
from .links import axis_transfer_seconds as axis_transfer_seconds
from .links import bucket_limit as bucket_limit
from .links import gather_seconds as gather_seconds
from .links import groups_on_link as groups_on_link
from .links import least_joined_seconds as least_joined_seconds
from .links import ring_seconds as ring_seconds
from .links import shared_links as shared_links
from .links import slowest_seconds_per_byte as slowest_seconds_per_byte
from .links import transfer_latency as transfer_latency
from .links import transfer_seconds as transfer_seconds
from .memory import OPTIMIZERS as OPTIMIZERS
from .memory import accumulation_seconds as accumulation_seconds
from .memory import bytes_per_parameter as bytes_per_parameter
from .memory import master_bytes as master_bytes
from .memory import optimizer_state_bytes as optimizer_state_bytes
from .memory import optimizer_step_seconds as optimizer_step_seconds
from .stages import TimedStage as TimedStage
from .stages import in_the_open as in_the_open
from .stages import makespan as makespan
from .stages import timed as timed

"""Seconds and bytes of single operations: collectives over one mesh axis, transfers over a link, the kernel of one op, an optimizer's
step and state. All formulas of the package for these are here.
"""

from .block_prices import MeshPrices, Prices, Seconds
from .caching_allocator import CachingAllocator, OutOfMemory, peak_of_snapshot, replayed
from .collectives import COLLECTIVES, PricedCollective, bytes_sent, collective_seconds
from .compute import EFFICIENCY, Columns, busy_seconds, op_flops, op_seconds
from .curves import load_cluster, load_device, save_cluster
from .curves.files import CLUSTER_FORMAT, save
from .curves.records import Curve, Series, check, tail_slope
from .devices import (
    DeviceConstants, MemoryConstants, StackConstants, device_constants, kernel_columns, memory_constants, memory_errors, spread_of,
    stack_constants,
)
from .kernels import Ring, beside
from .links import (
    Gaps, axes_by_link, axis_transfer_seconds, bucket_limit, gather_seconds, groups_on_link, host_bandwidth, host_seconds,
    least_joined_seconds, offload_seconds, ring_seconds, shared_links, slowest_seconds_per_byte, transfer_latency, transfer_seconds,
)
from .measured_kernels import ATTENTION_TILE, attention_seconds, decode_seconds, experts_seconds, matmul_seconds
from .memory import (
    OPTIMIZERS, accumulation_bytes, bytes_per_parameter, master_bytes, optimizer_state_bytes, optimizer_step_bytes, spare_bytes,
)
from .model import DefaultCosts, cost_of, priced, register_price, registered_prices
from .stages import TimedStage, in_the_open, makespan, timed


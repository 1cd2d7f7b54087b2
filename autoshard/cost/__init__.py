"""Seconds and bytes: collectives over one mesh axis, compute of one op, memory of training."""

from .collectives import COLLECTIVES as COLLECTIVES
from .collectives import bytes_sent as bytes_sent
from .collectives import collective_seconds as collective_seconds
from .compute import op_flops as op_flops
from .compute import op_seconds as op_seconds
from .memory import OPTIMIZERS as OPTIMIZERS
from .memory import bytes_per_parameter as bytes_per_parameter
from .memory import master_bytes as master_bytes
from .memory import optimizer_state_bytes as optimizer_state_bytes
from .memory import optimizer_step_seconds as optimizer_step_seconds

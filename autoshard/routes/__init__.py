"""Redistribution of one tensor: the cheapest sequence of collectives from one layout to another.

The planner computes its costs from these routes, and `lower` executes them.
"""

from .buffers_and_streams import buffer_table, stream_table
from .shortest import Route, Routes, Step
from .transfers import DeviceSet, Message, Transfers

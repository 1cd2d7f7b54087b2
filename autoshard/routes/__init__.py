"""Redistribution of one tensor: the cheapest sequence of collectives from one layout to another.

The planner computes its costs from these routes, and `lower` executes them.
"""

from autoshard.routes.buffers_and_streams import buffer_table as buffer_table
from autoshard.routes.buffers_and_streams import stream_table as stream_table
from autoshard.routes.shortest import Route as Route
from autoshard.routes.shortest import Routes as Routes
from autoshard.routes.shortest import Step as Step
from autoshard.routes.transfers import DeviceSet as DeviceSet
from autoshard.routes.transfers import Message as Message
from autoshard.routes.transfers import Transfers as Transfers

"""Redistribution of one tensor: the cheapest sequence of collectives from one layout to another.

The route that the planner prices is the route that `lower` executes.
"""

from autoshard.routes.buffers import buffer_table as buffer_table
from autoshard.routes.shortest import Route as Route
from autoshard.routes.shortest import Routes as Routes
from autoshard.routes.shortest import Step as Step

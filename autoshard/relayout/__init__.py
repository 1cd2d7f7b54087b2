"""Redistribution of one array between any two block distributions: problems, planners, prices, and the execution of routes.

A BlockLayout shards each dim over any ordered mesh axes in blocks of any size (block, block-cyclic, uneven), which is more than DTensor
placements express. A planner returns the BlockRoute of a BlockProblem: `astar` the cheapest one, with a proof. Plans of models use the
simpler `autoshard.routes`; this package stands beside them.
"""

from autoshard.cost import MeshPrices, Prices

from .blocks import BlockLayout, from_placements, order_of, to_placements
from .packing import packing
from .planners import PLANNERS, astar, naive, priced
from .problems import BlockProblem, BlockRoute, BlockStep, read_problem, read_problems

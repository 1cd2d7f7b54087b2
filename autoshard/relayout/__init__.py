"""Redistribution of one array between any two block distributions: problems, planners, prices, and the execution of routes.

A BlockLayout shards each dim over any ordered mesh axes in blocks of any size (block, block-cyclic, uneven), which is more than DTensor
placements express. A planner returns the BlockRoute of a BlockProblem: `astar` the cheapest one, with a proof. Plans of models use the
simpler `autoshard.routes`; this package stands beside them.

Two parts reproduce a published system, TensorCraft, and stay for comparison: its planner (`memory_constrained` in tensorcraft.py,
`naive`) and its cost model (`IdealPrices` in cost/block_prices.py).
"""

from autoshard.cost import IdealPrices as IdealPrices
from autoshard.cost import MeshPrices as MeshPrices
from autoshard.cost import Prices as Prices
from autoshard.relayout.blocks import BlockLayout as BlockLayout
from autoshard.relayout.packing import holds as holds
from autoshard.relayout.packing import packing as packing
from autoshard.relayout.placements import from_placements as from_placements
from autoshard.relayout.placements import order_of as order_of
from autoshard.relayout.placements import to_placements as to_placements
from autoshard.relayout.planners import PLANNERS as PLANNERS
from autoshard.relayout.planners import astar as astar
from autoshard.relayout.planners import dijkstra as dijkstra
from autoshard.relayout.planners import naive as naive
from autoshard.relayout.planners import priced as priced
from autoshard.relayout.problems import BlockProblem as BlockProblem
from autoshard.relayout.problems import BlockRoute as BlockRoute
from autoshard.relayout.problems import BlockStep as BlockStep
from autoshard.relayout.problems import read_problem as read_problem
from autoshard.relayout.problems import read_problems as read_problems
from autoshard.relayout.tensorcraft import memory_constrained as memory_constrained

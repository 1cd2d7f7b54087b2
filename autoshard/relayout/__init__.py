"""Blocks of arrays moved between arbitrary distributions: a side wing, seeded by TensorCraft's problems."""

from autoshard.cost.block_prices import IdealPrices as IdealPrices
from autoshard.cost.block_prices import MeshPrices as MeshPrices
from autoshard.cost.block_prices import Prices as Prices
from autoshard.relayout.blocks import BlockLayout as BlockLayout
from autoshard.relayout.blocks import local_indices as local_indices
from autoshard.relayout.packing import Packing as Packing
from autoshard.relayout.packing import group_of as group_of
from autoshard.relayout.packing import holds as holds
from autoshard.relayout.packing import packing as packing
from autoshard.relayout.placements import from_placements as from_placements
from autoshard.relayout.placements import is_chunked as is_chunked
from autoshard.relayout.placements import order_of as order_of
from autoshard.relayout.placements import strided_factors as strided_factors
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

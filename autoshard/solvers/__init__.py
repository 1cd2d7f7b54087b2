"""Solvers: they choose one choice per node of a Problem, with a proof. They know numbers only, no tensors and no meshes."""

from autoshard.solvers.compiling import compiled as compiled
from autoshard.solvers.dual_ascent import Messages as Messages
from autoshard.solvers.incumbent import Incumbent as Incumbent
from autoshard.solvers.incumbent import Record as Record
from autoshard.solvers.infeasibility import hopeless as hopeless
from autoshard.solvers.infeasibility import level as level
from autoshard.solvers.linprog import SparseRows as SparseRows
from autoshard.solvers.linprog import linprog as linprog
from autoshard.solvers.memory_hull import LEAST_GAP as LEAST_GAP
from autoshard.solvers.memory_hull import PROVEN_GAP as PROVEN_GAP
from autoshard.solvers.settle import reduce_and_settle as reduce_and_settle

from .answer import TOLERANCE as TOLERANCE
from .answer import Answer as Answer
from .answer import Infeasibility as Infeasibility
from .answer import Status as Status
from .cvx import CVX as CVX
from .dual_ascent import Dual as Dual
from .elimination import DP as DP
from .exchange_parts import parts_that_differ as parts_that_differ
from .exhaustive import Exhaustive as Exhaustive
from .ilp import ILP as ILP
from .memory_hull import Hull as Hull
from .memory_hull import HullPoint as HullPoint
from .memory_hull import hull as hull
from .solve import TIME_LIMIT as TIME_LIMIT
from .solve import Auto as Auto
from .solve import certified as certified
from .solve import converged as converged
from .solve import solve as solve
from .streams import Part as Part
from .streams import best_prices as best_prices
from .streams import priced_by_stream as priced_by_stream
from .streams import seconds_of_choice as seconds_of_choice
from .streams import seconds_of_parts as seconds_of_parts
from .streams import worst_mixture as worst_mixture

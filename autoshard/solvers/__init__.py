"""Solvers: they choose one choice per node of a Problem, with a proof. They know numbers only, no tensors and no meshes."""

from .answer import TOLERANCE, Answer, Infeasibility, Status, relative_gap
from .certificate import certificate, to_record
from .compiling import compiled
from .dual_ascent import Dual, Messages
from .elimination import DP, Exhaustive
from .exchange_parts import parts_that_differ
from .ilp import ILP, write_program
from .incumbent import Incumbent, Record
from .infeasibility import hopeless, level, without_costs
from .linprog import SparseRows, linprog
from .memory_hull import LEAST_GAP, PROVEN_GAP, Hull, HullPoint, hull
from .price_search import mixed
from .settle import reduce_and_settle
from .solve import TIME_LIMIT, Auto, certified, converged, solve
from .streams import Loads, Part, best_prices, priced_by_stream, seconds_of_choice, seconds_of_parts


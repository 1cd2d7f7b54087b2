"""Numbers in, numbers out: pick one choice per node of a Problem, with a proof."""

from .answer import Answer as Answer
from .answer import Infeasibility as Infeasibility
from .answer import Status as Status
from .cvx import CVX as CVX
from .exhaustive import Exhaustive as Exhaustive
from .ilp import ILP as ILP
from .solve import solve as solve

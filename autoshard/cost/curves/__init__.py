"""Measured times of collectives as curves over size: fits, their held-out errors, files."""

from .cluster import load_cluster as load_cluster
from .devices import Family as Family
from .errors import Errors as Errors
from .errors import extrapolated as extrapolated
from .errors import held_out as held_out
from .errors import summary as summary
from .files import load as load
from .files import save as save
from .fit import METHODS as METHODS
from .fit import fit as fit
from .published import Sigmoid as Sigmoid
from .published import all_to_allv_bytes as all_to_allv_bytes
from .published import best_size_rule as best_size_rule
from .published import bus_factor as bus_factor
from .published import turning_points as turning_points
from .published import turning_sizes as turning_sizes
from .rates import Rates as Rates
from .rates import fit_rates as fit_rates
from .records import Curve as Curve
from .records import Series as Series

"""Calibration of prices: measure a live cluster, read logs of other tools, fit curves of collectives and rates of kernels."""

from .cluster import cluster
from .errors import Errors, held_out, pooled, summary
from .fit import fit
from .fitted import Fitted, fitted, nearest
from .importers import parse
from .measure import measure_this_cluster

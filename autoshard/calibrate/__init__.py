"""Calibration of prices: measure a live cluster, read logs of other tools, fit curves of collectives and rates of kernels.

sigmoid.py reproduces a published predictor and stays for comparison: ml_perf_model's sigmoid of collective times.
"""

from .cluster import cluster
from .errors import Errors, extrapolated, held_out, pooled, summary
from .fit import fit
from .fitted import Fitted, fitted, nearest
from .importers import parse
from .measure import measure_this_cluster
from .sigmoid import turning_points, turning_sizes

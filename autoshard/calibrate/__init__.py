"""Calibration of prices: measure a live cluster, read logs of other tools, fit curves of collectives and rates of kernels.

sigmoid.py reproduces a published predictor and stays for comparison: ml_perf_model's sigmoid of collective times.
"""

from autoshard.calibrate.cluster import cluster as cluster
from autoshard.calibrate.errors import Errors as Errors
from autoshard.calibrate.errors import extrapolated as extrapolated
from autoshard.calibrate.errors import held_out as held_out
from autoshard.calibrate.errors import pooled as pooled
from autoshard.calibrate.errors import summary as summary
from autoshard.calibrate.fit import fit as fit
from autoshard.calibrate.fitted import Fitted as Fitted
from autoshard.calibrate.fitted import fitted as fitted
from autoshard.calibrate.fitted import nearest as nearest
from autoshard.calibrate.importers import parse as parse
from autoshard.calibrate.measure import measure_this_cluster as measure_this_cluster
from autoshard.calibrate.sigmoid import turning_points as turning_points
from autoshard.calibrate.sigmoid import turning_sizes as turning_sizes

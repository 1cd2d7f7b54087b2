"""Measured times of collectives as curves over size, and the files of these curves. `autoshard.calibrate` fits them."""

from .device_counts import Family
from .files import load, load_cluster, load_device, save, save_cluster
from .kinds import PchipCurve, bus_factor
from .records import Curve, Series

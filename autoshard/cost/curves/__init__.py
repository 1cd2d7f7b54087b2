"""Measured times of collectives as curves over size, and the files of these curves. `autoshard.calibrate` fits them."""

from .device_counts import Family, bus_factor
from .files import load, load_cluster, load_device, save, save_cluster
from .records import Curve, Series

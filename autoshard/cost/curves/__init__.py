"""Measured times of collectives as curves over size, and the files of these curves. `autoshard.calibrate` fits them."""

from .device_counts import Family as Family
from .files import load as load
from .files import load_cluster as load_cluster
from .files import load_device as load_device
from .files import save as save
from .files import save_cluster as save_cluster
from .kinds import PchipCurve as PchipCurve
from .kinds import Sigmoid as Sigmoid
from .kinds import bus_factor as bus_factor
from .records import Curve as Curve
from .records import Series as Series

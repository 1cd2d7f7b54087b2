"""Measured times of collectives as curves over size, and their files."""

from autoshard.cost.curves.device_counts import Family as Family
from autoshard.cost.curves.files import load as load
from autoshard.cost.curves.files import save as save
from autoshard.cost.curves.records import Curve as Curve
from autoshard.cost.curves.records import Series as Series

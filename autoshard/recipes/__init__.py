"""Training runs as launchers describe them (model sizes, degrees of parallelism, flags): seconds per step and bytes per device."""

from .columns import RECOMPUTE as RECOMPUTE
from .columns import Recipes as Recipes
from .stages import Stages as Stages
from .stages import stages as stages

"""Training runs as launchers describe them (model sizes, degrees of parallelism, flags): seconds per step and bytes per device."""

from autoshard.recipes.memory import USABLE as USABLE
from autoshard.recipes.memory import state_bytes as state_bytes
from autoshard.recipes.step import HIDDEN as HIDDEN
from autoshard.recipes.step import OPTIMIZER_BYTES as OPTIMIZER_BYTES
from autoshard.recipes.step import Machine as Machine
from autoshard.recipes.step import block as block
from autoshard.recipes.step import step_seconds as step_seconds

from .columns import RECOMPUTE as RECOMPUTE
from .columns import Recipes as Recipes
from .memory import chance_to_fit as chance_to_fit
from .memory import fits as fits
from .memory import peak_bytes as peak_bytes
from .predict import illegal as illegal
from .predict import interval as interval
from .predict import predicted_seconds as predicted_seconds
from .predict import tokens_per_second as tokens_per_second
from .stages import Stages as Stages
from .stages import stages as stages

"""Launchers of training runs: their configurations, which can start, how fast they are and how much memory they need, and how far the best
is from the best plan."""

from .best_degrees import degrees
from .checked_launch import check_launch
from .configurations import configuration_text, edited_text, read_configuration
from .fitting import will_fit
from .launch_prices import Site
from .legality import COMPILE_LOSSES, DIVIDE_EXPERTS, why_illegal
from .model_sizes import PADDED, MissingSize, ModelSizes, sizes_of_config, sizes_of_module
from .observed import Evidence, Observed
from .runs import Launch, LaunchConfig, Overrides

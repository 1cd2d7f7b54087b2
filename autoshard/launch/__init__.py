"""Launchers of training runs (torchtitan, Megatron-LM, accelerate, nanotron): their configurations, which can start, how fast they are and
how much memory they need, and how far the best is from the best plan.
"""

from .best_degrees import degrees as degrees
from .checked_launch import check_launch as check_launch
from .configurations import configuration_text as configuration_text
from .configurations import edited_text as edited_text
from .configurations import read_configuration as read_configuration
from .fitting import will_fit as will_fit
from .launch_prices import Site as Site
from .legality import DIVIDE_EXPERTS as DIVIDE_EXPERTS
from .legality import why_illegal as why_illegal
from .model_sizes import ModelSizes as ModelSizes
from .model_sizes import sizes_of_config as sizes_of_config
from .model_sizes import sizes_of_module as sizes_of_module
from .observed import Evidence as Evidence
from .observed import Observed as Observed
from .runs import Launch as Launch
from .runs import LaunchConfig as LaunchConfig
from .runs import Overrides as Overrides

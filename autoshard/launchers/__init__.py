"""Launchers of training runs (torchtitan, Megatron-LM, accelerate, nanotron): their configurations, which can start, and how fast."""

from autoshard.launchers.changes import Change as Change
from autoshard.launchers.changes import best_changes as best_changes
from autoshard.launchers.prices import LaunchPrices as LaunchPrices
from autoshard.launchers.prices import interval as interval
from autoshard.launchers.prices import prices_of as prices_of
from autoshard.launchers.ranking import Ranking as Ranking
from autoshard.launchers.ranking import ranking as ranking

from .configurations import configuration_text as configuration_text
from .configurations import kept_settings as kept_settings
from .configurations import read_configuration as read_configuration
from .launch import Columns as Columns
from .launch import Described as Described
from .launch import Known as Known
from .launch import Launch as Launch
from .legality import LAUNCHERS as LAUNCHERS
from .legality import legal as legal
from .legality import why_illegal as why_illegal
from .prices import Site as Site
from .sizes import ModelSizes as ModelSizes
from .sizes import sizes_of_config as sizes_of_config
from .sizes import sizes_of_module as sizes_of_module

"""From PyTorch models and fx graphs to a Graph. No other package reads fx in order to plan."""

from autoshard.capture.depth import Container as Container
from autoshard.capture.depth import Depth as Depth
from autoshard.capture.depth import capture_deep as capture_deep
from autoshard.capture.depth import same_but_for_sizes as same_but_for_sizes
from autoshard.capture.inputs import constants as constants
from autoshard.capture.inputs import ignored as ignored
from autoshard.capture.inputs import input_names as input_names
from autoshard.capture.module import Captured as Captured
from autoshard.capture.module import Returned as Returned
from autoshard.capture.module import capture as capture
from autoshard.capture.module import capture_fx as capture_fx
from autoshard.capture.module import capture_module as capture_module
from autoshard.capture.module import tied_parameters as tied_parameters
from autoshard.capture.turns import deep_enough as deep_enough
from autoshard.capture.turns import in_turn as in_turn
from autoshard.capture.turns import no_warnings_about_torch as no_warnings_about_torch

"""Models and fx graphs -> Graph. The only reader of fx."""

from autoshard.capture.module import Captured as Captured
from autoshard.capture.module import capture as capture
from autoshard.capture.module import capture_given as capture_given
from autoshard.capture.module import capture_module as capture_module
from autoshard.capture.module import tied_parameters as tied_parameters

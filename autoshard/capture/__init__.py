"""From PyTorch models and fx graphs to a Graph. No other package reads fx in order to plan."""

from .captured import Captured, Returned, is_value
from .delta_rule import delta_rule
from .depth import Container, Depth, capture_deep, containers, graphs_of, same_but_for_sizes, shrunk
from .functional import FACTORING
from .fx_graphs import capture_fx
from .huggingface import cache_name, config_with_defaults, load_huggingface
from .inputs import arguments, computed_in, constants, ignored, input_names, without_process_groups
from .module import capture, capture_module
from .nested_tensors import copied, filled, listed, opened, state_of
from .operators import ATTENTION, BACKWARD, DROPOUT, DROPOUT_BACKWARD, LOSS, LOSS_BACKWARD, REORDER, reorder
from .read import draws
from .replaced import fake_grouped_mm, flex_as_attention
from .sized import dims_of, inputs_at, values_of
from .turns import deep_enough, in_turn, no_warnings_about_torch

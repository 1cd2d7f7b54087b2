"""From a graph, a mesh and the user's demands (pins, limits, kept layouts) to a plan with its proof."""

from .baselining import Regret, regret
from .demands import allowed_by_pins, broken_by
from .describe import choice_of, fingerprint, layouts_of, results_of
from .dynamic import plan_ranges
from .frontier import Frontier, FrontierPoint, frontier
from .instance import Instance, formulate_for
from .keeping import edited_layouts, kept_layouts
from .mesh_shapes import mesh_shapes, plan_meshes
from .options import Infeasible, NoAnswer, Options, Progress, Stopwatch, bytes_text, checked_options
from .overlapped import overlapped
from .plan import baseline_only, plan, plan_captured, plan_graph
from .programs import Program, plan_programs, sub_mesh
from .question import ModelGraphs, Question, with_number_of_microbatches
from .refusal import infeasible
from .tying import solve_tied
from .warm_starts import random_choice

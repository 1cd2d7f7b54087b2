"""Questions about a saved plan: why a layout was chosen, what another one costs, how robust the plan is, whether it is still good."""
from .op_costs import CandidateCost, OpCosts, Redistribution
from .reopened import captured, certificate_of, problem_of, reopened, write_problem
from .robustness import robustness
from .staleness import Changes, Checked, Inspection, check_programs
from .why import explain

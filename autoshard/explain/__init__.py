"""Questions about a saved plan: why a layout was chosen, what another one costs, how robust the plan is, whether it is still good."""
from .certified import certificate_of, problem_of, write_problem
from .op_costs import CandidateCost, OpCosts, Place, Redistribution
from .programs_staleness import check_programs
from .reopened import captured, reopened
from .robustness import robustness
from .staleness import Changes, Checked, Inspection, check_program
from .why import explain

"""Questions about a saved plan: why a layout was chosen, what another one costs, how robust the plan is, whether it is still good."""
from autoshard.explain.certified import certificate_of as certificate_of
from autoshard.explain.certified import problem_of as problem_of
from autoshard.explain.certified import write_problem as write_problem
from autoshard.explain.op_costs import CandidateCost as CandidateCost
from autoshard.explain.op_costs import OpCosts as OpCosts
from autoshard.explain.op_costs import Place as Place
from autoshard.explain.op_costs import Redistribution as Redistribution
from autoshard.explain.programs_staleness import check_programs as check_programs
from autoshard.explain.reopened import captured as captured
from autoshard.explain.reopened import reopened as reopened
from autoshard.explain.robustness import robustness as robustness
from autoshard.explain.staleness import Changes as Changes
from autoshard.explain.staleness import Checked as Checked
from autoshard.explain.staleness import Inspection as Inspection
from autoshard.explain.staleness import check_program as check_program
from autoshard.explain.why import explain as explain

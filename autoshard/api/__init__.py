"""The order of things: plan, verify, load, export, the fx pass."""

from autoshard.api.checking import verify as verify
from autoshard.api.passes import PassOptions as PassOptions
from autoshard.api.passes import autosharding_pass as autosharding_pass
from autoshard.api.planning import Infeasible as Infeasible
from autoshard.api.planning import Options as Options
from autoshard.api.planning import plan as plan
from autoshard.exports import export as export
from autoshard.lower.measure import measure_this_cluster as measure_this_cluster
from autoshard.solution import load as load

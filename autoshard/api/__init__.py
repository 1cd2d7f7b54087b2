"""The order of things: plan, verify, load, export, the fx pass."""

from autoshard.api.checking import verify as verify
from autoshard.api.deepen import extrapolate as extrapolate
from autoshard.api.parallel import device_mesh as device_mesh
from autoshard.api.parallel import parallelize as parallelize
from autoshard.api.passes import PassOptions as PassOptions
from autoshard.api.passes import autosharding_pass as autosharding_pass
from autoshard.api.pipelines import pipeline as pipeline
from autoshard.api.planning import Infeasible as Infeasible
from autoshard.api.planning import Options as Options
from autoshard.api.planning import plan as plan
from autoshard.api.robustness import robustness as robustness
from autoshard.api.saving import load_checkpoint as load_checkpoint
from autoshard.api.saving import save_checkpoint as save_checkpoint
from autoshard.api.simulating import Parallel as Parallel
from autoshard.api.simulating import Simulation as Simulation
from autoshard.api.simulating import simulate as simulate
from autoshard.api.simulating import simulate_grid as simulate_grid
from autoshard.api.with_tables import plan_with_tables as plan_with_tables
from autoshard.exports import as_plain as as_plain
from autoshard.exports import export as export
from autoshard.lower.agreement import RankLost as RankLost
from autoshard.lower.measure import measure_this_cluster as measure_this_cluster
from autoshard.solution import load as load

"""Run a plan: per-rank programs of plain ATen ops and explicit collectives, and the proof that they compute the same."""

from autoshard.lower.agreement import RankLost as RankLost
from autoshard.lower.checkpoints import load_checkpoint as load_checkpoint
from autoshard.lower.checkpoints import save_checkpoint as save_checkpoint
from autoshard.lower.collectives import Ask as Ask
from autoshard.lower.collectives import Groups as Groups
from autoshard.lower.dry_run import CannotRun as CannotRun
from autoshard.lower.dry_run import dry_run as dry_run
from autoshard.lower.faults import plant_fault as plant_fault
from autoshard.lower.generator import draws as draws
from autoshard.lower.issue_order import op_of as op_of
from autoshard.lower.issue_order import out_of_step as out_of_step
from autoshard.lower.parallelize import constants_of as constants_of
from autoshard.lower.parallelize import device_mesh as device_mesh
from autoshard.lower.parallelize import parallelize as parallelize
from autoshard.lower.pipeline_verify import verify_stages as verify_stages
from autoshard.lower.pipelines import CapturedPipeline as CapturedPipeline
from autoshard.lower.pipelines import parallel_pipeline as parallel_pipeline
from autoshard.lower.sharding import reduce_tensors as reduce_tensors
from autoshard.lower.unsharded import run_unsharded as run_unsharded
from autoshard.lower.unsharded import verify_graph as verify_graph
from autoshard.lower.unsharded import with_errors_of as with_errors_of

from .local_tensor import run_local_tensor as run_local_tensor
from .program import RankProgram as RankProgram
from .program import lower as lower
from .run import run_on as run_on
from .run import run_simulated as run_simulated
from .verify import Verification as Verification
from .verify import run_global as run_global
from .verify import verify_program as verify_program

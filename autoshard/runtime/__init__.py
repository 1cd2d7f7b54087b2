"""Run a plan in processes: the trainable module, its pipelines and programs, and checkpoints."""

from autoshard.runtime.agreement import RankLost as RankLost
from autoshard.runtime.checkpoints import load_checkpoint as load_checkpoint
from autoshard.runtime.checkpoints import save_checkpoint as save_checkpoint
from autoshard.runtime.parallelize import constants_of as constants_of
from autoshard.runtime.parallelize import device_mesh as device_mesh
from autoshard.runtime.parallelize import parallelize as parallelize
from autoshard.runtime.pipeline_verify import verify_stages as verify_stages
from autoshard.runtime.pipelines import CapturedPipeline as CapturedPipeline
from autoshard.runtime.pipelines import parallel_pipeline as parallel_pipeline

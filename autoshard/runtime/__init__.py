"""Run a plan in processes: the trainable module, its pipelines and programs, and checkpoints."""

from .agreement import RankLost
from .checkpoints import load_checkpoint, save_checkpoint
from .parallelize import device_mesh, parallelize
from .pipeline_verify import verify_stages
from .pipelines import CapturedPipeline, parallel_pipeline

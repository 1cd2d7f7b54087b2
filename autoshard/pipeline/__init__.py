"""Pipelines: stages, sub-meshes, schedules and microbatches, searched and simulated."""

from autoshard.pipeline.configurations import backend_of as backend_of
from autoshard.pipeline.grid import SCHEMES as SCHEMES
from autoshard.pipeline.grid import Simulation as Simulation
from autoshard.pipeline.grid import simulate_grid as simulate_grid
from autoshard.pipeline.microbatches import microbatch as microbatch
from autoshard.pipeline.pipelines import pipeline as pipeline
from autoshard.pipeline.schedule_times import ScheduleRun as ScheduleRun
from autoshard.pipeline.schedule_times import Span as Span
from autoshard.pipeline.schedule_times import run as run
from autoshard.pipeline.schedules import SCHEDULES as SCHEDULES
from autoshard.pipeline.schedules import Schedule as Schedule
from autoshard.pipeline.schedules import Unit as Unit
from autoshard.pipeline.schedules import schedule_of as schedule_of
from autoshard.pipeline.stage_layouts import schedule_of_plan as schedule_of_plan
from autoshard.pipeline.stage_layouts import to_run as to_run
from autoshard.pipeline.stage_layouts import with_schedule as with_schedule
from autoshard.pipeline.submeshes import Cluster as Cluster
from autoshard.pipeline.submeshes import Kind as Kind

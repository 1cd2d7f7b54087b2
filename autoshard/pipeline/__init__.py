"""Pipelines: stages, sub-meshes, schedules and microbatches, searched and simulated."""

from .configurations import backend_of
from .grid import Parallel, Simulation, simulate_grid
from .microbatches import microbatch
from .pipelines import pipeline
from .schedule_times import ScheduleRun, Span, run
from .schedules import SCHEDULES, Schedule, Unit, schedule_of
from .stage_programs import schedule_of_plan, to_run, with_schedule
from .submeshes import Cluster, Kind

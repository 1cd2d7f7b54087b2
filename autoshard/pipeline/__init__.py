"""Pipelines: stages, sub-meshes, schedules and microbatches, searched and simulated."""

from autoshard.pipeline.schedule_times import ScheduleRun as ScheduleRun
from autoshard.pipeline.schedule_times import Span as Span
from autoshard.pipeline.schedule_times import run as run
from autoshard.pipeline.schedules import SCHEDULES as SCHEDULES
from autoshard.pipeline.schedules import Schedule as Schedule
from autoshard.pipeline.schedules import Unit as Unit
from autoshard.pipeline.schedules import schedule_of as schedule_of

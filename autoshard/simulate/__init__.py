"""What a step will take: schedules, time lines of planned programs, published cost rules."""

from autoshard.simulate.schedule_times import Run as Run
from autoshard.simulate.schedule_times import Span as Span
from autoshard.simulate.schedule_times import run as run
from autoshard.simulate.schedules import SCHEDULES as SCHEDULES
from autoshard.simulate.schedules import Schedule as Schedule
from autoshard.simulate.schedules import Unit as Unit
from autoshard.simulate.schedules import schedule_of as schedule_of

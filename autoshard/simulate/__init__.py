"""Simulated time lines of planned steps: tasks, streams, shared links, memory over time.

`distir.py` reproduces a published simulator, its rules and constants unchanged, so that its figures can be compared with ours; planning
and the other modules of this package don't use it.
"""
from autoshard.simulate.chains import full_streams as full_streams
from autoshard.simulate.chains import longest_chain as longest_chain
from autoshard.simulate.degrees import Parallel as Parallel
from autoshard.simulate.tasks import COMPUTE as COMPUTE
from autoshard.simulate.tasks import PREFETCH as PREFETCH
from autoshard.simulate.tasks import Task as Task
from autoshard.simulate.tasks import TaskProgram as TaskProgram
from autoshard.simulate.tasks import program_of as program_of
from autoshard.simulate.timeline import Timeline as Timeline
from autoshard.simulate.timeline import run_streams as run_streams
from autoshard.simulate.timeline import timeline_of as timeline_of
from autoshard.simulate.timeline import timeline_of_solution as timeline_of_solution

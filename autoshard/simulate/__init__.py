"""Simulated time lines of planned steps: tasks, streams, shared links, memory over time.

`distir.py` reproduces a published simulator, its rules and constants unchanged, so that its figures can be compared with ours; planning
and the other modules of this package don't use it.
"""
from .chains import full_streams, longest_chain
from .degrees import Parallel
from .tasks import COMPUTE, PREFETCH, Task, TaskProgram, program_of
from .timeline import Timeline, run_streams, timeline_of, timeline_of_solution

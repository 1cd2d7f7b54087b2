"""Simulated time lines of planned steps: tasks, streams, shared links, memory over time."""
from .chains import critical_chain, full_streams, longest_chain
from .tasks import COMPUTE, PREFETCH, Task, TaskProgram, program_of
from .timeline import Timeline, run_streams, timeline_of, timeline_of_solution

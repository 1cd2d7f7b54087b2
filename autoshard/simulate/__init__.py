"""Simulated time lines of planned steps: tasks, streams, shared links, memory over time.

`distir.py` reproduces a published simulator, its rules and constants unchanged, so that its figures can be compared with ours; planning
and the other modules of this package don't use it.
"""

"""What a study of benchmarks/study.py is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Cases, how one is measured, and what counts as good.

    A row is a dict of figures: of the case, and under "plans" those of each of its plans, by name. Keys say the unit: `limit_bytes`,
    `cpu_seconds`; gap, error, gain and loss are relative.
    """

    cases: Callable[[argparse.Namespace], Mapping[str, Any]]  # by name, whatever `measure` takes
    measure: Callable[[Any, argparse.Namespace], Row | list[Row]]  # its docstring says what is compared, for --help
    judged: Callable[[Row, Any, argparse.Namespace], Row] = lambda row, case, given: row  # with "ok", and figures that compare plans
    totals: Callable[[list[Row]], Row] = lambda rows: {}  # of all rows
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further words of the command, as argparse takes them
    data: str = "models"  # the default of DATA
    alone: bool = True  # each case in a process of its own, on one core with one thread
    notes: Mapping[str, str] = field(default_factory=dict)  # below the table, where a case has this in its name

"""Options, each declared once: its default, the values that it knows, its words for `--help`, and who else has it."""

from .declared import Declaration, checked_options, defaults_of, having, options_of, refuse_elsewhere
from .kinds import (
    COUNTS, FORBIDDEN, LAYOUTS, OPTIMIZERS, SIZE, SIZES, SWITCH, TEXT, ValueKind, bytes_per_parameter, check_layout, count, number, one_of,
    parse_bytes, parse_pins, recomputed, some_of,
)
from .planning import SCHEDULES, SCHEMES, SOLVERS, TIME_LIMIT, Options, PipelineOptions, note_schema

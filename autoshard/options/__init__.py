"""Options, each declared once: its default, the values that it knows, its words for `--help`, and who else has it."""

from .declared import Declaration as Declaration
from .declared import checked_options as checked_options
from .declared import defaults_of as defaults_of
from .declared import having as having
from .declared import options_of as options_of
from .kinds import OPTIMIZERS as OPTIMIZERS
from .kinds import SIZE as SIZE
from .kinds import SWITCH as SWITCH
from .kinds import TEXT as TEXT
from .kinds import ValueKind as ValueKind
from .kinds import bytes_per_parameter as bytes_per_parameter
from .kinds import check_layout as check_layout
from .kinds import count as count
from .kinds import number as number
from .kinds import one_of as one_of
from .kinds import parse_bytes as parse_bytes
from .kinds import parse_forbidden as parse_forbidden
from .kinds import parse_pins as parse_pins
from .kinds import recomputed as recomputed
from .planning import SOLVERS as SOLVERS
from .planning import TIME_LIMIT as TIME_LIMIT
from .planning import Options as Options
from .planning import note_schema as note_schema

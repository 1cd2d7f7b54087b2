"""A plan as a value: layouts by name, certificate and fingerprint; and its file formats."""

from .compare import differences as differences
from .compare import misfits as misfits
from .interval import parts as parts
from .interval import price_errors as price_errors
from .load import load as load
from .load import load_any as load_any
from .load import save_over as save_over
from .programs import ProgramsSolution as ProgramsSolution
from .programs import load_programs as load_programs
from .record import FORMAT as FORMAT
from .record import ROUNDING as ROUNDING
from .record import VERSION as VERSION
from .record import Placed as Placed
from .record import Solution as Solution
from .record import noted_choice as noted_choice
from .replay import Replay as Replay
from .replay import of_one_microbatch as of_one_microbatch
from .replay import replay as replay

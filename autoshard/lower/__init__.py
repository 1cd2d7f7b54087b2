"""Run a plan: per-rank programs of plain ATen ops and explicit collectives, and the proof that they compute the same."""

from .faults import plant_fault as plant_fault
from .local_tensor import run_local_tensor as run_local_tensor
from .program import RankProgram as RankProgram
from .program import lower as lower
from .run import run_on as run_on
from .run import run_rank as run_rank
from .run import run_simulated as run_simulated
from .verify import Mismatch as Mismatch
from .verify import Verification as Verification
from .verify import run_global as run_global
from .verify import verify_program as verify_program

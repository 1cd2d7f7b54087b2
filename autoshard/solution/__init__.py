"""A plan as a value: layouts by name, certificate and fingerprint; and its file formats."""

from autoshard.version import VERSION

from .cache import CacheEntry, PlanCache
from .compare import changes, differences, misfits
from .dynamic import Coverage, DynamicShapes
from .files import PICKLE_SUFFIXES, clear_folder, digest, json_hash, json_text, publish_folder, write
from .interval import flat, parts, price_errors
from .load import AnyPlan, from_text, load, load_one, save_over, to_text
from .pickles import Inert, record, unpickled
from .plan import Plan, provide, provided
from .programs import ProgramsSolution
from .record import ROUNDING, Placed, Solution, noted_choice, parsed, plain
from .replay import Replay, of_one_microbatch, replay
from .stage_records import RECEIVED, SENT, Pipeline, PipelineStage, PipelineToRun, StageToRun


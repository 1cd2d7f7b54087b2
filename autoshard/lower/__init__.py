"""What each rank computes: per-rank programs of plain ATen ops and explicit collectives, and the proof that they compute the same."""

from .collectives import CollectiveCall, Groups, Rank, RankGenerator, check_step, drive
from .dry_run import CannotRun, dry_run
from .faults import plant_fault
from .flow import ADD, STARTS, VIEWS, WAIT, Flow, LiveBytes, Pace, largest_buffer, live_bytes, owners, size
from .fx_program import Boxed, RankGraphs, are_alike, boxed, compiled
from .fx_program import first_of_backward, rewritten, subgraph, trace, without_idle, write_in_place
from .generator import drawing, draws, first_state, from_state, is_random, mixed, state_of_generator
from .issue_order import Issued, out_of_step
from .program import LoadPlaceholder, RankProgram, Redistribute, Slot, lower, redistribution, slot_of, slots_of
from .rounding import noise_of
from .run import SimulatedRanks, check, run_route
from .sharding import assemble, gap, part_of, reduce_tensors, shard_of_rank
from .unsharded import constants_of, index_bounds, run_unsharded, seeded, state_of_module, verify_graph
from .verify import TOLERANCES, Mismatch, Verification, failure, least_precise
from .verify import out_of_order, perturbed, relative_error, run_global, verify_program

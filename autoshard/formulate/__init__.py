"""From Graph and Candidates to a Problem of numbers, and from a choice in the Problem back to layouts. No other package does either.

    node v    an op (its choices are candidates), a hub (its choices are layouts), or a result that the program returns
    c_v[i]    seconds of op v on the local shapes of candidate i, including the collectives of its local program; for a trained
              parameter, seconds of the optimizer's step on its local elements; 0 for hubs and results   (`build._op_costs`)
    T_uv[i,j] seconds of the cheapest route from the output layout of u's choice i to the input layout of v's choice j (`tables`)
    bytes     bytes of local shapes, alive from an op to the last reader of its storage                  (`usages`)

A value with several readers gets a hub: a node whose choice is the layout in which the value waits for its readers, so that one
gather can serve all of them. The edge of a gradient leads to the node of its parameter: the gradient ends in the parameter's
layout, and so data parallel, FSDP and ZeRO are points of this search space. The copy that a route creates belongs to the edge:
it exists only where the layouts differ.
"""

from .build import formulate, op_candidate_seconds, op_collectives, op_stages
from .joined import Joined, ParameterCopy, Piece, join
from .records import Formulation, Place, TensorEdge, Training, with_pins
from .saved_values import SavedValues, chosen_of, hidden_seconds, transfer_seconds_of, with_saved_values
from .streams import EARLY, StreamSeconds, stream_seconds
from .tables import Tables
from .usages import KINDS

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

from autoshard.formulate.build import formulate as formulate
from autoshard.formulate.build import op_candidate_seconds as op_candidate_seconds
from autoshard.formulate.build import op_collectives as op_collectives
from autoshard.formulate.build import op_stages as op_stages
from autoshard.formulate.joined import Joined as Joined
from autoshard.formulate.joined import ParameterCopy as ParameterCopy
from autoshard.formulate.joined import Piece as Piece
from autoshard.formulate.joined import join as join
from autoshard.formulate.records import Formulation as Formulation
from autoshard.formulate.records import TensorEdge as TensorEdge
from autoshard.formulate.records import Training as Training
from autoshard.formulate.records import with_pins as with_pins
from autoshard.formulate.saved_values import SavedValues as SavedValues
from autoshard.formulate.saved_values import chosen_of as chosen_of
from autoshard.formulate.saved_values import hidden_seconds as hidden_seconds
from autoshard.formulate.saved_values import transfer_seconds_of as transfer_seconds_of
from autoshard.formulate.saved_values import with_saved_values as with_saved_values
from autoshard.formulate.streams import EARLY as EARLY
from autoshard.formulate.streams import StreamSeconds as StreamSeconds
from autoshard.formulate.streams import stream_seconds as stream_seconds
from autoshard.formulate.tables import Tables as Tables
from autoshard.formulate.usages import KINDS as KINDS

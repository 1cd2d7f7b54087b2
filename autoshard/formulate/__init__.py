"""The one door between meaning and numbers: Graph and Candidates -> Problem, and a choice back into layouts.

    node v    an op (its choices: candidates), a hub (its choices: layouts), a result that the program returns
    c_v[i]    seconds of op v on the local shapes of candidate i, collectives inside it included; of a trained parameter
              the optimizer's step on its local elements; 0 for hubs and results                       (`build._op_costs`)
    T_uv[i,j] seconds of the cheapest route from what u's candidate i gives to what v's candidate j takes  (`tables`)
    bytes     of local shapes, alive from an op to the last reader of its storage                          (`usages`)

A value with several readers gets a hub, so that one gather can serve them all. The edge of a gradient leads to its parameter's
own node: the gradient ends in the parameter's layout, hence data parallel, FSDP and ZeRO are points of this space. A copy
made by a route belongs to the edge: it exists only where layouts differ.
"""

from autoshard.formulate.build import formulate as formulate
from autoshard.formulate.build import op_candidate_seconds as op_candidate_seconds
from autoshard.formulate.records import Formulation as Formulation
from autoshard.formulate.records import Layouts as Layouts
from autoshard.formulate.records import Link as Link
from autoshard.formulate.records import Training as Training
from autoshard.formulate.records import with_pins as with_pins
from autoshard.formulate.usages import KINDS as KINDS

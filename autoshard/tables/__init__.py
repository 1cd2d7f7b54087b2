"""Embedding tables: which sharding each of thousands of tables gets, and on which devices, by the slowest device."""

from .dp import dp_proposals as dp_proposals
from .dp import dp_proposals_2d as dp_proposals_2d
from .plan import plan_tables as plan_tables
from .records import Option as Option
from .records import Placed as Placed
from .records import Table as Table
from .records import TablePlan as TablePlan

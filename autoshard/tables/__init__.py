"""Plans for embedding tables: the sharding and the devices of each table such that the slowest device is as fast as possible."""

from .dp import dp_proposals
from .plan import plan_tables
from .records import Option, PlacedTable, Table, TablePlan
from .spec import tables_of_json, tables_of_rows
from .with_dense import Together, WithTables, plan_with_tables

"""Plans for embedding tables: the sharding and the devices of each table such that the slowest device is as fast as possible."""

from autoshard.tables.dp import dp_proposals as dp_proposals
from autoshard.tables.plan import plan_tables as plan_tables
from autoshard.tables.records import Option as Option
from autoshard.tables.records import PlacedTable as PlacedTable
from autoshard.tables.records import Table as Table
from autoshard.tables.records import TablePlan as TablePlan
from autoshard.tables.spec import tables_of_json as tables_of_json
from autoshard.tables.spec import tables_of_rows as tables_of_rows
from autoshard.tables.with_dense import Together as Together
from autoshard.tables.with_dense import WithTables as WithTables
from autoshard.tables.with_dense import plan_with_tables as plan_with_tables

"""`plan_with_tables` and the values that it returns."""

from autoshard.tables.with_dense import Together as Together
from autoshard.tables.with_dense import WithTables as WithTables
from autoshard.tables.with_dense import plan_with_tables as plan_with_tables

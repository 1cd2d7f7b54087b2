"""`plan_with_tables`: a dense model and its embedding tables, planned for the same devices, and the values that it returns."""

from autoshard.tables import Together as Together
from autoshard.tables import WithTables as WithTables
from autoshard.tables import plan_with_tables as plan_with_tables

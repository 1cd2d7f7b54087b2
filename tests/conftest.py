"""Settings for every test: the same examples in every run, and no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("autoshard", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("autoshard")

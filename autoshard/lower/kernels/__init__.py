"""Local programs: what a rank runs for an op where the op itself, called on the rank's shards, would compute something else."""

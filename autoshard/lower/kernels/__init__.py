"""Local programs of ops whose kernel on a shard is not the op itself."""

"""Two copies of each shard, and the coordinator that decides which one serves."""

"""Replicates shards: two copies of each, and the coordinator that decides which one serves."""

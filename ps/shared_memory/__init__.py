"""Shared memory below the protocol, between a worker and a shard on one machine."""

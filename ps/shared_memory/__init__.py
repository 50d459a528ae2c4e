"""Shared memory under the protocol, for a worker and a shard of one machine."""

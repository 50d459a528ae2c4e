"""Starts, watches and restarts shards as threads, processes or Ray actors."""

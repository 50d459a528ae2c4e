"""Persistent state on disks and in object stores: snapshots, worker states, secrets."""

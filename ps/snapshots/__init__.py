"""What is kept on disks and in stores: snapshots, a worker's own state, secrets."""

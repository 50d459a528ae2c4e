"""Data in files: one file of this package for each format. `worker.data.sources` opens them."""

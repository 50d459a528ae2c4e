"""The operations that networks, shards and links use: a folder for each, as `cupy_kernels` says."""

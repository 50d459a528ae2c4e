"""The operations of networks, shards and links: a folder for each, with all that belongs to it.

A folder's package has the functions to call. `cpu` implements them in NumPy and documents each,
`gpu` launches kernels, and `spec` describes the kernels of the `.cu` file. A new folder is found by
itself: nothing outside of it lists the operations.
"""

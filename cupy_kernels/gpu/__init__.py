"""Operations by kernels: which kernels are launched, with which sizes and memory.

Nothing here computes, reads a value back or waits. Memory comes from the caller's workspace, so
once a step has run it can be repeated without allocations, and captured.
"""

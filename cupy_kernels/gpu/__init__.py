"""Each operation's body in kernels: what is launched, with which sizes, into which memory.

Nothing here computes, reads a value back or waits; memory comes from the caller's workspace, so a
step that was taken once can be taken again without an allocation, and captured.
"""

"""What each kernel is tried on: one file a subject, used by the emulator's tests and on a GPU.

A case is a kernel's arguments as NumPy arrays and numbers. Sizes are small and odd: an emulated
thread costs about a microsecond. No pytest in here: the GPU script runs without it.
"""

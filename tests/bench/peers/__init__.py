"""Parameter servers that the data path is compared with, all doing the same work.

An *update*: one worker pushes N float32 and pulls N float32; the servers apply plain SGD. Each
contender is a module run as a program of its own (`contract.py` says how it is told what to do and
when it is measured). They are written as their own documentation shows, not to look bad: what could
be switched on easily is on.
"""

"""The choices of a simulation, in a file of their own: the command line offers these choices
without loading the simulator.
"""

from enum import StrEnum


class ClusterConfig(StrEnum):
    """The kind of cluster.

    single: one process per shard, which is restarted with its state. compressed: the same, with
    compressed pushes or pulls. logged: single processes, each with a log on a disk. replicated: a
    primary and a backup per shard, and a coordinator.
    """

    SINGLE = "single"
    COMPRESSED = "compressed"
    LOGGED = "logged"
    REPLICATED = "replicated"


class Profile(StrEnum):
    """The fault budget: within what the system promises to survive, or beyond it.

    Beyond it, pushes may be lost and progress may stop. Even then, no push is applied twice,
    versions do not decrease, and only one primary commits.
    """

    WITHIN = "within"
    BEYOND = "beyond"

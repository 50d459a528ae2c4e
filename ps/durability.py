"""How much of what a shard acknowledged survives what: docs/explanation/durability.md tells it at
length.
"""

from enum import StrEnum
from pathlib import Path

from shards.errors import BadInput


class Durability(StrEnum):
    """What survives the death of a shard's process.

    `memory`: what the last snapshot holds. `process`: everything, while the host's kernel runs.
    `logged`: everything, also when the power fails, if the disk keeps what it says it has.
    `replicated`: everything, without a pause, when any one process dies, stops or is cut off.
    """

    MEMORY = "memory"
    PROCESS = "process"
    LOGGED = "logged"
    REPLICATED = "replicated"

    @property
    def keeps_log(self) -> bool:
        """Whether a shard writes a log that a later life goes on from."""
        return self in (Durability.PROCESS, Durability.LOGGED)

    def folder_for(self, logs: Path | None, shard: int) -> str | None:
        """Where shard `shard` keeps its log below `logs`, if it keeps one; raises BadInput."""
        if not self.keeps_log:
            return None
        if logs is None:
            raise BadInput(f"durability {self}: expected a folder for the shards' logs, got none")
        return str(logs.absolute() / f"shard-{shard}")

"""The acknowledged work that survives each kind of failure; see docs/explanation/durability.md."""

from enum import StrEnum
from pathlib import Path

from shards.errors import BadInput


class Durability(StrEnum):
    """The promise about the death of a shard's process.

    `memory`: the last snapshot. `process`: everything, while the host's kernel runs. `logged`:
    everything, also after a power failure, if the disk keeps what it reports as written.
    `replicated`: everything, without a pause, when any one process dies, stops or is cut off.
    """

    MEMORY = "memory"
    PROCESS = "process"
    LOGGED = "logged"
    REPLICATED = "replicated"

    @property
    def keeps_log(self) -> bool:
        """True if a shard writes a WAL from which its next incarnation recovers."""
        return self in (Durability.PROCESS, Durability.LOGGED)

    def folder_for(self, logs: Path | None, shard: int) -> str | None:
        """The folder of a shard's WAL below `logs`, None if it keeps none; raises BadInput."""
        if not self.keeps_log:
            return None
        if logs is None:
            raise BadInput(
                f"durability {self}", expected="a folder for the shards' logs", got="none"
            )
        return str(logs.absolute() / f"shard-{shard}")

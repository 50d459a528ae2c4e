"""The errors of the SDK, sorted by what the caller can do about them.

    DownpourError         every error that this project raises on purpose
    ├── Retry             the same call may succeed later
    │   └── ClockTimeout  other workers are too far behind; `slowest` is the slowest one's clock
    ├── Resynchronise     the two sides disagree about the past; clients mend this by themselves
    └── GiveUp            repeating the call cannot help, unless `retryable` says otherwise
        ├── BadInput      an argument, array or file that the user must mend
        │   └── NoServer  no server answers at an address; retryable
        ├── BadMessage    bytes that are not a message of this protocol
        ├── Fenced        a newer incarnation of this worker has taken over its name
        ├── Denied        the token is not the job's
        ├── Mismatch      the two sides speak different protocols, or their messages differ
        ├── WrongBuild    two processes of one job run different code
        ├── JobEnded      the job has ended, and its shards with it
        ├── Unreachable   a shard has been silent for too long; retryable
        └── NotReady      a shard has no weights yet, or no copy of it serves yet; retryable

Every error has `retryable`, and says which `table`, `shard` and `worker` it is about, as far as
that is known. Its text is one line: the thing, what was expected, what was found.
"""

from ps.session.events import ClockTimeout, JobEnded, NotReady, Unreachable
from shards.errors import (
    BadInput,
    BadMessage,
    Denied,
    DownpourError,
    Fenced,
    Full,
    GiveUp,
    Mismatch,
    NoServer,
    Resynchronise,
    Retry,
    WrongBuild,
)

__all__ = [
    "BadInput",
    "BadMessage",
    "ClockTimeout",
    "Denied",
    "DownpourError",
    "Fenced",
    "Full",
    "GiveUp",
    "JobEnded",
    "Mismatch",
    "NoServer",
    "NotReady",
    "Resynchronise",
    "Retry",
    "Unreachable",
    "WrongBuild",
]

"""What workers, operators and shards say to each other, as frozen typed structs.

Each message is one flat MessagePack header (codec.py) followed by raw frames. The header names the
table it speaks of, so that a new kind of table needs no second format. Only three kinds carry
frames from a client: a push (one frame a key range) and an install (ledger, weights, slots).

A worker lives like this:

    Hello  -> Welcome   what does the shard have of me? (fences older incarnations)
    Join   -> Joined    from now on my clock counts at the gate; shard 0 says which clock it is
    Pull   -> Weights   parked until the slowest worker's clock is at least `clock - bound`
    Push   -> Ack       applied exactly once; a repetition is acknowledged as a duplicate
    Renew  -> Renewed   I am alive (every other message says so too)
    Leave  -> Left      do not wait for me any more

Any of them may be answered by a Refusal, which says what remedies it, or by Parked when a request
is repeated that already waits at the gate.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = 1
MAX_PROBE_BYTES = 4 << 20

Count = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=256)]
Share = Annotated[int, Meta(ge=0, le=2**32)]  # summed up, and no sum may overflow
Keys = Annotated[list[Count], Meta(max_length=64)]


class Kind(StrEnum):
    """What a payload may be made of (payloads.py); nothing outside this list is ever interpreted.

    Plain float32; halves; whole numbers of 8, 4 and 1 bits with a scale a block; some values only.
    """

    F4 = "f4"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    SIGN = "sign"
    SPARSE = "sparse"


class Remedy(StrEnum):
    """What the receiver of a refusal can do about it; one class of errors each."""

    RETRY = "retry"
    RESYNCHRONISE = "resynchronise"
    GAP = "gap"
    MOVED = "moved"
    GIVE_UP = "give_up"
    BAD_MESSAGE = "bad_message"
    BAD_INPUT = "bad_input"
    FENCED = "fenced"
    WRONG_BUILD = "wrong_build"


class Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True, gc=False):
    """Anything said. `request` pairs an answer with its question; no life uses one twice."""

    request: Count


# --- from a worker ------------------------------------------------------------------------------


class FromWorker(Message, frozen=True):
    """`incarnation` counts the lives of `worker`; the highest one speaks for the name."""

    job: Name
    worker: Name
    incarnation: Count


class Hello(FromWorker, frozen=True, tag="hello"):
    protocol: Count
    build: Name


class Registered(FromWorker, frozen=True):
    """Said after a Welcome. `boot` is the life of the shard that the worker means to talk to."""

    boot: Count


class Join(Registered, frozen=True, tag="join"):
    """Count me at the gate from `clock` on, or from the slowest worker's clock if that is later.

    `again`: this life of mine was let in before. `seq` and `step` are the last push that you have
    acknowledged to me and the steps that it covers, which matters if you were rolled back since.
    """

    clock: Count
    again: bool = False
    seq: Count = 0
    step: Count = 0


class Push(Registered, frozen=True, tag="push"):
    """A gradient over `keys`, flattened as [start, stop, start, stop, ...]; one frame a range.

    `seq` numbers this worker's pushes from 1; `clock` and `step` are its clock and the steps of its
    own plan once this push is applied; `steps` and `samples` are what the gradient sums over;
    `read_version` is the version it was computed from. The rest is for the records; `zstd` says
    whether the frames are packed, `acknowledged` which push all shards have acknowledged so far.
    """

    epoch: Count
    table: Name
    seq: Count
    clock: Count
    step: Count
    steps: Share
    samples: Share
    read_version: Count
    kind: Kind
    keys: Keys
    loss: float
    rtt_s: float
    wait_s: float
    zstd: bool = False
    acknowledged: Count = 0


class Pull(Registered, frozen=True, tag="pull"):
    """The weights for a step that may start once every registered clock is >= clock - bound.

    They are wanted as `kind`: plain or halves, or, for the others, as changes to the view that
    follows `base`, of which a sparse one holds the `share` that is largest (views.py).
    """

    epoch: Count
    table: Name
    clock: Count
    kind: Kind = Kind.F4
    zstd: bool = False
    base: Count = 0
    share: float = 0.0


class Renew(Registered, frozen=True, tag="renew"):
    pass


class Leave(Registered, frozen=True, tag="leave"):
    pass


# --- from an operator: whoever started the job ----------------------------------------------------


class FromOperator(Message, frozen=True):
    job: Name
    table: Name


class Install(FromOperator, frozen=True, tag="install"):
    """Take this state: frames are the ledger (MessagePack), the weights, then each slot.

    `goes_on`: its workers count as they did where it comes from; else when they join again.
    """

    slots: Annotated[list[Name], Meta(max_length=16)]
    goes_on: bool = False


class Export(FromOperator, frozen=True, tag="export"):
    """Give me your whole state at one version."""


class Read(FromOperator, frozen=True, tag="read"):
    """The current weights, past the gate."""


class Hold(FromOperator, frozen=True, tag="hold"):
    """Stand still for so many seconds (0: go on), at the cut in the frame (a `Cut`).

    Without a frame: where you are.
    """

    seconds: Annotated[float, Meta(ge=0, le=3600)]


class Retire(FromOperator, frozen=True, tag="retire"):
    """Send every worker to the shards that the frame describes; only while you stand still.

    The frame has `size` bytes: one that was cut short would send them nowhere.
    """

    size: Count


class AskStatus(FromOperator, frozen=True, tag="ask_status"):
    pass


class AskRecords(FromOperator, frozen=True, tag="ask_records"):
    """The records of updates applied since `after`, which are thereby forgotten up to `after`."""

    after: Count


class Probe(FromOperator, frozen=True, tag="probe"):
    """How is the link? Frames of any content may follow; answer with `payload_bytes`."""

    payload_bytes: Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)]


# What a shard's state answers; a Probe is for its host.
Request = (
    Hello
    | Join
    | Push
    | Pull
    | Renew
    | Leave
    | Install
    | Export
    | Read
    | Hold
    | Retire
    | AskStatus
    | AskRecords
)

CHANGING = (Hello, Join, Push, Leave, Install, Hold, Retire)
"""The kinds of requests that can change a shard's state: what its log and its copies are told."""


# --- from a shard ---------------------------------------------------------------------------------


class FromShard(Message, frozen=True):
    shard: Count
    boot: Count


class Welcome(FromShard, frozen=True, tag="welcome"):
    """What the shard has of this worker: its last applied push and the steps that covers.

    When it was sent, all shards had acknowledged the pushes up to `acknowledged`.
    One that is `rolled_back` goes on from what it had saved, and may lack what it acknowledged.
    """

    epoch: Count
    version: Count
    seq: Count
    step: Count
    lease_s: float
    rolled_back: bool = False
    acknowledged: Count = 0


class Joined(FromShard, frozen=True, tag="joined"):
    clock: Count


class Ack(FromShard, frozen=True, tag="ack"):
    """Push `seq` is applied; a duplicate was applied before and changes nothing.

    `saved` is this worker's last push in the state that an operator was last given; 0: none yet.
    """

    seq: Count
    version: Count
    staleness: Count
    duplicate: bool
    saved: Count = 0


class Weights(FromShard, frozen=True, tag="weights"):
    """One frame a key range, all of one version; `waited_s` was spent parked at the gate.

    Added to view `base` (0: by themselves) they are view `number`, for who pulls changes.
    """

    epoch: Count
    table: Name
    version: Count
    kind: Kind
    keys: Keys
    waited_s: float
    zstd: bool = False
    base: Count = 0
    number: Count = 0


class Parked(FromShard, frozen=True, tag="parked"):
    """Your request still waits at the gate, or behind your own push in an open round.

    The slowest registered worker is at `min_clock`.
    """

    min_clock: Count


class Renewed(FromShard, frozen=True, tag="renewed"):
    pass


class Left(FromShard, frozen=True, tag="left"):
    pass


class Refusal(FromShard, frozen=True, tag="refusal"):
    """`expected` is the push number a gap starts at, else 0.

    With the remedy `moved`, one frame says where to (errors.py).
    """

    remedy: Remedy
    text: Text
    expected: Count = 0


class Holding(FromShard, frozen=True, tag="holding"):
    """One frame: a `Cut`, each worker's last applied push.

    `missing`: it stands short of the one asked for with a worker that counts.
    """

    missing: bool


class Retired(FromShard, frozen=True, tag="retired"):
    pass


class Installed(FromShard, frozen=True, tag="installed"):
    version: Count


class State(FromShard, frozen=True, tag="state"):
    """Frames as in Install, all of one version."""

    version: Count
    slots: list[Name]


class Status(FromShard, frozen=True, tag="status"):
    """One frame: the MessagePack of a `ShardStatus`, which may outgrow a header."""


class Probed(FromShard, frozen=True, tag="probed"):
    """One frame of as many bytes as were asked for.

    `unix_s` is the host's clock, `cpu_s` what the process has spent, `received_bytes` what came in
    the probe's frames.
    """

    protocol: Count
    build: Name
    unix_s: float
    cpu_s: float
    received_bytes: Count


class Records(FromShard, frozen=True, tag="records"):
    """One frame: update records (records.py) numbered from `first`."""

    first: Count


Reply = (
    Welcome
    | Joined
    | Ack
    | Weights
    | Parked
    | Renewed
    | Left
    | Refusal
    | Holding
    | Retired
    | Installed
    | State
    | Status
    | Probed
    | Records
)


# --- what frames of their own hold ----------------------------------------------------------------


class Standing(StrEnum):
    """How a worker stands with a shard; only an active one counts at the gate."""

    GREETED = "greeted"
    ACTIVE = "active"
    LEFT = "left"
    EXPIRED = "expired"


class WorkerStatus(msgspec.Struct, frozen=True):
    worker: str
    standing: Standing
    incarnation: int
    takeovers: int
    clock: int
    step: int
    seq: int
    waiting: bool
    loss: float


class Cut(msgspec.Struct, frozen=True):
    """A push number for each worker (standstill.py)."""

    pushes: dict[Name, Count]


class ShardStatus(msgspec.Struct, frozen=True):
    """A shard's counters since it was installed; payload bytes, not headers."""

    shard: int
    version: int
    steps: int
    samples: int
    rate: float
    pushes: int
    pulls: int
    duplicates: int
    refused: int
    bytes_in: int
    bytes_out: int
    max_clock_gap: int
    workers: tuple[WorkerStatus, ...]

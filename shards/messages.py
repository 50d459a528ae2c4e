"""The messages between workers, operators and shards, as frozen typed structs.

Each message is one MessagePack header (wire_format.py) followed by raw frames. A push, a pull and
weights may concern any of the job's tables: their headers list the parts, one a table, and the
frames of each follow. A part names its table and its encoding. Of a dense table a push and weights
have one frame and a pull none. Rows of a sparse table take two frames in a push, the ids and the
rows, one in a pull or a Read, the ids, and two in the answer (row_frames.py). A push without parts
counts, so that a worker's pushes have the same numbers at all shards, whichever rows they change.
The other client messages that carry frames are Install (a shard's state, shard_state.py), Quiesce
(a cut), HandOver (the new shards) and Probe (any bytes).

A worker sends, in this order:

    Hello  -> Welcome   what does the shard have of me? (fences older incarnations)
    Join   -> Joined    from now on my clock counts at the gate; shard 0 says which clock it is
    Pull   -> Weights   parked until the slowest worker's clock is at least `clock - bound`
    Push   -> Ack       applied exactly once; a repetition is acknowledged as a duplicate
    Renew  -> Renewed   I am alive (every other message says so too)
    Leave  -> Left      do not wait for me any more

The answer to any of them may instead be a Refusal, which names the remedy, or Parked, if a repeated
request still waits at the gate.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shards.tables import MAX_TABLES

PROTOCOL = 5
MAX_PROBE_BYTES = 4 << 20
PIECE_BYTES = 4 << 20  # a larger state travels in pieces of this size (state_pieces.py)

# Below 2**63, so that the sum of two counts still fits into the int64 columns of the records.
Count = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
LONGEST_TEXT = 512  # two paths of a log fit into it
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
Host = Annotated[str, Meta(max_length=128)]
PieceBytes = Annotated[int, Meta(ge=256, le=PIECE_BYTES)]
MAX_STEPS = 1 << 14
"""The most steps that one push may stand for, so the longest window of a strategy."""
MAX_SAMPLES = 1 << 32
"""The most samples of one push: shards add them up, and no sum may overflow."""
MAX_IN_FLIGHT = 1 << 10
"""The most pushes of one worker that are on their way to a shard."""
Steps = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
Samples = Annotated[int, Meta(ge=0, le=MAX_SAMPLES)]
RateFactor = Annotated[float, Meta(gt=0, le=1e6)]


class Kind(StrEnum):
    """The encodings of a payload (payloads.py); nothing outside this list is ever interpreted.

    Plain float32; two kinds of 16-bit floats; integers of 8, 4 and 1 bits with one scale per block;
    and sparse, which holds some of the values only.
    """

    F4 = "f4"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    SIGN = "sign"
    SPARSE = "sparse"


class Remedy(StrEnum):
    """What the receiver of a refusal can do about it; each stands for one error class."""

    RETRY = "retry"
    RESYNCHRONISE = "resynchronise"
    GAP = "gap"
    MOVED = "moved"
    GIVE_UP = "give_up"
    BAD_MESSAGE = "bad_message"
    BAD_INPUT = "bad_input"
    FULL = "full"
    FENCED = "fenced"
    MISMATCH = "mismatch"


# Messages form no cycles (`gc=False`); the collector would otherwise visit each of them. Unknown
# fields are refused, because a field of another meaning must not be ignored.
class Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True, gc=False):
    """The base of all messages.

    `request` pairs an answer with its request; no incarnation of a client uses a number twice.
    """

    request: Count


# --- parts --------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One table in a push: the keys of the receiving shard's section of it, and their encoding.

    For rows, `start` and `stop` are the shard's buckets. `zstd` says whether the frame is
    compressed.
    """

    table: Name
    kind: Kind
    start: Count
    stop: Count
    zstd: bool = False


class PulledPart(Part, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One table in weights.

    For a worker that pulls changes: view `base` plus this frame is view `number`. With `base` 0 the
    frame alone is that view.
    """

    base: Count = 0
    number: Count = 0


class AskedPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One table in a pull: F4 and the 16-bit kinds ask for whole weights, INT8, INT4 and SPARSE for
    changes to the newest view that the shard has sent.

    `base` is the view that the worker holds. A sparse change holds the largest `share` of the
    values (delta_pulls.py).
    """

    table: Name
    kind: Kind = Kind.F4
    zstd: bool = False
    base: Count = 0
    share: float = 0.0


Parts = Annotated[list[Part], Meta(max_length=MAX_TABLES)]


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One piece of the state named `of`; the frames are the state's sizes and the piece's bytes.

    `digest` is that of the bytes and the number (state_pieces.py).
    """

    of: Count
    number: Count
    digest: Count


# --- from a worker ------------------------------------------------------------------------------


class FromWorker(Message, frozen=True):
    """A worker's message. `incarnation` counts the starts of `worker`; only the last is valid."""

    job: Name
    worker: Name
    incarnation: Count


class Hello(FromWorker, frozen=True, tag="hello"):
    """Begin an incarnation of the worker here; protocol and schema must equal the shard's."""

    protocol: Count
    schema: Name


class Registered(FromWorker, frozen=True):
    """A message sent after a Welcome. `boot` is the incarnation of the shard that it is for."""

    boot: Count


class Join(Registered, frozen=True, tag="join"):
    """Count the worker at the gate from `clock` on, or from the slowest clock if that is later.

    `again`: this incarnation of the worker was admitted before. The worker continues after push
    `seq` and step `step`: the last push that any shard reported to it or, later, that this shard
    acknowledged to it. A shard that lacks pushes up to there skips them.
    """

    clock: Count
    again: bool = False
    seq: Count = 0
    step: Count = 0


class Push(Registered, frozen=True, tag="push"):
    """A gradient of the tables in `parts`, with the frames of each; other tables do not change.

    All parts are judged and applied as one: if one of them is refused, nothing is applied. `seq`
    numbers this worker's pushes from 1; `clock` and `step` are its clock and the steps of its own
    plan once this push is applied; `steps` and `samples` count what the gradient sums over;
    `read_version` is the version it was computed from. `loss` and the times in seconds are for the
    records; `acknowledged` is the last push that all shards have acknowledged. A report to a quorum
    (aggregation.py) is on one table: over `window` steps since the worker received that table it
    has learnt from `tokens` samples.
    """

    epoch: Count
    seq: Count
    clock: Count
    step: Count
    steps: Steps
    samples: Samples
    read_version: Count
    parts: Parts
    loss: float
    rtt_s: float
    wait_s: float
    acknowledged: Count = 0
    compute_s: float = 0.0
    data_s: float = 0.0
    network_s: float = 0.0
    tokens: Samples = 0
    window: Steps = 0


class Pull(Registered, frozen=True, tag="pull"):
    """Request the weights for a step that may start once every active clock is >= clock - bound."""

    epoch: Count
    clock: Count
    parts: Annotated[list[AskedPart], Meta(max_length=MAX_TABLES)]


class Renew(Registered, frozen=True, tag="renew"):
    """Renew the worker's lease; its parked requests still wait.

    `host` is the name of the worker's host, and `rtt_s` the round trip of its connection to this
    shard as the system measures it (0: not known). Both are for the shard's status alone.
    """

    host: Host = ""
    rtt_s: float = 0.0


class Leave(Registered, frozen=True, tag="leave"):
    """Stop counting the worker at the gate, and forget its parked requests."""


# --- from an operator: the process that started the job -------------------------------------------


class FromOperator(Message, frozen=True):
    job: Name


# The WAL stores Install too, so the field keeps the name that it has in earlier files.
class Install(FromOperator, frozen=True, tag="install", rename={"keep_workers": "goes_on"}):
    """Install a state, which the frames hold (shard_state.py); slots that it lacks begin at zero.

    `keep_workers`: active workers of that state stay active; otherwise each counts when it joins
    again. With a `piece` the frames are one piece of the state, which is installed once all are
    there.
    """

    keep_workers: bool = False
    piece: Piece | None = None


class Export(FromOperator, frozen=True, tag="export"):
    """Request the whole state at one version, or the first piece of it if it exceeds a piece."""

    piece_bytes: PieceBytes = PIECE_BYTES


class AskPiece(FromOperator, frozen=True, tag="ask_piece"):
    """Request a further piece of the export `of`, opened by the shard with this `boot` number."""

    boot: Count
    of: Count
    number: Count


class Read(FromOperator, frozen=True, tag="read"):
    """Request the current weights without waiting at the gate.

    Without `parts`, those of all dense tables.
    """

    parts: Annotated[list[AskedPart], Meta(max_length=MAX_TABLES)] = []


class Describe(FromOperator, frozen=True, tag="describe"):
    """Request the description of the job; protocol and schema must equal the shard's."""

    protocol: Count
    schema: Name


class Quiesce(FromOperator, frozen=True, tag="hold"):
    """Quiesce for this many seconds (0: resume) at the cut in the frame (a `Cut`).

    Without a frame, quiesce at the pushes applied so far. `owner` is a number that the operator has
    drawn: while another operator's quiesce is in force, the request changes nothing.
    `apply_buffer`: once all pushes up to the cut are there, apply what a buffer holds, although it
    is not full.
    """

    seconds: Annotated[float, Meta(ge=0, le=3600)]
    owner: Count
    apply_buffer: bool = False


class HandOver(FromOperator, frozen=True, tag="retire"):
    """Redirect every worker to the shards that the frame describes; only while `owner` quiesces.

    The frame must have `size` bytes, because a truncated one would misdirect the workers.
    """

    size: Count
    owner: Count


class LiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a job that an operator may change while it trains.

    `bound` is the staleness bound in steps (None: none); `rate_factor` multiplies the rates of all
    schedules. The settings of the highest `revision` are in force; 0 are those that the job began
    with. `owner` is a number that the operator who changed them has drawn.
    """

    bound: Count | None
    rate_factor: RateFactor = 1.0
    revision: Count = 0
    owner: Count = 0


class ChangeSettings(FromOperator, frozen=True, tag="change"):
    """Train with these settings from now on, unless those in force have as high a revision."""

    settings: LiveSettings


class AskStatus(FromOperator, frozen=True, tag="ask_status"):
    """Request the shard's counters and the status of each worker."""


class AskRecords(FromOperator, frozen=True, tag="ask_records"):
    """Request the update records from number `after` on; the shard drops the earlier ones."""

    after: Count


class Probe(FromOperator, frozen=True, tag="probe"):
    """Measure the link: frames of any content may follow; the answer has `payload_bytes`."""

    payload_bytes: Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)]


# Requests that the shard's state answers; a Probe also needs its host's clocks.
Request = (
    Hello
    | Join
    | Push
    | Pull
    | Renew
    | Leave
    | Install
    | Export
    | AskPiece
    | Read
    | Describe
    | Quiesce
    | HandOver
    | ChangeSettings
    | AskStatus
    | AskRecords
)

CHANGING = (Hello, Join, Push, Leave, Install, Quiesce, HandOver, ChangeSettings)
"""The requests that can change a shard's state; they are logged and replicated."""


# --- from a shard ---------------------------------------------------------------------------------


class FromShard(Message, frozen=True):
    shard: Count
    boot: Count


class Welcome(FromShard, frozen=True, tag="welcome"):
    """The shard's record of this worker: its last applied push, and the steps up to that.

    When that push was sent, all shards had acknowledged the pushes up to `acknowledged`. A shard
    that is `rolled_back` continues from a save and may lack pushes that it acknowledged.
    """

    epoch: Count
    version: Count
    seq: Count
    step: Count
    lease_s: float
    rolled_back: bool = False
    acknowledged: Count = 0


class Joined(FromShard, frozen=True, tag="joined"):
    """The worker counts at the gate from `clock` on."""

    clock: Count


class Ack(FromShard, frozen=True, tag="ack"):
    """Push `seq` is applied; a duplicate was applied before and changes nothing.

    It is part of `version`, or will be: a push in a buffer is applied with those that follow it.
    `scale` is the factor on its rate. One too late for its round, or too stale, is `dropped`. A
    late report came `late_s` seconds after the first of those that were merged without it.
    """

    seq: Count
    version: Count
    staleness: Count
    duplicate: bool
    scale: float = 1.0
    dropped: bool = False
    late_s: float = 0.0


class Weights(FromShard, frozen=True, tag="weights"):
    """The frames of each part, all of one version; the pull was parked for `waited_s`."""

    epoch: Count
    version: Count
    parts: Annotated[list[PulledPart], Meta(max_length=MAX_TABLES)]
    waited_s: float


class Parked(FromShard, frozen=True, tag="parked"):
    """The request still waits at the gate, or behind the worker's own push in an open round.

    The slowest active worker is at `min_clock`.
    """

    min_clock: Count


class Renewed(FromShard, frozen=True, tag="renewed"):
    """The worker's lease is renewed."""


class Left(FromShard, frozen=True, tag="left"):
    """The worker no longer counts at the gate."""


class Refusal(FromShard, frozen=True, tag="refusal"):
    """The request failed. `expected` is the push number that a gap starts at, otherwise 0.

    With the remedy `moved`, one frame describes the new shards (errors.py).
    """

    remedy: Remedy
    text: Text
    expected: Count = 0


class Quiesced(FromShard, frozen=True, tag="holding"):
    """One frame: a `Cut`, each worker's last applied push.

    `missing`: a worker with a valid lease has yet to send a push up to the requested cut.
    `busy_s`: the request changed nothing, because another operator quiesces the shard, for at most
    this many seconds more. `revision` is that of the settings in force.
    """

    missing: bool
    busy_s: float = 0.0
    revision: Count = 0


class HandedOver(FromShard, frozen=True, tag="retired"):
    """The shard redirects every worker to the new shards."""


class SettingsInForce(FromShard, frozen=True, tag="in_force"):
    """The settings that this shard trains with; `changed` if the request has changed them.

    `busy_s`: the request changed nothing, because an operator quiesces the shard, for at most this
    many seconds more.
    """

    settings: LiveSettings
    changed: bool = False
    busy_s: float = 0.0


class Installed(FromShard, frozen=True, tag="installed"):
    """The shard holds the installed state, which is at `version`.

    It does not yet hold it while pieces are `missing`.
    """

    version: Count
    missing: Count = 0


class State(FromShard, frozen=True, tag="state"):
    """A shard's exported state, or a piece of it: frames as in Install, all of one version."""

    version: Count
    piece: Piece | None = None


class Described(FromShard, frozen=True, tag="described"):
    """One frame: the description of the job that came with the state (shard_state.py)."""


class Status(FromShard, frozen=True, tag="status"):
    """One frame: a `ShardStatus` as MessagePack, because it may exceed a header's size."""


class Probed(FromShard, frozen=True, tag="probed"):
    """One frame of the requested size.

    `unix_s` is the host's clock, `cpu_s` the CPU time of its process, `received_bytes` the size of
    the probe's frames.
    """

    protocol: Count
    schema: Name
    unix_s: float
    cpu_s: float
    received_bytes: Count


class Records(FromShard, frozen=True, tag="records"):
    """One frame: update records (update_records.py) numbered from `first`."""

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
    | Quiesced
    | HandedOver
    | SettingsInForce
    | Installed
    | State
    | Described
    | Status
    | Probed
    | Records
)


# --- the content of a frame ----------------------------------------------------------------------


class Cut(msgspec.Struct, frozen=True):
    """A consistent cut: a push number for each worker (quiesce.py)."""

    pushes: dict[Name, Count]

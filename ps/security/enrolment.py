"""Enrolment: how a worker's own key is admitted to shards that use CURVE, by the join token.

A worker makes a key pair. It connects to each shard once as the holder of the token
(authorization.py), and has the public half of its own key enrolled under its name. From then on the
key identifies the worker. Only then are its links opened.

    Enrol     the worker's name and key
    Enrolled  the key is admitted
    Later     not at the moment, with the reason; the worker asks again
    Rejected    refused, with the reason

Each is a single frame, on a connection that carries nothing else.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import zmq

from ps.cluster import Cluster
from ps.logs import logger
from ps.security.authorization import Admission, Enrolments, KeyRegistry
from ps.security.handshake_diagnostics import HandshakeFault, HandshakeProbe
from ps.security.keys import KeyPair, address_of
from ps.session.events import Unreachable
from ps.snapshots import checked_json
from ps.snapshots.private_files import replace_private
from shards import wire_format
from shards.errors import UNDECODABLE, BadInput, DownpourError, GiveUp, Retry
from shards.messages import LONGEST_TEXT, Count, Name, Text
from shards.wire_format import Buffer

_REPEAT_S = 2.0
_NAME = "joined"
_LOG = logger(__name__)  # a shard's process adds the shard


class _Word(msgspec.Struct, frozen=True, tag_field="j", forbid_unknown_fields=True):
    pass


class Enrol(_Word, frozen=True, tag="enrol"):
    worker: Name
    incarnation: Count
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class Enrolled(_Word, frozen=True, tag="enrolled"):
    pass


class Later(_Word, frozen=True, tag="later"):
    reason: Text


class Rejected(_Word, frozen=True, tag="denied"):
    reason: Text


_ASKED: msgspec.msgpack.Decoder[Enrol] = msgspec.msgpack.Decoder(Enrol)
_ANSWERS: msgspec.msgpack.Decoder[Enrolled | Later | Rejected] = msgspec.msgpack.Decoder(
    Enrolled | Later | Rejected
)


def answer(registry: KeyRegistry, parts: Sequence[Buffer], now: float) -> tuple[bytes, bool]:
    """The answer to an enrolment request in `parts`, and whether a new key was enrolled."""
    try:
        asked = wire_format.decode(b"".join(map(bytes, parts[:1])), _ASKED)
        new = registry.enrol(asked.worker, asked.incarnation, asked.key, now)
    except Retry as error:
        return wire_format.encode_state(Later(str(error)[:LONGEST_TEXT])), False
    except DownpourError as error:
        return wire_format.encode_state(Rejected(str(error)[:LONGEST_TEXT])), False
    return wire_format.encode_state(Enrolled()), new


class WorkerCredentials:
    """A worker incarnation's credentials: the job's token to join with, then its own key."""

    def __init__(self, token: str, worker: str, incarnation: int) -> None:
        """Raises BadInput if the token is no key."""
        self.token = KeyPair.of(token)
        self.own = KeyPair.new()
        self.worker = worker
        self.enrol = wire_format.encode_state(Enrol(worker, incarnation, self.own.public))


class EnrolmentRequest:
    """A request to the shard process at `endpoint` to enrol a worker; wakes `poller`."""

    def __init__(
        self, shard: int, endpoint: str, credentials: WorkerCredentials, poller: zmq.Poller
    ) -> None:
        self.shard, self.endpoint = shard, endpoint
        self._credentials, self._poller = credentials, poller
        self._link = HandshakeProbe(endpoint, credentials.token)
        self._link.register(poller)
        self._repeat_at = 0.0
        self.delayed = ""  # the shard's reason for `Later`, in words

    def ask(self, now: float) -> float:
        """Send the request if it is due; returns when it is due next."""
        if now >= self._repeat_at:
            self._link.send(self._credentials.enrol)
            self._repeat_at = now + _REPEAT_S
        return self._repeat_at

    def let_in(self) -> bool:
        """Return whether the shard has enrolled the worker; raises GiveUp if it refuses."""
        self._link.fault()  # reads the monitor events, which would wake the poller again
        for frames in self._link.take_messages():
            match wire_format.decode(frames[0], _ANSWERS):
                case Enrolled():
                    return True
                case Later(reason):
                    self.delayed = f": {reason}"
                case Rejected(reason):
                    raise GiveUp(f"shard {self.shard}: {reason}")
        return False

    def check(self) -> None:
        """Raise GiveUp if the handshake has failed: waiting would not help."""
        if fault := self._link.fault():
            where = address_of(self.endpoint).plain
            raise HandshakeFault(f"shard {self.shard} at {where}: {fault}")

    def close(self) -> None:
        self._link.unregister(self._poller)
        self._link.close()


def join(
    cluster: Cluster,
    worker: str,
    endpoints: Sequence[str],
    patience_s: float,
    incarnation: int = 0,
) -> KeyPair | None:
    """Enrol `worker` at `endpoints`, the cluster's or local ones that lead there; returns its key.

    Returns None if no endpoint needs a key. Raises BadInput if the cluster's description has no
    token, GiveUp with the reason if a shard refuses, Unreachable if a shard does not answer.
    """
    targets = [(shard, at) for shard, at in enumerate(endpoints) if address_of(at).key]
    if not targets:
        return None
    credentials = WorkerCredentials(token_of(cluster), worker, incarnation)
    enrol(credentials, targets, patience_s)
    return credentials.own


def enrol(
    credentials: WorkerCredentials, targets: Sequence[tuple[int, str]], patience_s: float
) -> None:
    """Enrol a worker with each of these shards, given their numbers and endpoints.

    Raises GiveUp with the reason if one refuses, Unreachable if one does not answer.
    """
    poller, until = zmq.Poller(), time.monotonic() + patience_s
    with contextlib.ExitStack() as stack:
        waiting = [EnrolmentRequest(shard, at, credentials, poller) for shard, at in targets]
        for request in waiting:
            stack.callback(request.close)
        while waiting:
            now = time.monotonic()
            if now >= until:
                shard, where = waiting[0].shard, address_of(waiting[0].endpoint).plain
                raise Unreachable(
                    f"shard {shard} at {where} has not let in {credentials.worker} for"
                    f" {patience_s:g} s{waiting[0].delayed}",
                    shard,
                )
            repeat_at = min([request.ask(now) for request in waiting])
            poller.poll(max(1, int(1000 * (min(until, repeat_at) - now))))
            for request in waiting:
                request.check()
            waiting = [request for request in waiting if not request.let_in()]


def operator_key(cluster: Cluster) -> KeyPair | None:
    """The key of the job's operator; None if neither the shards nor the coordinator need one.

    Raises BadInput if the cluster's description is a worker's, which does not hold it.
    """
    if not any(address_of(at).key for at in (*cluster.endpoints, cluster.coordinator or "")):
        return None
    if cluster.access is None or not cluster.access.operator:
        raise BadInput(
            f"cluster {cluster.name}",
            expected=(
                "the operator's key, which its driver and the run folder's cluster.json have"
            ),
            got="a worker's description",
        )
    return KeyPair.of(cluster.access.operator)


def token_of(cluster: Cluster) -> str:
    """The join token in a cluster's description; raises BadInput if it has none."""
    if cluster.access is None or not cluster.access.token:
        raise BadInput(f"cluster {cluster.name}", expected="a join token in it", got="none")
    return cluster.access.token


class _StoredEnrolments(msgspec.Struct, frozen=True):
    admission: Admission
    enrolments: Enrolments


class EnrolmentStore:
    """The enrolments in a shard's `folder`; the caller holds its lock.

    A restarted shard so knows its workers, which reconnect to the same port with the keys that the
    earlier process admitted, and need not join again. The file is stored next to the WAL or the
    autosaves, is readable by its user only, and holds public keys only. A job's new driver has new
    keys, so a file of its earlier ones admits nobody.

    `needed`: reject an enrolment that cannot be stored. A shard that restarts from autosaves admits
    the worker all the same: if the restarted shard does not know the worker, it joins again.
    """

    def __init__(self, folder: Path, *, needed: bool = True) -> None:
        self.path = folder / _NAME
        self._needed = needed
        self._admission: Admission | None = None

    def read(self, admission: Admission) -> Enrolments | None:
        """The enrolments written last under this admission, or None. Raises BadInput."""
        self._admission = admission
        try:
            stored = checked_json.decode(self.path.read_bytes(), _StoredEnrolments)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadInput(f"joined workers {self.path}: {error.strerror}") from None
        except (*UNDECODABLE, BadInput) as error:
            raise BadInput(f"joined workers {self.path}: {error}") from None
        return stored.enrolments if stored.admission == admission else None

    def write(self, enrolments: Enrolments) -> None:
        """Store enrolments durably.

        On failure the earlier file stays; raises GiveUp if storing is `needed`.
        """
        assert self._admission is not None, "call `read` first"
        content = checked_json.encode(_StoredEnrolments(self._admission, enrolments))
        try:
            replace_private(self.path, content)
        except OSError as error:
            text = f"joined workers {self.path}: {error.strerror}"
            if self._needed:
                raise GiveUp(text) from None
            _LOG.warning("%s; after a death of the shard they join again", text)

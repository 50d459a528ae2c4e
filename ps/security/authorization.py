"""Decides which keys a shard admits, and what each may send. Pure: no socket, no clock.

Theory. Three kinds of key are admitted; any other is refused in the handshake.

- The *operator's* key, of the process that started the job. It may send every message.
- An *invitation*: a key pair made for a job; its secret half is the job's join token. The holder of
  the token proves that in the handshake, so the token itself is never sent. A shard knows only the
  public half, from which the token cannot be computed. The invitation's holder may send one thing:
  a request to enrol a worker's own key. A token bucket limits the joins, so that a thief who uses
  them up keeps others out only while the thief keeps trying. The invitation expires `lasts_s` after
  the operator's last message.
- A *worker's* key, enrolled by an invitation and bound to one name. It may speak as that worker,
  probe the link, read the weights, and ask for the job's description. A later incarnation of the
  name enrols a key of its own. Then the earlier key is fenced, even on a connection that exists
  already, and cannot be enrolled again, even after another shard process has taken over and all its
  workers reconnect.

A shard that is restarted from a WAL, or that has a copy, must admit the workers that have joined
before: the result of all joins is a value (`Enrolments`) from which another registry can start.

A key is 64 hexadecimal digits. Keys here are public, so comparing them need not take constant time.
"""

import msgspec

from ps.cluster import Access
from ps.security.keys import KeyPair
from shards.errors import BadMessage, Fenced, GiveUp, Retry
from shards.messages import Describe, FromWorker, Message, Probe, Read

LASTS_S = 24 * 3600.0
JOINS_A_WORKER = 64  # tasks are retried, and users of the SDK open several clients in turn
JOINS_A_WORKER_S = 1.0
NAMES_A_WORKER = 16 << 10  # limits what a thief can make a shard store, at 150 bytes a name


class Invitation(msgspec.Struct, frozen=True):
    """The public key of a join token, and the limits on joining with it.

    It is valid until `lasts_s` seconds after the operator's last message, for `joins` joins at once
    and `joins_a_second` afterwards, under at most `names` names.
    """

    key: str
    joins: int
    lasts_s: float = LASTS_S
    joins_a_second: float = JOINS_A_WORKER_S
    names: int = NAMES_A_WORKER


class Admission(msgspec.Struct, frozen=True):
    """The keys that a job's shards admit from the start; all are public halves.

    Of a job that has `ended`, for the reason given here, every key is admitted: the server behind
    it holds nothing, and answers whatever a client of the job asks with the reason.
    """

    operator: str
    invitation: Invitation
    ended: str = ""


class Enrolment(msgspec.Struct, frozen=True):
    """The key of one incarnation of a worker."""

    worker: str
    incarnation: int
    key: str


class Enrolments(msgspec.Struct, frozen=True):
    """The result of all joins: how many joins are left now, and each worker's last key."""

    joins: int
    workers: tuple[Enrolment, ...] = ()


def issue(workers: int) -> tuple[Access, Admission]:
    """Make fresh keys for a job of `workers`: secrets for its clients, admission for its shards."""
    operator, token = KeyPair.new(), KeyPair.new()
    invitation = Invitation(
        token.public,
        JOINS_A_WORKER * workers,
        joins_a_second=JOINS_A_WORKER_S * workers,
        names=NAMES_A_WORKER * workers,
    )
    return Access(token.secret, operator.secret), Admission(operator.public, invitation)


class KeyRegistry:
    """The keys that one shard admits, and the check of what they send."""

    def __init__(self, admission: Admission, now: float, former: Enrolments | None = None) -> None:
        """`now` is in seconds of a monotonic clock, here and below.

        `former` are the enrolments of an earlier registry with the same admission.
        """
        self._admission = admission
        self._joins = float(admission.invitation.joins if former is None else former.joins)
        self._joins_at = now
        self._heard_at = now
        workers = () if former is None else former.workers
        self._enrolments = {enrolment.worker: enrolment for enrolment in workers}
        self._names = {enrolment.key: enrolment.worker for enrolment in workers}

    @property
    def enrolments(self) -> Enrolments:
        """The enrolments from which a later registry with the same admission can start."""
        return Enrolments(int(self._joins), tuple(self._enrolments.values()))

    def admits(self, key: str) -> bool:
        """Return whether to admit a connection that has proved to hold `key`."""
        known = (self._admission.operator, self._admission.invitation.key)
        return key in known or key in self._names or bool(self._admission.ended)

    def is_invitation(self, key: str) -> bool:
        """Return whether `key` is the invitation's, which may only enrol other keys."""
        return key == self._admission.invitation.key

    def enrol(self, worker: str, incarnation: int, key: str, now: float) -> bool:
        """Admit `key` for an incarnation of a worker, instead of the worker's last key.

        Returns whether the key is new. Raises GiveUp if the invitation has expired, Retry if too
        many have joined lately, Fenced if a later incarnation has joined, BadMessage for a key that
        is used otherwise.
        """
        if self._admission.ended:
            raise GiveUp(self._admission.ended)
        last = self._enrolments.get(worker)
        if last is not None and last.key == key:
            return False
        if last is not None and last.incarnation > incarnation:
            raise Fenced(
                f"worker {worker}: incarnation {incarnation} comes too late: incarnation"
                f" {last.incarnation} has joined, with a key of its own"
            )
        if self.admits(key):
            raise BadMessage(f"worker {worker}: expected a key of its own, got one that is in use")
        silent_s = now - self._heard_at
        if silent_s > self._admission.invitation.lasts_s:
            raise GiveUp(
                f"worker {worker}: the job's join token has expired: it lasts"
                f" {self._admission.invitation.lasts_s:g} s after the operator's last message,"
                f" which was {silent_s:.0f} s ago"
            )
        if last is None and len(self._enrolments) >= self._admission.invitation.names:
            raise GiveUp(
                f"worker {worker}: expected one of the {len(self._enrolments)} names that have"
                " joined, got a new one: the job's join token admits no more"
            )
        self._take_join(worker, now)
        if last is not None:
            del self._names[last.key]
        self._enrolments[worker], self._names[key] = Enrolment(worker, incarnation, key), worker
        return True

    def _take_join(self, worker: str, now: float) -> None:
        """Take a join from the token bucket; raises Retry if none is left at this moment."""
        invitation = self._admission.invitation
        earned = (now - self._joins_at) * invitation.joins_a_second
        self._joins, self._joins_at = min(invitation.joins, self._joins + earned), now
        if self._joins < 1:
            raise Retry(
                f"worker {worker}: too many have joined by the job's join token: it is good for"
                f" {invitation.joins} joins at once and {invitation.joins_a_second:g} a second"
            )
        self._joins -= 1

    def note_operator(self, now: float) -> None:
        """Note that the operator is alive, which extends the invitation."""
        self._heard_at = now

    def check(self, key: str, message: Message, now: float) -> None:
        """Raise BadMessage unless the holder of `key` may send this, Fenced if it was replaced."""
        if self._admission.ended:
            return
        if key == self._admission.operator:
            self.note_operator(now)
            return
        name = self._names.get(key)
        kind = type(message).__name__.lower()
        if name is None:
            raise Fenced(
                f"{kind}: a later incarnation of this worker has joined, with a key of its own"
            )
        if isinstance(message, Probe | Read | Describe):  # a reader holds the token, too
            return
        if not isinstance(message, FromWorker):
            raise BadMessage(f"{kind}: expected the operator's key, got that of worker {name}")
        if message.worker != name:
            raise BadMessage(
                f"{kind}: expected worker {name}, whose key this is, got worker {message.worker}"
            )

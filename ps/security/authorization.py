"""Who may speak to a shard, and what they may say. Values in, values out: no socket, no clock.

Theory. Three kinds of key are let in; any other is turned away before it has said a word.

- The *operator's*: of whoever started the job. It may say everything.
- An *invitation*: a key pair made for a job, whose secret half is its join token. Whoever holds the
  token can prove it in the handshake, so the token itself is never sent, and a shard knows the
  public half alone, from which it cannot be computed. All it may say is: enrol this key of mine as
  that worker. It serves a number of times at once and more times later (a token bucket), so that a
  thief who uses it up keeps others out only for as long as he tries. It does not serve for ever:
  `lasts_s` after the operator was last heard, nobody can join by it any more.
- A *worker's*: enrolled by an invitation, and bound to one name. It may speak as that worker, and
  ask how the link is. A later life of the name enrols a key of its own, and the earlier one's is
  shut out, even on a connection that it has already; it cannot enrol again either, where another
  shard process takes over and all its workers come anew.

A shard that goes on from a log, or that has a copy, must let in the workers of its former life:
what an invitation has led to is a value (`Enrolments`) that another register begins with.

A key is 64 hexadecimal digits. They are public, so comparing them tells nobody anything.
"""

import msgspec

from ps.cluster import Access
from ps.security.keys import KeyPair
from shards.errors import BadMessage, Fenced, GiveUp, Retry
from shards.messages import FromWorker, Message, Probe

LASTS_S = 24 * 3600.0
JOINS_A_WORKER = 64  # a task is tried again; and an SDK's user opens one client after another
JOINS_A_WORKER_S = 1.0
NAMES_A_WORKER = 16 << 10  # what a thief can have written down, at some 150 bytes each


class Invitation(msgspec.Struct, frozen=True):
    """By whose token workers may join, until `lasts_s` after the operator's word.

    They may join `joins` times at once, and `joins_a_second` later; under `names` names at most.
    """

    key: str
    joins: int
    lasts_s: float = LASTS_S
    joins_a_second: float = JOINS_A_WORKER_S
    names: int = NAMES_A_WORKER


class Admission(msgspec.Struct, frozen=True):
    """What a job's shards are told of who may come; nothing in it is secret."""

    operator: str
    invitation: Invitation


class Enrolment(msgspec.Struct, frozen=True):
    """That `key` speaks for `worker`, in that life of it."""

    worker: str
    incarnation: int
    key: str


class Enrolments(msgspec.Struct, frozen=True):
    """What an invitation has led to: how many joins are left now, and each worker's last key."""

    joins: int
    workers: tuple[Enrolment, ...] = ()


def issue(workers: int) -> tuple[Access, Admission]:
    """Fresh keys for a job of so many workers: who holds the first passes those told the second."""
    operator, token = KeyPair.new(), KeyPair.new()
    invitation = Invitation(
        token.public,
        JOINS_A_WORKER * workers,
        joins_a_second=JOINS_A_WORKER_S * workers,
        names=NAMES_A_WORKER * workers,
    )
    return Access(token.secret, operator.secret), Admission(operator.public, invitation)


class KeyRegistry:
    """The keys that one shard lets in, and its judgement of what they say."""

    def __init__(self, admission: Admission, now: float, former: Enrolments | None = None) -> None:
        """`now` is in seconds of a monotonic clock, here and below; `former` are those that a
        register of the same admission had.
        """
        self._admission = admission
        self._joins = float(admission.invitation.joins if former is None else former.joins)
        self._joins_at = now
        self._heard_at = now
        workers = () if former is None else former.workers
        self._lives = {life.worker: life for life in workers}
        self._names = {life.key: life.worker for life in workers}

    @property
    def enrolments(self) -> Enrolments:
        """What a later register of the same admission is to begin with."""
        return Enrolments(int(self._joins), tuple(self._lives.values()))

    def admits(self, key: str) -> bool:
        """Whether a connection that proved to hold `key` may stay."""
        known = (self._admission.operator, self._admission.invitation.key)
        return key in known or key in self._names

    def invited(self, key: str) -> bool:
        """Whether all that `key` may do is enrol another."""
        return key == self._admission.invitation.key

    def enrol(self, worker: str, incarnation: int, key: str, now: float) -> bool:
        """Let in `key` as that life of a worker, in place of its name's last; whether that is new.

        Raises GiveUp where the invitation has run out, Retry where too many have joined by it
        lately, Fenced where a later life has joined, BadMessage for a key that has another part.
        """
        last = self._lives.get(worker)
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
                f" {self._admission.invitation.lasts_s:g} s after the operator's last word, which"
                f" was {silent_s:.0f} s ago"
            )
        if last is None and len(self._lives) >= self._admission.invitation.names:
            raise GiveUp(
                f"worker {worker}: expected one of the {len(self._lives)} names that have joined,"
                " got a new one: the job's join token admits no more"
            )
        self._take_join(worker, now)
        if last is not None:
            del self._names[last.key]
        self._lives[worker], self._names[key] = Enrolment(worker, incarnation, key), worker
        return True

    def _take_join(self, worker: str, now: float) -> None:
        """Count a join; raises Retry where none is left at this moment."""
        invitation = self._admission.invitation
        earned = (now - self._joins_at) * invitation.joins_a_second
        self._joins, self._joins_at = min(invitation.joins, self._joins + earned), now
        if self._joins < 1:
            raise Retry(
                f"worker {worker}: too many have joined by the job's join token: it is good for"
                f" {invitation.joins} joins at once and {invitation.joins_a_second:g} a second"
            )
        self._joins -= 1

    def hear_operator(self, now: float) -> None:
        """Whoever speaks for the operator was heard: the invitation lasts on."""
        self._heard_at = now

    def check(self, key: str, message: Message, now: float) -> None:
        """Raise BadMessage unless the holder of `key` may say this, Fenced if its life is over."""
        if key == self._admission.operator:
            self.hear_operator(now)
            return
        name = self._names.get(key)
        what = type(message).__name__.lower()
        if name is None:
            raise Fenced(f"{what}: a later life of this worker has joined, with a key of its own")
        if isinstance(message, Probe):
            return
        if not isinstance(message, FromWorker):
            raise BadMessage(f"{what}: expected the operator's key, got that of worker {name}")
        if message.worker != name:
            raise BadMessage(
                f"{what}: expected worker {name}, whose key this is, got worker {message.worker}"
            )

"""Who may speak to a shard, and what they may say. Values in, values out: no socket, no clock.

Theory. Three kinds of key are let in; any other is turned away before it has said a word.

- The *operator's*: of whoever started the job. It may say everything.
- An *invitation*: a key pair made for a job, whose secret half is its join token. Whoever holds the
  token can prove it in the handshake, so the token itself is never sent, and a shard knows the
  public half alone, from which it cannot be computed. All it may say is: enrol this key of mine as
  that worker. It serves a number of times, and not for ever: `lasts_s` after the operator was last
  heard, nobody can join by it any more.
- A *worker's*: enrolled by an invitation, and bound to one name. It may speak as that worker, and
  ask how the link is. A later life of the name enrols a key of its own, and the earlier one's is
  shut out, even on a connection that it has already.

A key is 64 hexadecimal digits. They are public, so comparing them tells nobody anything.
"""

import msgspec

from ps.cluster import Access
from ps.keys import KeyPair
from shards.errors import BadMessage, Fenced, GiveUp
from shards.messages import FromWorker, Message, Probe

LASTS_S = 24 * 3600.0
JOINS_A_WORKER = 1024  # a task is tried again; and an SDK's user opens one client after another


class Invitation(msgspec.Struct, frozen=True):
    """By whose token workers may join: `joins` times, until `lasts_s` after the operator's word."""

    key: str
    joins: int
    lasts_s: float = LASTS_S


class Admission(msgspec.Struct, frozen=True):
    """What a job's shards are told of who may come; nothing in it is secret."""

    operator: str
    invitation: Invitation


def issue(workers: int) -> tuple[Access, Admission]:
    """Fresh keys for a job of so many workers: who holds the first passes those told the second."""
    operator, token = KeyPair.new(), KeyPair.new()
    invitation = Invitation(token.public, JOINS_A_WORKER * workers)
    return Access(token.secret, operator.secret), Admission(operator.public, invitation)


class Register:
    """The keys that one shard lets in, and its judgement of what they say."""

    def __init__(self, admission: Admission, now: float) -> None:
        """`now` is in seconds of a monotonic clock, here and below."""
        self._admission = admission
        self._joins = admission.invitation.joins
        self._heard_at = now
        self._names: dict[str, str] = {}  # a worker's key: its name
        self._keys: dict[str, str] = {}  # the inverse

    def admits(self, key: str) -> bool:
        """Whether a connection that proved to hold `key` may stay."""
        known = (self._admission.operator, self._admission.invitation.key)
        return key in known or key in self._names

    def invited(self, key: str) -> bool:
        """Whether all that `key` may do is enrol another."""
        return key == self._admission.invitation.key

    def enrol(self, worker: str, key: str, now: float) -> None:
        """Let in `key` as that worker, in place of its name's last; asked again, nothing happens.

        Raises GiveUp where the invitation has run out, BadMessage for a key that has another part.
        """
        if self._keys.get(worker) == key:
            return
        if self.admits(key):
            raise BadMessage(f"worker {worker}: expected a key of its own, got one that is in use")
        silent_s = now - self._heard_at
        if silent_s > self._admission.invitation.lasts_s:
            raise GiveUp(
                f"worker {worker}: the job's join token has expired: it lasts"
                f" {self._admission.invitation.lasts_s:g} s after the operator's last word, which"
                f" was {silent_s:.0f} s ago"
            )
        if not self._joins:
            raise GiveUp(
                f"worker {worker}: the job's join token is used up: it was good for"
                f" {self._admission.invitation.joins} joins"
            )
        self._joins -= 1
        if worker in self._keys:
            del self._names[self._keys[worker]]
        self._keys[worker], self._names[key] = key, worker

    def check(self, key: str, message: Message, now: float) -> None:
        """Raise BadMessage unless the holder of `key` may say this, Fenced if its life is over."""
        if key == self._admission.operator:
            self._heard_at = now
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

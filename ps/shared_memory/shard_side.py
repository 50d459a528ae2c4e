"""A shard's end of shared memory (references.py): it lends its versions, and reads its workers'
pushes.

Who has shown both random numbers is a tenant, and has versions lent to it, a few at a time. Offers
of workers that have not been welcomed yet only wait. What a tenant holds is taken back when it says
so, or when it is dead.
"""

import hmac

from ps.shared_memory import handshake, references
from ps.shared_memory.handshake import Accept, Decline, Lent, Offer, SharedFrames
from ps.shared_memory.loans import Loans
from ps.shared_memory.references import Parts, Together
from ps.shared_memory.segment import SharedBuffers, ShmSegment, Window
from shards import wire_format
from shards.errors import BadMessage
from shards.messages import Welcome
from shards.versions import Allocator, Buffers, heap_allocator

LOANS = 4  # what one worker may hold: the weights in use, those prefetched, and some on their way
_VERSIONS = 64
_ADDRESSES = 16
_OFFERS = 64  # that await a Welcome; a worker whose offer is forgotten does without


class _SharingWorker:
    """A worker that shares memory with this shard."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.loans = Loans(LOANS)
        self.addresses: list[bytes] = []


class ShardSide:
    """A shard's end: lends its versions, and looks into its workers' segments."""

    def __init__(
        self, job: str, *, wanted: bool = True, otherwise: Allocator = heap_allocator
    ) -> None:
        self._job = job
        self._wanted = wanted
        self._otherwise = otherwise
        self._segment: ShmSegment | None = None
        self._reason = "the shard does not share memory"
        self._offers: dict[bytes, str] = {}
        self._tenants: dict[str, _SharingWorker] = {}
        self._by_address: dict[bytes, _SharingWorker] = {}

    def buffers(self, floats: int) -> Buffers:
        """What is sent of the weights lies in a segment, or, if there is none, in other memory."""
        if not self._wanted:
            return Buffers(floats, self._otherwise)
        try:
            self._segment = ShmSegment(self._job, floats, _VERSIONS)
        except OSError as error:
            self._reason = f"the shard has no shared memory: {error.strerror}"
            return Buffers(floats, self._otherwise)
        return SharedBuffers(floats, self._segment)

    @property
    def tenants(self) -> int:
        """How many workers share memory with this shard."""
        return len(self._tenants)

    def open(self, sender: bytes, parts: Parts) -> Parts | None:
        """What came from `sender` without its note, frames in place; None if it is too late.

        Raises BadMessage.
        """
        self._offers.pop(sender, None)
        if not parts or not handshake.is_note(parts[0]):
            return parts
        if len(parts) < 2:
            raise BadMessage("expected an envelope behind the note, got none")
        said = handshake.decode_from_worker(parts[0])
        if isinstance(said, Offer):
            if len(self._offers) == _OFFERS:
                del self._offers[next(iter(self._offers))]
            self._offers[sender] = said.segment
            return parts[1:]
        tenant = self._identify(sender, said)
        if tenant is None:
            # Meant for an earlier life of this shard, as its header will say: the frames are lost.
            return [parts[1], *(b"" for _ in parts[2:])] if said.referred else parts[1:]
        tenant.loans.settle(said.seen, said.held)
        return references.looked_up(tenant.window, parts[1:]) if said.referred else parts[1:]

    def seal(self, to: bytes, messages: Together) -> tuple[Parts, int | None]:
        """The parts that tell `messages` to `to`, and the loan that this makes, if any."""
        if to in self._offers and references.has(messages, Welcome):
            answer = self._answer_offer(self._offers.pop(to))
            return [handshake.encode(answer), *wire_format.enclose(messages)], None
        tenant = self._by_address.get(to)
        if tenant is None or self._segment is None:
            return wire_format.enclose(messages), None
        referring = references.referring(self._segment, messages)
        loan = tenant.loans.lend(messages) if referring is not None else None
        if referring is None or loan is None:
            return wire_format.enclose(messages), None
        return [handshake.encode(Lent(loan)), *wire_format.enclose(referring)], loan

    def withdraw(self, to: bytes, loan: int | None) -> None:
        """The message that made `loan`, if any, could not be sent."""
        if loan is not None:
            self._by_address[to].loans.withdraw(loan)

    def tick(self) -> None:
        """Take back what the dead hold, and remove what they left; call it now and then."""
        for nonce, tenant in list(self._tenants.items()):
            if tenant.window.owner_is_gone():
                tenant.window.path.unlink(missing_ok=True)
                self._forget(nonce)

    def close(self) -> None:
        for nonce in list(self._tenants):
            self._forget(nonce)
        if self._segment is not None:
            self._segment.close()

    def _answer_offer(self, name: str) -> Accept | Decline:
        if self._segment is None:
            return Decline(self._reason)
        known = [t.window for t in self._tenants.values() if t.window.name == name]
        try:
            window = known[0] if known else Window(self._job, name)
        except BadMessage as error:
            return Decline(str(error)[:256])
        if not known:
            self._tenants[window.nonce] = _SharingWorker(window)
        return Accept(window.nonce, self._segment.name)

    def _identify(self, sender: bytes, said: SharedFrames) -> _SharingWorker | None:
        """The tenant who knows both numbers; from now on it has this address, too."""
        tenant = self._tenants.get(said.mine)
        ours = self._segment.nonce if self._segment is not None else ""
        if tenant is None or not hmac.compare_digest(ours.encode(), said.yours.encode()):
            return None
        if self._by_address.get(sender) is not tenant:
            self._by_address[sender] = tenant
            tenant.addresses.append(sender)
            for old in tenant.addresses[:-_ADDRESSES]:  # of connections that it has had before
                self._by_address.pop(old, None)
            del tenant.addresses[:-_ADDRESSES]
        return tenant

    def _forget(self, nonce: str) -> None:
        tenant = self._tenants.pop(nonce)
        tenant.window.close()
        for address in tenant.addresses:
            self._by_address.pop(address, None)

"""A shard's side of shared memory (references.py): lends versions, and reads workers' pushes.

The shard lends versions, a few at a time, to a worker that has quoted the random numbers of both
segments, and so sees the same memory. Offers wait until the shard has welcomed the worker. What a
worker holds is taken back when the worker returns it or has died.
"""

import hmac

from ps.shared_memory import handshake, references
from ps.shared_memory.handshake import Accept, Decline, Lent, Offer, SharedFrames
from ps.shared_memory.references import Loans, Parts, Together
from ps.shared_memory.segment import SharedBuffers, ShmSegment, Window
from shards import wire_format
from shards.buffer_pool import Allocator, Buffers, heap_allocator
from shards.errors import BadMessage
from shards.messages import Welcome

LOANS = 4  # of one worker: the weights in use, prefetched ones, and some in transit
_VERSIONS = 64
_ADDRESSES = 16
_OFFERS = 64  # kept until a Welcome; a worker with a dropped offer does without shared memory


class _SharingWorker:
    """A worker that shares memory with this shard."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.loans = Loans(LOANS)
        self.addresses: list[bytes] = []


class ShardSide:
    """A shard's side: lends its versions, and reads its workers' segments.

    `offers` are the workers' segments by sender, until a Welcome answers or `open` drops them;
    `addresses` are those of the workers that share memory. Nothing has to be sealed for others.
    """

    def __init__(
        self,
        job: str,
        *,
        enabled: bool = True,
        rows: bool = False,
        otherwise: Allocator = heap_allocator,
    ) -> None:
        """`rows`: the shard has rows, which are lent like versions, each as a copy for a worker."""
        self._job = job
        self._enabled = enabled
        self._rows = rows
        self._otherwise = otherwise
        self._segment: ShmSegment | None = None
        self._reason = "the shard does not share memory"
        self.offers: dict[bytes, str] = {}
        self._workers: dict[str, _SharingWorker] = {}
        self.addresses: dict[bytes, _SharingWorker] = {}

    def buffers(self, floats: int) -> Buffers:
        """Buffers for weights to send: in a segment, or in other memory if there is none."""
        if not self._enabled or not (floats or self._rows):
            return Buffers(floats, self._otherwise)
        try:
            self._segment = ShmSegment(self._job, floats, _VERSIONS, rows=self._rows)
        except OSError as error:
            self._reason = f"the shard has no shared memory: {error.strerror}"
            return Buffers(floats, self._otherwise)
        return SharedBuffers(floats, self._segment)

    @property
    def sharing_workers(self) -> int:
        """The number of workers that share memory with this shard."""
        return len(self._workers)

    def open(self, sender: bytes, parts: Parts) -> Parts | None:
        """The parts without their note, with references resolved; None if outdated.

        Raises BadMessage.
        """
        self.offers.pop(sender, None)
        if not parts or not handshake.is_note(parts[0]):
            return parts
        if len(parts) < 2:
            raise BadMessage("expected an envelope behind the note, got none")
        note = handshake.decode_from_worker(parts[0])
        if isinstance(note, Offer):
            if len(self.offers) == _OFFERS:
                del self.offers[next(iter(self.offers))]
            self.offers[sender] = note.segment
            return parts[1:]
        worker = self._identify(sender, note)
        if worker is None:
            # The message was for an earlier process of this shard, as its header will show. Its
            # shared frames cannot be read; empty ones replace them.
            if not note.referred:
                return parts[1:]
            return [parts[1], *[b""] * references.count_references(parts[1:])]
        worker.loans.settle(note.seen, note.held)
        return references.resolve(worker.window, parts[1:]) if note.referred else parts[1:]

    def seal(self, to: bytes, messages: Together) -> tuple[Parts, int | None]:
        """The parts that carry `messages` to `to`, and the number of the loan made, if any."""
        if to in self.offers and references.has(messages, Welcome):
            answer = self._answer_offer(self.offers.pop(to))
            return [handshake.encode(answer), *wire_format.enclose(messages)], None
        worker = self.addresses.get(to)
        if worker is None or self._segment is None or len(worker.loans) == LOANS:
            return wire_format.enclose(messages), None
        referring = references.with_references(self._segment, messages, copies=self._rows)
        if referring is None:
            return wire_format.enclose(messages), None
        # The loan holds the messages, and with them the arrays, until the worker returns it.
        loan = worker.loans.lend((messages, referring.copies))
        assert loan is not None, "there was one left"
        return [handshake.encode(Lent(loan)), *referring.enclose()], loan

    def withdraw(self, to: bytes, loan: int | None) -> None:
        """Cancel `loan`, if any: its message could not be sent."""
        if loan is not None:
            self.addresses[to].loans.withdraw(loan)

    def tick(self) -> None:
        """Take back loans of dead workers, and remove their files; call it periodically."""
        for nonce, worker in list(self._workers.items()):
            if worker.window.owner_is_gone():
                worker.window.path.unlink(missing_ok=True)
                self._forget(nonce)

    def close(self) -> None:
        for nonce in list(self._workers):
            self._forget(nonce)
        if self._segment is not None:
            self._segment.close()

    def _answer_offer(self, name: str) -> Accept | Decline:
        if self._segment is None:
            return Decline(self._reason)
        known = [t.window for t in self._workers.values() if t.window.name == name]
        try:
            window = known[0] if known else Window(self._job, name)
        except BadMessage as error:
            return Decline(str(error)[:256])
        if not known:
            self._workers[window.nonce] = _SharingWorker(window)
        return Accept(window.nonce, self._segment.name)

    def _identify(self, sender: bytes, note: SharedFrames) -> _SharingWorker | None:
        """The worker that knows both numbers, if any; records its address."""
        worker = self._workers.get(note.mine)
        nonce = self._segment.nonce if self._segment is not None else ""
        # In constant time, because the number is a secret: it admits to the segment.
        if worker is None or not hmac.compare_digest(nonce.encode(), note.yours.encode()):
            return None
        if self.addresses.get(sender) is not worker:
            self.addresses[sender] = worker
            worker.addresses.append(sender)
            for old in worker.addresses[:-_ADDRESSES]:  # of earlier connections
                self.addresses.pop(old, None)
            del worker.addresses[:-_ADDRESSES]
        return worker

    def _forget(self, nonce: str) -> None:
        worker = self._workers.pop(nonce)
        worker.window.close()
        for address in worker.addresses:
            self.addresses.pop(address, None)

"""Renews the lease in a thread, while the worker computes.

The thread also notices when another life has taken over the worker's name, and ends then. A shard
that refuses a renewal because it has forgotten this worker, as one that was rolled back may, has to
be greeted: the owner does that, because only it may use the session.
"""

import threading
from collections import deque

from ps.session.session import Session
from ps.transport.shard_connections import ShardConnections
from shards.error_codes import error_of
from shards.messages import Refusal, Remedy, Renew

_ANSWER_S = 0.25  # after a renewal its answers are read; later ones are read after the next one


class LeaseKeepAlive:
    """A thread with links of its own that renews the lease every `period_s` seconds.

    `failure` is the exception that ended it, if any. `refusals` are shards that have to be greeted,
    each with its answer; the owner reads both and removes the refusals.
    """

    def __init__(self, connection: ShardConnections, session: Session, period_s: float) -> None:
        self._session = session
        self._connection = connection
        self._period_s = period_s
        self._ended = threading.Event()
        self.failure: Exception | None = None
        self.refusals: deque[tuple[int, Refusal]] = deque()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def stop(self) -> None:
        self.end()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._renew_until_ended()
        except Exception as error:  # noqa: BLE001 - the owner raises it, whatever it is
            self.failure = error

    def _renew_until_ended(self) -> None:
        links = self._connection.more_links()
        answer_s = min(_ANSWER_S, self._period_s / 2)
        try:
            while not self._ended.wait(self._period_s - answer_s):
                links.follow(self._connection.links.endpoints)
                for shard, boot in enumerate(self._session.boots):
                    links.send(shard, self._renew(boot))
                if self._ended.wait(answer_s):
                    return
                for shard, answer, _ in links.receive(0.0):
                    if isinstance(answer, Refusal):
                        self._note(shard, answer)
        finally:
            links.close()

    def _note(self, shard: int, answer: Refusal) -> None:
        if answer.remedy is Remedy.FENCED:
            raise error_of(answer)
        # Every other refusal is also an answer to the owner's own messages.
        if answer.remedy is Remedy.RESYNCHRONISE:
            self.refusals.append((shard, answer))

    def _renew(self, boot: int) -> Renew:
        session = self._session
        return Renew(0, session.job, session.worker, session.incarnation, boot)

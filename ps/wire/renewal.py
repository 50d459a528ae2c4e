"""The lease, renewed while its owner computes: a thread that says now and then that it lives.

It hears, too, when another life has taken over the worker's name: nobody is to renew then.
"""

import threading

from ps.protocol.session import Session
from ps.wire.connection import Connection
from shards.messages import Refusal, Remedy, Renew
from shards.refusals import error_of


class Renewal:
    """A thread with links of its own that keeps the lease while its owner computes.

    `failure` is what ended it, if anything did: its owner looks.
    """

    def __init__(self, connection: Connection, session: Session, period_s: float) -> None:
        self._session = session
        self._connection = connection
        self._period_s = period_s
        self._ended = threading.Event()
        self.failure: Exception | None = None
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
        except Exception as error:  # noqa: BLE001 - its owner is to hear of it, whatever it is
            self.failure = error

    def _renew_until_ended(self) -> None:
        links = self._connection.more_links()
        try:
            while not self._ended.wait(self._period_s):
                links.follow(self._connection.links.endpoints)
                for shard, boot in enumerate(self._session.boots):
                    links.send(shard, self._renew(boot))
                # To the renewal before. All else that they say the owner's own messages hear, too.
                for _, answer, _ in links.receive(0.0):
                    if isinstance(answer, Refusal) and answer.remedy is Remedy.FENCED:
                        raise error_of(answer)
        finally:
            links.close()

    def _renew(self, boot: int) -> Renew:
        session = self._session
        return Renew(0, session.job, session.worker, session.incarnation, boot)

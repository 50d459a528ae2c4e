"""The server loop: carries messages between an endpoint and a shard, and decides nothing."""

import time

import zmq

from cupy_kernels.backends import HOST, Backend
from ps.logs import logger
from ps.security.authorization import Admission
from ps.security.enrolment import EnrolmentStore
from ps.security.keys import KeyPair
from ps.server.frontend import ShardFrontend
from ps.socket_context import SocketContext
from ps.transport.addresses import HOST_NAME
from ps.transport.server_thread import ServerThread
from ps.transport.socket_options import drop_with
from ps.transport.transports import Transport
from ps.transport.unfinished_messages import POLL_S
from ps.wal.autosave import Autosaves, AutosavingShard
from ps.wal.writer import LoggedShard, WriteAheadLog
from shards.buffer_pool import staging
from shards.shard import Shard
from shards.spec import ShardSpec


class ShardServer(ServerThread):
    """One shard behind one bound socket; if it `forgets`, stopping deletes its autosaves."""

    forgets = True

    def __init__(
        self,
        spec: ShardSpec,
        boot: int,
        bind: str = "tcp://127.0.0.1:*",
        transport: Transport = Transport.AUTO,
        backend: Backend = HOST,
        admission: Admission | None = None,
        *,
        plaintext: bool = False,
        keys: KeyPair | None = None,
        log: WriteAheadLog | None = None,
        saves: Autosaves | None = None,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput if the address is taken.

        If other hosts can reach the address, `admission` says which keys to admit, or `plaintext`
        admits anybody; with neither it raises BadInput (sockets.py). `keys` prove the shard's
        identity, also after a restart; without them it makes its own.

        Workers on this host are offered `transport` as well as TCP (transports.py). `backend`
        holds weights and slots. The shard recovers from the `log`, and writes each change to it
        before any answer is sent; without a log it recovers from `saves`. Either is closed with the
        server. The enrolments are stored in the same folder.
        """
        assert log is None or saves is None, "a shard has a WAL or autosaves, not both"
        context = SocketContext()
        self._log = log
        self._saves = saves
        storage = log or saves
        self._shard_endpoint = ShardFrontend(
            spec,
            context,
            bind,
            transport,
            staging(backend),
            admission,
            plaintext=plaintext,
            keys=keys,
            store=EnrolmentStore(storage.where, needed=log is not None)
            if storage is not None
            else None,
        )
        drop_with(self, context, self._shard_endpoint.all_sockets)
        super().__init__(
            f"shard-{spec.shard}", context, logger(__name__, job=spec.job, shard=spec.shard)
        )
        self.endpoint = self._shard_endpoint.endpoint
        self.shard = Shard(spec, boot, self._shard_endpoint.sharing.buffers, backend)
        self.shard.metrics.host = HOST_NAME
        spec.prepare(backend)
        if storage is not None:
            storage.recover(self.shard, time.monotonic())
        self._acts: Shard | LoggedShard | AutosavingShard = self.shard
        if log is not None:
            self._acts = LoggedShard(self.shard, log)
        elif saves is not None:
            self._acts = AutosavingShard(self.shard, saves)

    @property
    def empty(self) -> bool:  # type: ignore[override]  # a constant in the base class
        """True if the shard has no weights, neither installed nor recovered."""
        return self.shard.parameters.empty

    def _let_go(self) -> None:
        self._shard_endpoint.close()
        if self._log is not None:
            self._log.close()
        if self._saves is not None:
            self._saves.close(forget=self.forgets)

    def _loop(self) -> None:
        poller = zmq.Poller()
        sockets, events = self._shard_endpoint.sockets, self._shard_endpoint.events
        for socket in (*sockets, *events, self._wake_in):
            poller.register(socket, zmq.POLLIN)
        period = self.shard.spec.lease_s / 4
        parameters, saves = self.shard.parameters, self._saves
        tick_at, poll_s = time.monotonic() + period, POLL_S
        merge_at, merges = None, self.shard.updates.merges_reports
        while True:
            timeout_ms = 0
            if parameters.is_prepared:
                wake_at = tick_at if saves is None else min(tick_at, saves.next_due(self.shard))
                if merge_at is not None:
                    wake_at = min(wake_at, merge_at)
                left_s = min(poll_s, max(0.0, wake_at - time.monotonic()))
                timeout_ms = int(left_s * 1000) + 1
            ready = dict(poller.poll(timeout_ms))
            if self._wake_in in ready:
                return
            if not ready.keys().isdisjoint(sockets):
                self._take_turn()
                poll_s = POLL_S
            elif not parameters.is_prepared:
                self.shard.prepare()
            if len(ready) == 0 or not ready.keys().isdisjoint(events):
                poll_s = self._shard_endpoint.check_connections()
            now = time.monotonic()
            if now >= tick_at:
                self.shard.forgive_silence(now - tick_at)
                self._shard_endpoint.send(self._acts.tick(now))
                self._shard_endpoint.tick()
                tick_at = now + period
            elif merge_at is not None and merge_at <= now:
                self._shard_endpoint.send(self._acts.tick(now))
            if merges:  # a call costs time at each push
                merge_at = self.shard.next_merge(now)
            if saves is not None:
                saves.save_if_due(self.shard, now)

    def _take_turn(self) -> None:
        """Pass what has come to the shard, and send its answers."""
        shard, metrics = self.shard, self.shard.metrics
        arrivals = self._shard_endpoint.arrivals(shard)
        now, before = time.monotonic(), metrics.pushes
        answers = self._acts.handle_together(arrivals, now)
        parked, spent_s = len(shard.gate.parked), time.monotonic() - now
        metrics.turn(len(arrivals), metrics.pushes - before, parked, spent_s)
        self._shard_endpoint.send(answers)

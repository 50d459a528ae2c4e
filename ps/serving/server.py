"""The server loop: carries messages between a reception and a shard, and decides nothing."""

import time
from math import inf

import zmq

from cupy_kernels.places import HOST, Place
from ps.logs.saves import Saves, Saving
from ps.logs.shard_log import Logged, ShardLog
from ps.security.admission import Admission
from ps.security.guest_book import GuestBook
from ps.security.keys import KeyPair
from ps.serving.reception import Reception
from ps.wire.accepted import LOOK_S
from ps.wire.looping import Looping
from ps.wire.sockets import drop_with
from ps.wire.transport import Transport
from shards.checks import prepare
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.versions import staging


class Server(Looping):
    """One shard behind one bound socket; when it stops, its saves go with it if it `forgets`."""

    forgets = True

    def __init__(
        self,
        spec: ShardSpec,
        boot: int,
        bind: str = "tcp://127.0.0.1:*",
        transport: Transport = Transport.AUTO,
        place: Place = HOST,
        admission: Admission | None = None,
        *,
        plaintext: bool = False,
        keys: KeyPair | None = None,
        log: ShardLog | None = None,
        saves: Saves | None = None,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput when the address is taken.

        Where others than this host can reach it, `admission` says who may, or `plaintext` that
        anybody may; with neither it raises BadInput (entrance.py). `keys` are what it proves to be
        itself by, in this life and the next; none, and it makes its own.

        `transport` is what workers on this host are offered beside TCP (transport.py); `place` is
        where weights and slots live. A `log` is what the shard goes on from, and where its changes
        are before anybody hears of them; `saves` are what it goes on from without a log. Either is
        closed with the server. Beside it lies who has been let in.
        """
        assert log is None or saves is None, "one of them is enough"
        context = zmq.Context()
        self._log = log
        self._saves = saves
        kept = log or saves
        self._reception = Reception(
            spec,
            context,
            bind,
            transport,
            staging(place),
            admission,
            plaintext=plaintext,
            keys=keys,
            book=GuestBook(kept.where, needed=log is not None) if kept is not None else None,
        )
        drop_with(self, context, self._reception.owned)
        super().__init__(f"shard-{spec.shard}", context)
        self.endpoint = self._reception.endpoint
        self.shard = Shard(spec, boot, self._reception.sharing.buffers, place)
        spec.prepare(place)
        if kept is not None:
            prepare()
            kept.recover(self.shard, time.monotonic())
        self._acts: Shard | Logged | Saving = self.shard
        if log is not None:
            self._acts = Logged(self.shard, log)
        elif saves is not None:
            self._acts = Saving(self.shard, saves)

    @property
    def empty(self) -> bool:  # type: ignore[override]  # the loop's own is a constant
        """Whether the shard has no weights, neither installed nor recovered."""
        return self.shard.held.empty

    def _let_go(self) -> None:
        self._reception.close()
        if self._log is not None:
            self._log.close()
        if self._saves is not None:
            self._saves.close(forget=self.forgets)

    def _loop(self) -> None:
        poller = zmq.Poller()
        sockets = self._reception.sockets
        for socket in (*sockets, self._wake_in):
            poller.register(socket, zmq.POLLIN)
        period = self.shard.spec.lease_s / 4
        tick_at = time.monotonic() + period
        while True:
            wake_at = min(tick_at, self._next_save(), time.monotonic() + LOOK_S)
            timeout_ms = int(max(0.0, wake_at - time.monotonic()) * 1000) + 1
            ready = dict(poller.poll(timeout_ms if self.shard.prepared else 0))
            if self._wake_in in ready:
                return
            if not ready.keys().isdisjoint(sockets):
                self._take_turn()
            else:
                self._reception.look()
                if not self.shard.prepared:
                    self.shard.prepare()
            now = time.monotonic()
            if now >= tick_at:
                self.shard.excuse(now - tick_at)
                self._reception.send(self._acts.tick(now))
                self._reception.tick()
                tick_at = now + period
            if self._saves is not None:
                self._saves.look(self.shard, now)

    def _next_save(self) -> float:
        return inf if self._saves is None else self._saves.next_look(self.shard)

    def _take_turn(self) -> None:
        """Hand the shard what has come, and send what it answers."""
        arrivals = self._reception.arrivals(self.shard)
        self._reception.send(self._acts.handle_together(arrivals, time.monotonic()))

"""Answers in place of a shard that has died for good, at its endpoint, with the reason.

Workers and readers in other processes would otherwise wait for their whole patience.
"""

import time

from msgspec.structs import replace

from ps.security.authorization import Admission
from ps.security.keys import KeyPair
from ps.server.server import ShardServer
from ps.transport.transports import Transport
from shards.errors import GiveUp
from shards.spec import ShardSpec


class RefusingServer(ShardServer):
    """A server that answers each request of its job with one GiveUp, and holds no weights."""

    def __init__(
        self,
        spec: ShardSpec,
        bind: str,
        reason: str,
        transport: Transport,
        admission: Admission | None = None,
        keys: KeyPair | None = None,
    ) -> None:
        """Bind at once; raises BadInput if the address is taken.

        With `admission` it proves `keys`, which must be those of the dead shard: its clients expect
        them. It admits every key, also of workers that only the dead shard had enrolled.
        """
        ended = None if admission is None else replace(admission, ended=reason)
        super().__init__(
            spec,
            time.time_ns() // 1000,
            bind,
            transport,
            admission=ended,
            plaintext=admission is None,
            keys=keys,
        )
        self._reason = GiveUp(reason)

    def _take_turn(self) -> None:
        """Refuse what has come; a stranger, who does not know the job, gets no answer."""
        shard = self.shard
        self._shard_endpoint.send(
            [
                shard.refuse(arrival.sender, arrival.message.request, self._reason)
                for arrival in self._shard_endpoint.arrivals(shard)
                if arrival.message.job == shard.spec.job
            ]
        )

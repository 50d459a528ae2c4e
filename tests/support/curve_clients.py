"""Clients of shards that admit only the holders of enrolled keys."""

from ps.client import Client
from ps.cluster import Cluster
from ps.security.keys import KeyPair
from ps.transport.shard_sockets import Links
from shards.messages import Message, Reply
from tests.support.eventually import eventually


def as_worker(cluster: Cluster) -> None:
    with Client(cluster, worker="w0", patience_s=60):
        pass


def say(endpoint: str, own: KeyPair, message: Message) -> Reply:
    """The answer to one message from the holder of a key."""
    links = Links([endpoint], keys=own)
    try:
        links.await_connections(60)
        links.send(0, message)
        # `receive` may return without a message, for a connection event.
        (_, reply, _), *_ = eventually(lambda: list(links.receive(10)), because="an answer arrives")
        return reply
    finally:
        links.close()


def text(reply: Reply) -> str:
    return str(getattr(reply, "text", reply))

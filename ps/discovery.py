"""Finds out about a running job from one of its shards, given only its address and the job's token.

The token is the job's id and, where shards speak CURVE, the join token after a colon: what the
owner of a cluster file has, too. The client first proves that it has the join token, by enrolling a
key of its own (enrolment.py), as every reader does. Then it asks for the description of the job.
"""

import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec import structs

from ps.cluster import Access, Cluster
from ps.security.enrolment import WorkerCredentials, enrol
from ps.security.handshake_diagnostics import HandshakeFault
from ps.security.keys import KeyPair, address_of, key_bytes
from ps.session.events import NotReady, Unreachable
from ps.transport.addresses import LAST_PORT, check_reachable
from ps.transport.shard_sockets import Links
from shards import argument_checks
from shards.errors import BadInput, Denied, Mismatch
from shards.messages import PROTOCOL, Describe, Described, Refusal, Remedy, Reply
from shards.refusals import error_of
from shards.schema_digest import SCHEMA
from shards.wire_format import Buffer

_RETRY_S = 1.0
_REACH_S = 5.0
_HOST_PORT = re.compile(r"tcp://([^@]+):([0-9]{1,5})")


def is_address(text: str) -> bool:
    """Return whether this is meant as the address of a shard, not as the path of a file."""
    return "://" in text


def describe(addresses: str, token: object, *, patience_s: float) -> Cluster:
    """The job of the first of these shards that answers, with the keys that `token` holds.

    `addresses` is one or several, separated by commas. Raises the error of the last one if no shard
    is there, and otherwise what `_describe` does for the first that is.
    """
    *others, last = addresses.split(",")
    for address in others:
        with suppress(Unreachable):
            return _describe(address, token, patience_s=patience_s)
    return _describe(last, token, patience_s=patience_s)


def _describe(address: str, token: object, *, patience_s: float) -> Cluster:
    """The job of the shard at `address`.

    Raises BadInput for an invalid address or token, Unreachable if nothing accepts connections
    there or no answer comes for `patience_s` seconds, NotReady if the job has no weights yet,
    Denied if the token is another job's, Mismatch if the shard speaks another protocol.
    """
    where, pins = address_of(address)
    match = _HOST_PORT.fullmatch(where)
    if match is None or not 0 < int(match[2]) <= LAST_PORT:
        raise BadInput(
            "address",
            expected="tcp://HOST:PORT or curve://KEY@HOST:PORT, as `job.address` gives it",
            got=argument_checks.describe_value(address),
        )
    job, secret = _parts(token, pinned=bool(pins), where=where)
    try:
        check_reachable("", [(match[1], int(match[2]))], min(patience_s, _REACH_S))
    except BadInput as error:
        reason = str(error).rpartition(": ")[2]
        text = f"expected a shard that accepts connections, got: {reason}"
        raise Unreachable(f"job at {where}: {text}") from None
    try:
        keys = _enrol(secret, address, patience_s) if pins else None
        links = Links([address], keys=keys)
        try:
            links.await_connections(min(_RETRY_S, patience_s))
            cluster = _ask(links, where, job, patience_s)
        finally:
            links.close()
    except HandshakeFault as error:  # a key is not the one that was expected
        reason = str(error).partition(f"{where}: ")[2]
        expected = "expected the token and the address of its job, got others"
        raise Denied(f"job at {where}: {expected}: {reason}") from None
    return structs.replace(cluster, access=Access(secret)) if pins else cluster


def _parts(token: object, *, pinned: bool, where: str) -> tuple[str, str]:
    """The job's id and the join token in a token; raises BadInput."""
    if token is None:
        raise BadInput("token", expected=f"`job.token` of the job at {where}", got="none")
    expected = "JOB:KEY, for an address that pins a key" if pinned else "the id of a job"
    job, _, secret = argument_checks.text("token", token, expected).partition(":")
    if not job or bool(secret) != pinned:
        got = "one with a key" if secret else "one without a key"
        hint = "" if pinned else " (the address of that job begins with curve://)"
        raise BadInput("token", expected=expected, got=f"{got}{hint}")
    if pinned:
        try:
            key_bytes(secret)
        except BadInput as error:
            raise error.within("token") from None
    return argument_checks.name("token", job), secret


def _enrol(secret: str, address: str, patience_s: float) -> KeyPair:
    credentials = WorkerCredentials(secret, f"connect-{secrets.token_hex(6)}", 0)
    enrol(credentials, [(0, address)], patience_s)
    return credentials.own


def _ask(links: Links, where: str, job: str, patience_s: float) -> Cluster:
    """The answer to a Describe, which is repeated until it comes."""
    request, delayed = 1, ""
    until, again_at = time.monotonic() + patience_s, 0.0
    while (now := time.monotonic()) < until:
        if now >= again_at:
            links.send(0, Describe(request, job, PROTOCOL, SCHEMA))
            again_at = now + _RETRY_S
        for _, reply, frames in links.receive(min(until, again_at) - now):
            if isinstance(reply, Refusal) and reply.remedy is Remedy.RETRY:
                delayed = reply.text
            elif (cluster := _read_answer(reply, frames, where, request)) is not None:
                return cluster
    if delayed:
        raise NotReady(f"job at {where}: {delayed}, for {patience_s:g} s")
    raise Unreachable(f"job at {where}: no answer to a describe for {patience_s:g} s")


def _read_answer(
    reply: Reply, frames: Sequence[Buffer], where: str, request: int
) -> Cluster | None:
    """The description in an answer; None if it answers something else."""
    match reply:
        case Described(request=answered) if answered == request:
            return Cluster.decode(bytes(frames[0]))
        case Refusal(remedy=Remedy.BAD_MESSAGE, request=0, text=text):
            expected = f"expected a shard that speaks protocol {PROTOCOL}"
            raise Mismatch(f"job at {where}: {expected}, got one that cannot read us: {text}")
        case Refusal(remedy=Remedy.BAD_MESSAGE, text=text):
            raise Denied(f"job at {where}: expected the token of its job, got another: {text}")
        case Refusal(remedy=Remedy.MISMATCH, text=text):
            raise Mismatch(f"job at {where}: {text} here")
        case Refusal():
            raise error_of(reply)
    return None

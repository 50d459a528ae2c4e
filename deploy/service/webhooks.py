"""Webhooks: notable events, sent as signed POST requests to hosts that the operator has allowed.

A webhook is a cursor into the events: an event is sent again, later and later, until its receiver
has answered with 2xx, and given up after `MAX_TRIES`. So a restart of the service loses none, and
a receiver may get one twice: `id` tells it.

The receiver checks the header `Downpour-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256
of `SECONDS.BODY` with the webhook's secret. Redirects are not followed. A name is resolved once,
and the request goes to the address that was checked: no loopback, private or link-local address,
unless the operator allows these.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import sqlalchemy as sa

from deploy.service.database_tables import webhook
from deploy.service.job_store import JobStore
from deploy.service.states import TERMINAL, JobState
from shards.errors import BadInput, GiveUp

MAX_TRIES = 8
FIRST_RETRY_S = 5.0
_TIMEOUT_S = 10.0
_BATCH = 100
_PRIVATE = "private:"
_NOTABLE = {*TERMINAL, JobState.RECOVERING, JobState.PAUSED, JobState.DEGRADED}


class Hosts(msgspec.Struct, frozen=True):
    """The hosts that webhooks may name, as patterns such as `*.example.org`.

    The addresses of `private:HOST` need not be public.
    """

    patterns: Sequence[str] = ()

    def check(self, url: str) -> None:
        """Raise BadInput for a URL that is not allowed."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in {"http", "https"} or not host or parts.username is not None:
            raise BadInput("url", expected="http:// or https:// and a host", got=url[:200])
        if not self._names(host, "") and not self._names(host, _PRIVATE):
            raise BadInput(
                "url",
                expected="a host that the service allows",
                got=host,
                hint="start it with: downpour serve --webhook-host HOST",
            )

    def address(self, url: str) -> str:
        """The address to connect to; raises GiveUp for one that is not allowed."""
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked before"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            answers = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise GiveUp(f"{parts.hostname}: {error}") from None
        addresses = [str(address) for *_, (address, *_) in answers]
        for address in addresses:
            public = ipaddress.ip_address(address).is_global
            if not public and not self._names(parts.hostname, _PRIVATE):
                raise GiveUp(f"{parts.hostname}: {address} is no public address")
        return addresses[0]

    def _names(self, host: str, prefix: str) -> bool:
        return any(
            fnmatchcase(host, pattern.removeprefix(prefix).lower())
            for pattern in self.patterns
            if pattern.startswith(prefix)
        )


def signature(secret: str, seconds: int, body: bytes) -> str:
    """The value of the header `Downpour-Signature`."""
    digest = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


class Webhooks:
    """The webhooks of a service, and the thread that sends their events."""

    def __init__(
        self,
        store: JobStore,
        engine: sa.Engine,
        hosts: Hosts,
        *,
        first_retry_s: float = FIRST_RETRY_S,
        clock: Callable[[], float] = time.time,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._hosts = hosts
        self._first_retry_s = first_retry_s
        self._clock = clock
        self._transport = transport
        self._longest_s = first_retry_s * 2.0**MAX_TRIES
        self._lock = threading.Lock()  # one sender at a time: events arrive in order

    def add(self, url: str, project: str | None = None) -> dict[str, Any]:
        """Store a webhook for events from now on; its secret is shown this once."""
        self._hosts.check(url)
        values = {
            "id": secrets.token_hex(6), "url": url, "secret": secrets.token_hex(32),
            "project": project, "sent": self._store.last_event(), "tries": 0, "not_before": 0.0,
            "delivered": 0, "given_up": 0, "last": "", "created": self._clock(),
        }  # fmt: skip
        with self._engine.begin() as connection:
            connection.execute(sa.insert(webhook).values(**values))
        return {name: values[name] for name in ("id", "url", "project", "secret")}

    def all(self) -> list[dict[str, Any]]:
        """Every webhook, without its secret."""
        columns = [column for column in webhook.c if column.name != "secret"]
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(*columns).order_by(webhook.c.created))
            return [dict(row) for row in rows.mappings()]

    def remove(self, name: str) -> None:
        """Forget a webhook; raises KeyError for an unknown one."""
        with self._engine.begin() as connection:
            done = connection.execute(sa.delete(webhook).where(webhook.c.id == name))
        if not done.rowcount:
            raise KeyError(name)

    def send_due(self) -> None:
        """Send what is due to each receiver; an error of one does not stop the others."""
        with self._lock, self._engine.connect() as connection:
            rows = [dict(row) for row in connection.execute(sa.select(webhook)).mappings()]
        for row in rows:
            remaining_s = row["not_before"] - self._clock()
            if not 0 < remaining_s <= self._longest_s:  # a longer wait is from another clock
                self._send_to(row)

    def _send_to(self, row: dict[str, Any]) -> None:
        for event in self._store.events((), row["sent"], _BATCH):
            body = self._body(event, row["project"])
            if body is None:
                row["sent"] = event["id"]
                continue
            failure = self._post(row, event["id"], body)
            if not failure:
                row |= {"sent": event["id"], "tries": 0, "last": "delivered"}
                row["delivered"] += 1
                continue
            row |= {"tries": row["tries"] + 1, "last": failure}
            if row["tries"] < MAX_TRIES:
                delay = self._first_retry_s * 2.0 ** (row["tries"] - 1)
                row["not_before"] = self._clock() + delay
                break
            row |= {"sent": event["id"], "tries": 0}
            row["given_up"] += 1
        with self._engine.begin() as connection:
            connection.execute(sa.update(webhook).where(webhook.c.id == row["id"]).values(**row))

    def _body(self, event: dict[str, Any], project: str | None) -> bytes | None:
        """The body to send of an event; None for one that is not notable, or of another project."""
        state = event["data"].get("state")
        if event["kind"] != "alert" and state not in _NOTABLE:
            return None
        try:
            job = self._store.get(event["job"])
        except KeyError:
            return None
        if project not in {None, job.project}:
            return None
        return msgspec.json.encode(
            {
                "id": event["id"], "time": event["time"], "kind": event["kind"],
                "job": job.id, "name": job.name, "project": job.project,
                "attempt": event["attempt"], "data": event["data"],
            }
        )  # fmt: skip

    def _post(self, row: dict[str, Any], event: int, body: bytes) -> str:
        """Send one event; returns why that failed, empty if it did not."""
        parts = urlsplit(row["url"])
        try:
            self._hosts.check(row["url"])
            address = self._hosts.address(row["url"])
            host = f"[{address}]" if ":" in address else address
            port = f":{parts.port}" if parts.port is not None else ""
            target = parts._replace(netloc=f"{host}{port}").geturl()
            headers = {
                "Host": f"{parts.hostname}{port}",
                "Content-Type": "application/json",
                "Downpour-Event": str(event),
                "Downpour-Signature": signature(row["secret"], int(self._clock()), body),
            }
            more = {"sni_hostname": parts.hostname}
            with (
                httpx.Client(
                    transport=self._transport, timeout=_TIMEOUT_S, trust_env=False
                ) as client,
                client.stream(
                    "POST", target, content=body, headers=headers, extensions=more
                ) as answer,
            ):
                return "" if answer.is_success else f"status {answer.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, BadInput, GiveUp, ValueError) as error:
            return str(error)[:200] or type(error).__name__


class Courier:
    """The thread that sends webhooks until it is stopped."""

    def __init__(self, webhooks: Webhooks, every_s: float = 1.0) -> None:
        self._webhooks = webhooks
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with suppress(sa.exc.SQLAlchemyError):  # a locked database: the next turn
                self._webhooks.send_due()

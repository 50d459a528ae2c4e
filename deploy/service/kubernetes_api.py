"""The few requests to the API of Kubernetes that the launcher makes, as a pod makes them.

The account's token is read for each request, for Kubernetes replaces its file within the hour.
Whatever is no answer of the API (no connection, a timeout, a server's own error, a refused token)
raises `NoAnswer`: nothing follows from it about any pod.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from shards.errors import UNDECODABLE, BadInput

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with the account's token, namespace and certificates, in every pod that has one."""
ANSWER_S = 3.0
WATCH_S = 25
GONE_VERSION = 410
_PATIENT = httpx.Timeout(ANSWER_S, read=WATCH_S + 5)  # one that is silent for longer is cut off
_PASSING = {401, 403, 408, 429}

Fields = dict[str, Any]


class NoAnswer(OSError):
    """The API has not answered. Pods may live or not."""


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The API's URL, the namespace, and the folder of the account."""

    url: str
    namespace: str
    account: Path = ACCOUNT

    @staticmethod
    def of_pod(environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> "ClusterPlace":
        """The place of the pod in which this process runs; raises BadInput outside of one."""
        host, port = (environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError:
            namespace = ""
        if not host or not port or not namespace:
            raise BadInput(
                "--launcher kubernetes",
                expected=f"a pod with an account in {account}",
                got="none",
                hint="serve from the chart's StatefulSet, or with --launcher local",
            )
        host = f"[{host}]" if ":" in host else host
        return ClusterPlace(url=f"https://{host}:{port}", namespace=namespace, account=account)


class KubernetesApi(Protocol):
    """Requests within one namespace. Answers are an HTTP status and the fields of an object."""

    def request(
        self, method: str, path: str, body: Fields | None = None, **query: str
    ) -> tuple[int, Fields]:
        """One request; raises NoAnswer."""
        ...

    def watch(self, path: str, **query: str) -> Iterator[Fields]:
        """The events of a watch until the API ends it; raises NoAnswer."""
        ...


class HttpApi:
    """The API over HTTP. `path` is below the namespace, after the group, as in `batch/v1 jobs`."""

    def __init__(self, place: ClusterPlace) -> None:
        certificates = place.account / "ca.crt"
        self._place = place
        self._http = httpx.Client(
            base_url=place.url,
            verify=str(certificates) if place.url.startswith("https://") else True,
            timeout=ANSWER_S,
            trust_env=False,
        )

    def request(
        self, method: str, path: str, body: Fields | None = None, **query: str
    ) -> tuple[int, Fields]:
        try:
            answer = self._http.request(
                method, self._path(path), json=body, params=query, headers=self._headers()
            )
        except httpx.HTTPError as error:
            raise NoAnswer(f"Kubernetes at {self._place.url}: {error!r}") from None
        _check_status(answer.status_code, answer.content)
        try:
            fields: Fields = msgspec.json.decode(answer.content, type=dict[str, Any])
        except UNDECODABLE:
            raise NoAnswer(f"Kubernetes at {self._place.url}: an answer that is no JSON") from None
        return answer.status_code, fields

    def watch(self, path: str, **query: str) -> Iterator[Fields]:
        query |= {"watch": "true", "timeoutSeconds": str(WATCH_S), "allowWatchBookmarks": "true"}
        try:
            with self._http.stream(
                "GET", self._path(path), params=query, headers=self._headers(), timeout=_PATIENT
            ) as answer:
                if answer.status_code != 200:
                    content = answer.read()
                    if answer.status_code == GONE_VERSION:
                        yield {"type": "ERROR", "object": {"code": GONE_VERSION}}
                        return
                    _check_status(answer.status_code, content)
                    raise NoAnswer(f"a watch of {path}: status {answer.status_code}")
                for line in answer.iter_lines():
                    yield msgspec.json.decode(line, type=dict[str, Any])
        except httpx.HTTPError as error:
            raise NoAnswer(f"Kubernetes at {self._place.url}: {error!r}") from None
        except UNDECODABLE:
            raise NoAnswer(f"a watch of {path}: an event that is no JSON") from None

    def _path(self, path: str) -> str:
        group, _, resource = path.rpartition(" ")
        root = f"apis/{group}" if group else "api/v1"
        return f"/{root}/namespaces/{self._place.namespace}/{resource}"

    def _headers(self) -> dict[str, str]:
        with suppress(OSError):
            token = (self._place.account / "token").read_text().strip()
            return {"Authorization": f"Bearer {token}"}
        return {}


def _check_status(status: int, content: bytes) -> None:
    """Raise NoAnswer for a status that says nothing about the object that was asked for."""
    if status >= 500 or status in _PASSING:
        raise NoAnswer(f"Kubernetes: status {status}: {content[:200].decode(errors='replace')}")

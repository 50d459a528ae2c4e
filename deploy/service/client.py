"""The client of the service that the command line uses. It outlasts a restart of the service."""

import re
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from deploy.service import client_uploads
from deploy.service.artefacts import sha256_of
from deploy.service.states import TERMINAL, JobState
from ps.transport.addresses import on_this_host
from shards import argument_checks
from shards.errors import BadInput, GiveUp

PATIENCE_S = 60.0
"""How long a command that follows a job waits for a service that does not answer."""
_POLL_S = 0.5
_RETRY_S = 0.5
_PAGE = 200


class ServiceClient:
    """A connection to the service at a URL; a context manager.

    `token` names the user, where the service asks for one; `ca_file` is a PEM file with the
    certificates to trust, instead of the system's.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        host, self._url = _host_of(url), url.rstrip("/")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise BadInput("token", expected="letters and digits in one line", got="others")
        if token is not None and url.startswith("http://") and not on_this_host(host):
            raise BadInput("--server", expected="https:// where a token is sent", got=url)
        self._http = httpx.Client(
            base_url=f"{self._url}/api/v1",
            headers={"Authorization": f"Bearer {token}"} if token is not None else {},
            verify=_load_certificates(ca_file),
            timeout=30.0,
            transport=transport,
            trust_env=False,
        )
        self._sleep = sleep

    def call(
        self, method: str, path: str, *, patience_s: float = 0.0, **request: Any
    ) -> httpx.Response:
        """The answer to a request; raises BadInput or GiveUp with the service's words.

        With `patience_s`, a service that does not answer is asked again for that time.
        """
        waited = 0.0
        while True:
            try:
                answer = self._http.request(method, path, **request)
            except httpx.TransportError as error:
                if waited >= patience_s:
                    text = f"--server {self._url}: {_why(error)}"
                    raise BadInput(f"{text}; is `downpour serve` running there?") from None
                self._sleep(_RETRY_S)
                waited += _RETRY_S
                continue
            if answer.is_success:
                return answer
            raise _refusal(answer)

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """The JSON answer to a GET."""
        present = {name: value for name, value in parameters.items() if value is not None}
        answer: dict[str, Any] = self.call("GET", path, params=present).json()
        return answer

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        """The JSON answer to a POST."""
        headers = {"Idempotency-Key": key} if key is not None else {}
        answer: dict[str, Any] = self.call("POST", path, json=body, headers=headers).json()
        return answer

    def list_unfinished(self) -> Iterator[dict[str, Any]]:
        """Every job that is not in a terminal state, the newest first."""
        criteria = {"state": [state for state in JobState if state not in TERMINAL], "limit": _PAGE}
        cursor = None
        while True:
            page = self.get("/jobs", cursor=cursor, **criteria)
            yield from page["jobs"]
            if (cursor := page["cursor"]) is None:
                return

    @property
    def is_local(self) -> bool:
        """True if the service is on this machine, and can read its files."""
        return on_this_host(urlsplit(self._url).hostname or "")

    def upload_files(
        self, settings: dict[str, Any], note: Callable[[str], object], project: str = "default"
    ) -> dict[str, Any]:
        """Send the files that settings name; returns these settings as the service has them."""
        return client_uploads.upload(self, settings, note, project)

    def send_chunk(self, upload: str, path: str, offset: int, chunk: bytes) -> None:
        """Send a part of a file. A chunk that has arrived although its answer was lost is fine."""
        try:
            self.call(
                "PUT", f"/uploads/{upload}/files", patience_s=PATIENCE_S, content=chunk,
                params={"path": path, "offset": offset},
            )  # fmt: skip
        except BadInput:
            files = self.get(f"/uploads/{upload}")["files"]
            (progress,) = [file for file in files if file["path"] == path]
            if progress["received"] != offset + len(chunk):
                raise

    def download(
        self, path: str, target: Path, sha256: str | None = None, **parameters: Any
    ) -> int:
        """Write the content of a GET to a new file; returns its bytes.

        Raises GiveUp if it does not have the digest that is expected.
        """
        with self._http.stream("GET", path, params=parameters) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            with target.open("xb") as file:
                size = sum(file.write(chunk) for chunk in answer.iter_bytes())
        if sha256 is not None and sha256_of(target) != sha256:
            raise GiveUp(f"{target}: expected the SHA-256 {sha256}, got another; download it again")
        return size

    def wait(self, job: str, timeout_s: float | None = None) -> dict[str, Any]:
        """The job once it is in a terminal state; raises GiveUp after `timeout_s` seconds."""
        waited = 0.0
        while True:
            description: dict[str, Any] = self.call(
                "GET", f"/jobs/{job}", patience_s=PATIENCE_S
            ).json()
            if JobState(description["state"]) in TERMINAL:
                return description
            if timeout_s is not None and waited >= timeout_s:
                raise GiveUp(f"wait: job {job} is {description['state']} after {timeout_s:g} s")
            self._sleep(_POLL_S)
            waited += _POLL_S

    def logs(self, job: str, part: str | None, tail: int, *, follow: bool) -> Iterator[str]:
        """The end of a log, and with `follow` what is added until the job ends."""
        which = {"part": part} if part is not None else {}
        where: dict[str, Any] = {"tail": tail}
        while True:
            # The state is read first: what was written before the end is then shown for certain.
            state = JobState(
                self.call("GET", f"/jobs/{job}", patience_s=PATIENCE_S).json()["state"]
            )
            answer = self.call(
                "GET", f"/jobs/{job}/logs", params=which | where, patience_s=PATIENCE_S
            )
            if answer.text:
                yield answer.text
            where = {"after": answer.headers["X-Log-Next"]}
            if not follow or state in TERMINAL:
                return
            self._sleep(_POLL_S)

    def events(self, job: str, *, follow: bool) -> Iterator[dict[str, Any]]:
        """The events of a job in order, and with `follow` new ones until the job ends."""
        after = 0
        while True:
            state = JobState(
                self.call("GET", f"/jobs/{job}", patience_s=PATIENCE_S).json()["state"]
            )
            path, which = f"/jobs/{job}/events", {"after": after, "limit": 1000}
            events = self.call("GET", path, params=which, patience_s=PATIENCE_S).json()["events"]
            yield from events
            after = events[-1]["id"] if events else after
            if len(events) == 1000:
                continue
            if not follow or state in TERMINAL:
                return
            self._sleep(_POLL_S)

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _host_of(url: str) -> str:
    """The host of a service's URL; raises BadInput, which does not quote a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        if valid and parts.username is None:
            return str(parts.hostname)
    except ValueError:  # a bracket without its other half, or a port above 65,535
        pass
    got = argument_checks.hide_passwords(url)
    raise BadInput("--server", expected="a URL such as http://127.0.0.1:8600", got=got)


def absolute(path: Path) -> str:
    """A path as the service, in another working directory, understands it."""
    return str(path.absolute())


def _load_certificates(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or str(error)
        raise BadInput(f"--ca-file {ca_file}: expected certificates in PEM, got: {why}") from None


def _why(error: httpx.TransportError) -> str:
    """Why there is no answer, in a few words."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return re.sub(r"^\[\w+ [-\w]+\] ", "", str(error)) or "the connection broke"


def _refusal(answer: httpx.Response) -> BadInput | GiveUp:
    try:
        problem = answer.json()
        text = str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return GiveUp(f"the service answered with status {answer.status_code}")
    hint = problem.get("hint")
    if hint is not None and hint not in text:
        text = f"{text}; {hint}"
    return BadInput(text) if answer.status_code < 500 else GiveUp(text)

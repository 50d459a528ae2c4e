"""`downpour service token` and `project`, and how clients send a token."""

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.cli.connection import ServiceAddress
from deploy.service.client import ServiceClient
from deploy.service.server import Listen
from shards.errors import BadInput


def run(home: Path, *words: str) -> str:
    found = CliRunner(env={"DOWNPOUR_HOME": str(home)}).invoke(app, ["service", *words])
    if isinstance(found.exception, Exception):
        raise found.exception
    return found.stdout


def test_tokens_by_commands(home: Path) -> None:
    """A token is printed once, listed without its secret, and revoked by its name."""
    token = run(
        home, "token", "create", "--name", "alice", "--role", "viewer", "--project", "p"
    ).strip()
    assert token.startswith("dps_")
    listed = run(home, "token", "list")
    assert "viewer         alice  p" in listed
    assert token[17:] not in listed
    assert "revoked  alice" in run(home, "token", "revoke", "alice")
    (row,) = json.loads(run(home, "token", "list", "--json"))["tokens"]
    assert row["revoked"] > row["created"]
    run(home, "project", "set", "p", "--running", "2", "--upload-gb", "1.5")
    limits = "running 2  queued any  workers any  uploads any  upload_bytes 1500000000"
    assert run(home, "project", "list") == f"p  {limits}\n"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("token create --name x --role king", "--role: expected viewer, submitter"),
        ("token create --name -x --role viewer", "--name: expected letters"),
        ("token create --name x --role viewer --project a/../$b", "project: expected letters"),
        ("token create --name x --role viewer --expires 367d", "at most 366d, got 367d"),
        ("token create --name x --role viewer --expires soon", "--expires: expected a time"),
        ("token create --name x --role administrator --project p", "expected none for an admin"),
        ("token revoke nobody", "expected the id or name of one, got nobody"),
    ],
)
def test_wrong_commands(home: Path, words: str, refusal: str) -> None:
    """What is wrong is said in one line."""
    with pytest.raises(BadInput, match=refusal):
        run(home, *words.split())


def test_a_client_sends_its_token(tmp_path: Path) -> None:
    """From a private file, in a header, and over plain HTTP to this machine only."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(answer)
    with ServiceClient("http://127.0.0.1:1", token="t", transport=transport) as client:
        client.get("/whoami")
    assert seen == ["Bearer t"]
    with pytest.raises(BadInput, match="expected https:// where a token is sent"):
        ServiceClient("http://trainer.example", token="t")
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o644)
    address = ServiceAddress(server="http://127.0.0.1:1", token=None, token_file=file, ca_file=None)
    with pytest.raises(BadInput, match=r"--token-file: .*mode 600"), address.open():
        pass
    with pytest.raises(BadInput, match=r"--ca-file .*expected certificates in PEM"):
        ServiceClient("https://127.0.0.1:1", ca_file=file)


def test_files_of_tls(tmp_path: Path) -> None:
    """One file without the other, a missing one, an open key: no start, one sentence."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text("no certificate")
    key.write_text("no key")
    key.chmod(0o644)
    for files, refusal in (
        ((certificate, None), "expected both"),
        ((None, key), "expected both"),
        ((certificate, tmp_path / "missing"), "No such file"),
        ((certificate, key), "chmod 600"),
    ):
        with pytest.raises(BadInput, match=refusal):
            Listen(host="::", port=1, certificate=files[0], key=files[1]).check()
    key.chmod(0o600)
    with pytest.raises(BadInput, match=f"--tls-cert {certificate}"):
        Listen(host="::", port=1, certificate=certificate, key=key).check()

"""`downpour service token` and `project`, and how clients send a token."""

import json
import shutil
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.cli.connection import CONNECTION, TOKEN_VARIABLE, ServiceAddress
from deploy.service.client import ServiceClient
from deploy.service.server import CertificateReload, Listen
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
    address = ServiceAddress(server="http://127.0.0.1:1", token_file=file, ca_file=None)
    with pytest.raises(BadInput, match=r"--token-file: .*mode 600"), address.open():
        pass
    with pytest.raises(BadInput, match=r"--ca-file .*expected certificates in PEM"):
        ServiceClient("https://127.0.0.1:1", ca_file=file)


def test_a_token_is_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users see the arguments of a command, so a token is in a file or in a variable.

    The file is read for each command, so a new token in it is used by the next one.
    """
    assert "token" not in {parameter.name for parameter in CONNECTION}
    file = tmp_path / "token"
    address = ServiceAddress(server="http://127.0.0.1:1", token_file=file, ca_file=None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        file.chmod(0o600)
        assert address.read_token() == token
    monkeypatch.setenv(TOKEN_VARIABLE, "third")
    assert address.read_token() == "third"


def _write_certificate(certificate: Path, key: Path, name: str) -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    files = ("-nodes", "-keyout", str(key), "-out", str(certificate))
    command = ["openssl", "req", "-x509", *curve, *files, "-subj", f"/CN={name}"]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)


def _show_certificate(server: ssl.SSLContext) -> bytes:
    """The certificate that a client of a server with this context is shown."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server)]
    ends.append(server.wrap_bio(to_server, to_client, server_side=True))
    for end in [*ends, *ends]:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    shown = ends[0].getpeercert(binary_form=True)
    assert shown is not None
    return shown


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need openssl")
def test_a_renewed_certificate(tmp_path: Path) -> None:
    """New files are used without a restart, once both are there; a wrong pair changes nothing."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    _write_certificate(certificate, key, "old")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    files = CertificateReload(Listen(host="::", port=1, certificate=certificate, key=key))
    old = _show_certificate(context)
    new_certificate, new_key = tmp_path / "new.pem", tmp_path / "new-key.pem"
    _write_certificate(new_certificate, new_key, "new")
    new_certificate.replace(certificate)
    files.reload(context)
    assert _show_certificate(context) == old
    new_key.replace(key)
    files.reload(context)
    assert _show_certificate(context) == ssl.PEM_cert_to_DER_cert(certificate.read_text()) != old
    certificate.unlink()
    files.reload(context)
    assert _show_certificate(context) != old


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

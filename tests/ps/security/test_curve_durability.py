"""Shards with a WAL and CURVE in processes that are killed: admitted workers stay admitted.

test_durability.py tests the promises of the WAL; these are its workers.
"""

import os
import signal
import stat
from pathlib import Path

import msgspec
import pytest

from ps import AdminClient, Cluster, Durability
from ps.cluster import Access
from ps.launch import restart
from ps.launch.processes import process_shards
from ps.security.authorization import Admission, Enrolment, Enrolments, Invitation
from ps.security.enrolment import EnrolmentStore
from ps.security.keys import KeyPair, address_of, load_or_create_keys, pin_key
from ps.transport.transports import Transport
from shards.errors import BadInput, GiveUp
from tests.support.curve_clients import as_worker
from tests.support.eventually import eventually
from tests.support.pushers import PATIENCE_S, TABLE, more, pushing, specs_of

ADMISSION = Admission("0" * 64, Invitation("a" * 64, 5))


def with_other_keys(cluster: Cluster) -> Cluster:
    others = KeyPair.new().public
    moved = tuple(pin_key(address_of(at).plain, others) for at in cluster.endpoints)
    return msgspec.structs.replace(cluster, endpoints=moved)


@pytest.mark.timeout(600)  # a process starts in a second or two, on a busy machine in twenty
def test_kill_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted shard proves the same key and knows its workers: each push counts once.

    No worker joins again, new ones may, and strangers stay outside.
    """
    monkeypatch.setattr(restart, "QUICK_S", 0.0)
    started = process_shards(
        specs_of(1),
        secure=True,
        transport=Transport.TCP,
        durability=Durability.LOGGED,
        logs=tmp_path,
    )
    with started as hosts:
        access, book = hosts.cluster.access, tmp_path / "shard-0/joined"
        assert access is not None
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(TABLE.empty())
            with pushing(hosts.cluster.for_workers(), workers=2) as pushers:
                more(pushers, hosts)
                before, joined = hosts.pids[0], book.read_bytes()
                os.kill(before, signal.SIGKILL)
                more(pushers, hosts)
            eventually(
                lambda: hosts.pids[0] != before,
                because="another process follows",
                within_s=PATIENCE_S,
                check=hosts.check,
            )
            total = sum(one.acknowledged for one in pushers)
            assert set(console.read()[:3000]) == {-float(total)}
        assert book.read_bytes() == joined
        assert stat.S_IMODE(book.stat().st_mode) == 0o600
        as_worker(hosts.cluster)
        assert book.read_bytes() != joined
        wrong = Access(KeyPair.new().secret, KeyPair.new().secret)
        with pytest.raises(GiveUp, match="turned away: it does not know our key"):
            as_worker(msgspec.structs.replace(hosts.cluster, access=wrong))
        with pytest.raises(GiveUp, match="the server key does not match the endpoint"):
            as_worker(with_other_keys(hosts.cluster))
        told = Path(f"/proc/{hosts.pids[0]}/cmdline").read_bytes()
        told += Path(f"/proc/{hosts.pids[0]}/environ").read_bytes()
    written = b"".join(path.read_bytes() for path in (tmp_path / "shard-0").iterdir())
    for secret in (access.token, access.operator):
        assert secret.encode() not in told + written


def test_a_guest_book(tmp_path: Path) -> None:
    """Stored enrolments are read again; under another driver's admission no worker is known."""
    book, enrolments = EnrolmentStore(tmp_path), Enrolments(3, (Enrolment("w", 1, "1" * 64),))
    assert book.read(ADMISSION) is None
    book.write(enrolments)
    assert EnrolmentStore(tmp_path).read(ADMISSION) == enrolments
    other = msgspec.structs.replace(ADMISSION, operator="f" * 64)
    assert EnrolmentStore(tmp_path).read(other) is None
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]


def test_a_guest_book_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the file; no worker is admitted from a partial or unwritable file."""
    for page in (b'{"admission":', b'{"admission":{"operator":"\xff"}}'):
        (tmp_path / "joined").write_bytes(page)
        with pytest.raises(BadInput, match=f"^joined workers {tmp_path}/joined: "):
            EnrolmentStore(tmp_path).read(ADMISSION)
    (tmp_path / "joined").unlink()
    (tmp_path / ".joined.partial").mkdir()
    book = EnrolmentStore(tmp_path)
    book.read(ADMISSION)
    with pytest.raises(GiveUp, match=f"^joined workers {tmp_path}/joined: Is a directory"):
        book.write(Enrolments(3))
    spared = EnrolmentStore(tmp_path, needed=False)  # of a shard that promises less
    spared.read(ADMISSION)
    spared.write(Enrolments(3))
    assert not (tmp_path / "joined").exists()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"joined workers {tmp_path}/joined: Is a directory")


def test_a_kept_key(tmp_path: Path) -> None:
    """All processes of a shard have the first one's key.

    A file that others may read, or without a key, is refused by name, and its content is not
    repeated.
    """
    keys, path = load_or_create_keys(tmp_path), tmp_path / "key"
    assert load_or_create_keys(tmp_path) == keys
    assert [found.name for found in tmp_path.iterdir()] == ["key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(BadInput, match=f"^shard's key: {path}: expected a file of yours of mode"):
        load_or_create_keys(tmp_path)
    path.chmod(0o600)
    secret = keys.secret.replace(keys.secret[20], "0" if keys.secret[20] != "0" else "1")
    path.write_text(f"{secret} {keys.public}")
    with pytest.raises(BadInput, match=r"expected two halves of one pair, got others: it is dam"):
        load_or_create_keys(tmp_path)
    path.write_text("monkeys")
    with pytest.raises(BadInput) as caught:
        load_or_create_keys(tmp_path)
    assert str(caught.value) == (
        f"shard's key: {path}: expected 64 hexadecimal digits, got 7 characters"
    )

"""Uploads: resumed where they ended, checked by digest, and never outside of their folder."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.service import client_uploads
from deploy.service.access_store import ProjectLimits
from deploy.service.client import ServiceClient
from deploy.service.uploads import UploadedFile, Uploads, WrongOffset
from shards.errors import BadInput, GiveUp
from tests.support.service_in_process import Running, Start, listening


def file(path: str, content: bytes) -> UploadedFile:
    return UploadedFile(path, len(content), hashlib.sha256(content).hexdigest())


def test_an_upload_continues_where_it_ended(tmp_path: Path) -> None:
    """A repeated manifest says what is there; a chunk elsewhere is refused with the offset."""
    content = b"0123456789"
    manifest = [file("data/rows", content), file("empty", b"")]
    uploads = Uploads(tmp_path)
    begun = uploads.begin(manifest)
    uploads.write(begun.id, "data/rows", 0, content[:4])
    again = Uploads(tmp_path).begin(manifest[::-1])
    assert again.id == begun.id
    assert {each.path: each.received for each in again.files} == {"data/rows": 4, "empty": 0}
    assert not again.complete
    with pytest.raises(BadInput, match="complete upload, got one without data/rows"):
        uploads.resolve(f"upload:{begun.id}/data")
    for offset in (0, 5):
        with pytest.raises(WrongOffset) as caught:
            uploads.write(begun.id, "data/rows", offset, b"x")
        assert caught.value.expected == 4
    uploads.write(begun.id, "data/rows", 4, content[4:])
    assert uploads.status(begun.id).complete
    found = Path(uploads.resolve(f"upload:{begun.id}/data/rows"))
    assert found.read_bytes() == content
    assert uploads.write(begun.id, "data/rows", 10, b"").complete


def test_a_wrong_digest_begins_again(tmp_path: Path) -> None:
    """A file whose content differs gets no name, and can be sent again."""
    uploads = Uploads(tmp_path)
    begun = uploads.begin([file("rows", b"right")])
    with pytest.raises(BadInput, match="SHA-256"):
        uploads.write(begun.id, "rows", 0, b"wrong")
    with pytest.raises(BadInput, match="expected 5 bytes, got more"):
        uploads.write(begun.id, "rows", 0, b"right and more")
    assert uploads.write(begun.id, "rows", 0, b"right").complete


@pytest.mark.parametrize(
    "path",
    [
        "../up", "a/../../up", "/etc/passwd", "a//b", "", ".", ".hidden", "a/.ssh", "a\\b", "a\0b",
        "a\nb", "x" * 201, "/".join("abcdefghi"), "rows.part", "a/",
    ],
)  # fmt: skip
def test_a_path_cannot_lead_elsewhere(tmp_path: Path, path: str) -> None:
    """Absolute, upward, hidden and odd paths are refused before anything is written."""
    uploads = Uploads(tmp_path)
    with pytest.raises(BadInput, match="path: expected names"):
        uploads.begin([file(path, b"x")])
    assert list(tmp_path.iterdir()) == []


def test_limits(tmp_path: Path) -> None:
    """Size, number, repeated paths and room on the disk are checked at the beginning."""
    uploads = Uploads(tmp_path, max_bytes=5)
    with pytest.raises(BadInput, match="at most"):
        uploads.begin([file("a", b"123"), file("b", b"456")])
    with pytest.raises(BadInput, match="one twice"):
        uploads.begin([file("a", b"1"), file("a", b"1")])
    with pytest.raises(BadInput, match="a file that is a folder"):
        uploads.begin([file("a", b"1"), file("a/b", b"1")])
    with pytest.raises(BadInput, match="files: expected 1"):
        uploads.begin([])
    with pytest.raises(GiveUp, match="of room"):
        Uploads(tmp_path, reserve_bytes=1 << 60).begin([file("a", b"1")])
    with pytest.raises(KeyError):
        uploads.write("../../x", "a", 0, b"")


def test_limits_of_a_project(start: Start) -> None:
    """More uploads in progress, or more bytes, than a project may have are a problem that names
    the figures; what is complete is in progress no more, and the same files again are no more."""
    with start(driven=False) as running:
        limits = ProjectLimits(uploads=1, upload_bytes=10_000_000)
        running.service.access.set_limits("a", limits)

        def begin(content: bytes, project: str = "a", size: int | None = None) -> Any:
            one = msgspec.to_builtins(file("rows", content)) | ({"bytes": size} if size else {})
            body = {"files": [one], "project": project}
            return running.http.post("/api/v1/uploads", json=body)

        first = begin(b"first").json()["id"]
        assert begin(b"first").json()["id"] == first
        refused = begin(b"second")
        assert (refused.status_code, refused.headers["content-type"]) == (
            422,
            "application/problem+json",
        )
        found = refused.json()
        assert (found["field"], found["expected"], found["got"], found["hint"]) == (
            "uploads",
            "at most 1 in progress in project a",
            "1 and this one",
            "finish one of them first",
        )
        assert begin(b"second", "b").status_code == 201
        url = f"/api/v1/uploads/{first}/files?path=rows&offset=0"
        assert running.http.put(url, content=b"first").json()["complete"]
        refused = begin(b"large", size=10_000_000)
        assert (refused.status_code, refused.json()["field"]) == (422, "upload_bytes")
        assert "got 0.0 MB and 10.0 MB more" in refused.json()["detail"]
        assert begin(b"second").status_code == 201  # the files of another project, none to send
        assert running.service.uploads.usage("a") == ProjectLimits(uploads=1, upload_bytes=11)
        assert begin(b"x", "../up").status_code == 422
        page = running.http.get("/service").text
        assert "1 of 1" in page


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """A link that somebody has put in the way is refused, not written through."""
    uploads = Uploads(tmp_path)
    begun = uploads.begin([file("a", b"1")])
    outside = tmp_path / "outside"
    (tmp_path / "uploads" / begun.id / "files" / "a.part").symlink_to(outside)
    with pytest.raises(GiveUp):
        uploads.write(begun.id, "a", 0, b"1")
    assert not outside.exists()


def test_submit_sends_files_and_continues(
    start: Start, solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The solver, its net and its data arrive; a client that was cut off sends only the rest."""
    monkeypatch.setattr(client_uploads, "CHUNK_BYTES", 2000)
    with start(driven=False) as running, listening(running) as url, ServiceClient(url) as client:
        sent: list[int] = []
        original = client.send_chunk

        def cut(upload: str, path: str, offset: int, chunk: bytes) -> None:
            if len(sent) == 2:
                raise GiveUp("cut")
            sent.append(len(chunk))
            original(upload, path, offset, chunk)

        monkeypatch.setattr(client, "send_chunk", cut)
        given = {"solver": str(solver), "data": str(solver.parent / "data")}
        with pytest.raises(GiveUp, match="cut"):
            client_uploads.upload(client, given, lambda _: None)
        monkeypatch.setattr(client, "send_chunk", original)
        notes: list[str] = []
        found = client_uploads.upload(client, given, notes.append)
        assert notes
        settings = submitted(running, found)
        for name in ("solver", "data"):
            assert Path(settings[name]).is_relative_to(running.service.uploads.folder)
        files = [path for path in (solver.parent / "data").rglob("*") if path.is_file()]
        for path in files:
            there = Path(settings["data"]) / path.relative_to(solver.parent / "data")
            assert there.read_bytes() == path.read_bytes()
        assert client_uploads.upload(client, given, notes.clear) == found  # type: ignore[arg-type]


def submitted(running: Running, settings: dict[str, Any]) -> dict[str, Any]:
    answer = running.http.post("/api/v1/jobs", json={"settings": settings})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = running.get(answer.json()["id"])["settings"]
    return found


def test_a_chunk_has_a_limit(start: Start) -> None:
    """A body of more than 1 MiB is refused, as everywhere; an unknown upload is not found."""
    with start(driven=False) as running:
        url = f"/api/v1/uploads/{'0' * 32}/files?path=a&offset=0"
        assert running.http.put(url, content=b"x" * ((1 << 20) + 1)).status_code == 413
        assert running.http.put(url, content=b"x").status_code == 404
        assert running.http.get("/api/v1/uploads/..").status_code in {404, 405}
        job = {"settings": {"solver": f"upload:{'0' * 32}/a"}}
        assert "got none with this id" in running.http.post("/api/v1/jobs", json=job).text

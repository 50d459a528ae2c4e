"""Stores: a local folder and a file system of pyarrow behave alike."""

from pathlib import Path

import pytest
from pyarrow import fs

from ps.storage import ArrowStore, LocalStore, Store, content_of, open_store
from shards.errors import BadInput
from tests.support.snapshot_stores import Keyed, mocked


@pytest.fixture(params=["local", "subtree", "mock"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A folder that does not exist yet."""
    if request.param == "local":
        return LocalStore(tmp_path / "a" / "b")
    if request.param == "subtree":
        system = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
        return ArrowStore(system, "a/b", *2 * ["subtree://a/b"])
    return mocked()


def content(store: Store, name: str) -> bytes:
    found = bytearray(store.size(name))
    with store.open(name) as file:
        assert file.readinto(memoryview(found)) == len(found)
        assert not file.readinto(memoryview(bytearray(1)))
    return bytes(found)


def test_files_come_and_go(store: Store) -> None:
    """A written file is there, complete; a removed one is gone; an empty folder can be dropped."""
    assert store.names() == []
    store.put("one", [b"12", memoryview(b"345")])
    store.put("one", [b"67"])
    store.below("deep").put("two", [])
    store.below("deep").settle()
    assert store.names() == ["deep", "one"]
    assert content(store, "one") == b"67"
    assert content(store.below("deep"), "two") == b""
    assert store.below("deep").place == f"{store.place}/deep"
    store.drop()
    store.remove("one")
    store.remove("one")
    assert store.names() == ["deep"]
    store.below("deep").remove("two")
    store.below("deep").drop()
    assert store.names() == []


def test_what_is_missing_is_a_missing_file(store: Store) -> None:
    """The error is that of a local file."""
    for look in (store.size, lambda name: store.open(name).__enter__()):
        with pytest.raises(FileNotFoundError) as caught:
            look("nothing")
        assert "No such file" in str(caught.value.strerror)


def test_an_address_opens_the_same_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works anywhere, also for subfolders, with key and options; these are not shown."""
    monkeypatch.setattr("pyarrow.fs.FileSystem", Keyed(tmp_path))
    for place in (Keyed.URI, tmp_path / "here", f"file://{tmp_path}/there"):
        store = open_store(place).below("400").below("workers")
        store.put("w", [b"kept"])
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            assert content_of(open_store(store.address), "w", 4) == b"kept"
        assert "secret" not in store.place + repr(store)
    assert open_store(Keyed.URI.replace("?", "/?")).below("1").address == (
        "s3://key:the-secret@bucket/run/1?endpoint_override=localhost:9"
    )


def test_places_are_named_as_people_name_them(tmp_path: Path) -> None:
    """A path and its file URI are one folder; others are pyarrow's; secrets are not shown."""
    for place in (
        tmp_path / "a b",
        str(tmp_path / "a b"),
        f"file://{tmp_path}/a%20b",
        f"file:{tmp_path}/a%20b",
    ):
        store = open_store(place)
        assert isinstance(store, LocalStore)
        assert store.path == tmp_path / "a b"
    store = open_store("s3://key:secret@bucket/run/?region=eu-west-1&endpoint_override=localhost:9")
    assert store.place == "s3://bucket/run"
    for bad, complaint in (
        ("file://elsewhere/x", "expected file:///PATH, got a host, elsewhere"),
        ("nonsense://key:secret@x/y", "^nonsense://x/y: Unrecognized filesystem type"),
        ("s3://key:se/secret@bucket/x", "^s3://bucket/x: Cannot parse URI: "),
        ("s3://key:se secret@bucket/x?a=b", "^s3://bucket/x: Cannot parse URI: "),
        ("file://", "^file://: expected file:///PATH, got no path"),
        ("s3://", "^s3:: expected a place after ://, got none"),
        ("s3://key:secret@[x", r"^'s3://...@\[x': Invalid IPv6 URL"),
        ("file://[x", r"^'file://\[x': Invalid IPv6 URL"),
        ("s3://bucket/x?color=red", "^s3://bucket/x: Unexpected query parameter"),
    ):
        with pytest.raises(BadInput, match=complaint) as caught:
            open_store(bad)
        assert "secret" not in str(caught.value)

"""Image files: decoding and resizing as OpenCV does, lists, folders, and hostile files."""

from pathlib import Path
from struct import pack
from zlib import compress, crc32

import cv2
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import BadInput
from worker.data import image_decoding
from worker.data.image_decoding import Undecodable
from worker.data.source import Source
from worker.data.sources import ImageSource, open_source

DICE = np.random.default_rng(5)
SMOOTH = cv2.GaussianBlur(DICE.integers(0, 256, (40, 30, 3), np.uint8), (0, 0), 2)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp"])
@pytest.mark.parametrize("colour", [True, False])
def test_images_are_decoded_as_by_opencv(suffix: str, colour: bool) -> None:
    """The same pixels in the order BGR; a conversion to grey may round otherwise."""
    data = cv2.imencode(suffix, SMOOTH)[1].tobytes()
    expected = cv2.imdecode(np.frombuffer(data, np.uint8), int(colour))
    found = image_decoding.decode(data, colour)
    assert found.shape == ((3, 40, 30) if colour else (1, 40, 30))
    assert expected is not None
    apart = found.astype(int) - (expected.transpose(2, 0, 1) if colour else expected[None])
    assert np.abs(apart).max() <= (0 if colour else 1)


def test_images_are_resized_as_by_opencv() -> None:
    """Larger and smaller, to within one unit of rounding."""
    for height, width in ((1, 1), (17, 64), (40, 7), (81, 61), (20, 15)):
        expected = cv2.resize(SMOOTH, (width, height), interpolation=cv2.INTER_LINEAR)
        found = image_decoding.resize(SMOOTH.transpose(2, 0, 1), height, width)
        assert np.abs(found.astype(int) - expected.transpose(2, 0, 1)).max() <= 1


def test_a_picture_survives_encoding() -> None:
    """Grey and colour."""
    for image in (SMOOTH.transpose(2, 0, 1), SMOOTH[None, :, :, 0]):
        np.testing.assert_array_equal(image_decoding.decode(image_decoding.encode(image)), image)


def png_bomb(width: int, height: int) -> bytes:
    """A small PNG that states a large size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return pack(">I", len(body)) + kind + body + pack(">I", crc32(kind + body))

    header = chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_a_small_file_that_states_a_huge_image() -> None:
    """It is refused by its header, before memory is allocated."""
    with pytest.raises(Undecodable, match="expected at most 67108864 pixels, got 10000x10000"):
        image_decoding.decode(png_bomb(10_000, 10_000))
    with pytest.raises(Undecodable, match="exceeds limit"):
        image_decoding.decode(png_bomb(30_000, 30_000))


@settings(max_examples=150, deadline=None)
@given(
    suffix=st.sampled_from([".png", ".jpg", ".bmp", ".webp"]),
    places=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 10**6),
)
def test_any_bytes_are_decoded_or_refused(
    suffix: str, places: list[tuple[int, int]], cut: int
) -> None:
    """A damaged file gives an image or Undecodable, and nothing else."""
    data = bytearray(cv2.imencode(suffix, SMOOTH)[1].tobytes())
    for place, value in places:
        data[place % len(data)] = value
    if cut % 3 == 0:
        del data[cut % len(data) :]
    try:
        image = image_decoding.decode(bytes(data))
    except Undecodable:
        return
    assert image.ndim == 3


def written(folder: Path, name: str, value: int, size: tuple[int, int] = (6, 5)) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((*size, 3), value, np.uint8))
    return name


def greys(source: ImageSource) -> list[int]:
    """The first byte of each row."""
    table = pa.Table.from_batches(list(source.batches()), source.schema)
    return [data[0] for data in table["data"].to_pylist()]


def test_a_list_of_files(tmp_path: Path) -> None:
    """Names may hold spaces; they count from the list, or follow the root; images get one size."""
    names = [written(tmp_path / "images", f"a {i}.png", 10 * i, (6 + i, 5)) for i in range(4)]
    lines = [f"{name} {label}" for label, name in enumerate(names)]
    (tmp_path / "images" / "list.txt").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "other.txt").write_text("\n".join(lines))
    for path, root in (("images/list.txt", ""), ("other.txt", f"{tmp_path / 'images'}/")):
        source = open_source(tmp_path / path, root=root, resize=(4, 4), classes=4)
        assert isinstance(source, Source)
        assert (source.rows, source.shape, greys(source)) == (4, (3, 4, 4), [0, 10, 20, 30])
    with pytest.raises(BadInput, match=r"a 1\.png: expected an image of 3x6x5, as the first"):
        greys(open_source(tmp_path / "images" / "list.txt"))
    with pytest.raises(BadInput, match=r"a 3\.png: expected a label in \[0, 3\), got 3"):
        open_source(tmp_path / "images" / "list.txt", classes=3)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfa.png 0\nb c.PNG 1\n",
        "a.png 0\r\nb c.PNG 1\r\n".encode("utf-16"),
        b"a.png   0  \r\n\r\nb c.PNG \t 1",
        b"\n\na.png\t0\n  b c.PNG\t1\t\n",
        b"# name label\na.png 0\n# gone.png 5\nb c.PNG +1.0\n",
        b"a.png 0\rb c.PNG 1\r",
        b"./a.png 0\nsub/../b c.PNG 1",
        b".\\a.png 0\nsub\\..\\b c.PNG 1",
    ],
    ids=["mark", "UTF-16", "CRLF", "tabs", "comments", "CR", "paths", "Windows"],
)
@pytest.mark.parametrize("name", ["list.txt", "LIST.TXT", "train_list", "train.files"])
def test_a_list_from_any_editor(tmp_path: Path, content: bytes, name: str) -> None:
    """No image is lost: marks, ends of lines, tabs, comments and backslashes are understood."""
    written(tmp_path, "a.png", 1), written(tmp_path, "b c.PNG", 2)
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes(content)
    source = open_source(tmp_path / name)
    assert isinstance(source, Source)
    table = pa.Table.from_batches(list(source.batches()), source.schema)
    assert table["label"].to_pylist() == [0, 1]
    assert greys(source) == [1, 2]


def test_a_root_precedes_the_names_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the working directory or from the list, with or without a slash, and before /names."""
    written(tmp_path / "images" / "one", "a.png", 7)
    lists, elsewhere = tmp_path / "lists", tmp_path / "elsewhere"
    for folder in (lists, elsewhere):
        folder.mkdir()
    (lists / "list.txt").write_text("/one/a.png 0\n")
    for folder, root in ((tmp_path, "images/"), (tmp_path, "images"), (elsewhere, "../images")):
        monkeypatch.chdir(folder)
        source = open_source(lists / "list.txt", root=root)
        monkeypatch.chdir(tmp_path.parent)  # another process may read it from elsewhere
        assert greys(source) == [7]
    (lists / "list.txt").write_text(f"{tmp_path}/images/one/a.png 0\n")
    assert greys(open_source(lists / "list.txt", root="images")) == [7]


def test_a_shuffled_list_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """Two readers see one order, and another seed gives another."""
    names = [written(tmp_path, f"{i}.png", i) for i in range(20)]
    (tmp_path / "list.txt").write_text("\n".join(f"{name} 0" for name in names))
    orders = [
        greys(open_source(tmp_path / "list.txt", shuffle=True, seed=seed)) for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(20))


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    """Labels count the folders by name; a file that is no image is skipped, a missing one, too."""
    for label, name in enumerate(("ant", "bee", "cat")):
        for i in range(3):
            written(tmp_path / "train" / name, f"{i}.png", 100 * label)
    (tmp_path / "train" / "bee" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    source = open_source(tmp_path, classes=3)
    assert isinstance(source, Source)
    table = pa.Table.from_batches(list(source.batches()), source.schema)
    assert sorted(table["label"].to_pylist()) == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [row[0] for row in table["data"].to_pylist()] == [
        100 * n for n in table["label"].to_pylist()
    ]
    (tmp_path / "train" / "ant" / "0.png").unlink()
    assert len(greys(source)) == 7


def labels(source: ImageSource) -> dict[int, int]:
    """The label of each row, by the first byte of its image."""
    table = pa.Table.from_batches(list(source.batches()), source.schema)
    values = table["label"].to_pylist()
    return {data[0]: label for data, label in zip(table["data"].to_pylist(), values, strict=True)}


def test_every_folder_of_a_class_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one without images, and one with folders alone; hidden files and folders do not."""
    for name, value in (
        ("ant/0.png", 1),
        ("cat/2020/0.png", 2),
        (".ipynb_checkpoints/0.png", 3),
        ("__MACOSX/0.png", 4),
        ("ant/._0.png", 5),
        ("dog/0.png", 6),
    ):
        written(tmp_path, name, value)
    (tmp_path / "bee").mkdir()
    assert labels(open_source(tmp_path)) == {1: 0, 2: 2, 6: 3}
    assert "no images of the classes bee" in caplog.text


def test_folders_that_state_their_labels(tmp_path: Path) -> None:
    """As Spark writes and reads them."""
    written(tmp_path, "label=3/0.png", 1), written(tmp_path, "label=07/0.png", 2)
    assert labels(open_source(tmp_path)) == {1: 3, 2: 7}


def test_parts_with_other_classes(tmp_path: Path) -> None:
    """A label would mean one class in training and another in tests."""
    for name in ("train/ant/0.png", "train/bee/0.png", "train/cat/0.png", "val/cat/0.png"):
        written(tmp_path, name, len(name))
    for part in ("train", "test"):
        with pytest.raises(BadInput, match=r"val: expected a folder .*, got none for ant, bee; "):
            open_source(tmp_path, part)
    for name in ("ant", "bee"):
        (tmp_path / "val" / name).mkdir()
    assert labels(open_source(tmp_path, "test")) == {13: 2}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("file,label\na.png,0\n", r"list\.txt:1: .* a whole label, got file,label"),
        ("a.png 2147483648\n", r"list\.txt:1: expected a label of 32 bits, got 2147483648"),
        (f"a.png {'9' * 5000}\n", r"list\.txt:1: expected the name of a file, a space and a whole"),
        ("a.png 0\nb.png\n", r"list\.txt:2: expected the name of a file, a space and a whole"),
        ("a.png 0\nb.png 1.5\n", r"list\.txt:2: .*, got b\.png 1\.5"),
        ("a.png 0\n\xff 1", r"list\.txt: expected UTF-8 text, got byte 0xff"),
        ("a.png 0\n", r"none that can be decoded; \S+/a\.png: cannot be read: No such file"),
        ("", "expected lines with a file and a label, got none"),
        ("# a.png 0\n", "expected lines with a file and a label, got none"),
        ("a.png\n", r"list\.txt:1: expected the name of a file, a space and a whole label"),
        ("a.png,0\n", r"list\.txt:1: .* a space and a whole label, got a\.png,0"),
        ("a.png 0.865\n", r"list\.txt:1: .* a whole label, got a\.png 0\.865"),
        ("a.png 1 2 3\n", r"list\.txt:1: .*\(one label: HDF5 files hold several\), got a\.png 1"),
        ("sub\\a.png 0\n", r"none that can be decoded; \S+/sub/a\.png: cannot be read: No such"),
    ],
)
def test_a_list_that_makes_no_sense(tmp_path: Path, text: str, error: str) -> None:
    """The error names the line."""
    (tmp_path / "list.txt").write_text(text, encoding="latin-1")
    with pytest.raises(BadInput, match=error):
        open_source(tmp_path / "list.txt")

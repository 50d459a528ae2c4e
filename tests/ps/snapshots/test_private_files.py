"""Secret files: readable by their user only, and checked before they are trusted."""

from pathlib import Path

import pytest

from ps.snapshots.private_files import check_private
from ps.whole_files import write_private
from shards.errors import BadInput


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
def test_what_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    """The error says how to fix it."""
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    with pytest.raises(BadInput) as caught:
        check_private(path, "Ray's token")
    assert "secret" not in str(caught.value)
    assert str(caught.value).startswith(
        f"Ray's token: {path}: expected a file of yours of mode 600"
    )
    assert str(caught.value).endswith(f"chmod 600 {path}")


def test_what_is_written_is_private(tmp_path: Path) -> None:
    """Both a new file, and one that others could read."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("")
    old.chmod(0o666)
    for path in (old, new):
        write_private(path, b"secret")
        check_private(path, "a secret")
        assert path.read_bytes() == b"secret"


def test_what_is_no_file(tmp_path: Path) -> None:
    """A folder, and a missing file."""
    with pytest.raises(BadInput, match="expected a file, got something else"):
        check_private(tmp_path, "a secret")
    with pytest.raises(BadInput, match=r"a secret: .*none: No such file"):
        check_private(tmp_path / "none", "a secret")

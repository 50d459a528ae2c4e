"""Archives of `downpour pack`, made once for equal code, and what is unpacked from them."""

import hashlib
import subprocess
import tempfile
from pathlib import Path

from deploy.clusters.archive import pack
from tests.support.fresh_clone import ROOT
from worker.spark.code_archive import pack_code

SPARK_LOG = ROOT / "tests" / "support" / "spark_log.properties"
"""Settings of Spark's log: warnings, and the lines by which a master and a worker say they run."""


_ARCHIVES = ROOT / "build" / "archives"


def pack_once(name: str, *extras: str) -> Path:
    """An archive with these extras in build/archives, with a digest of the code in its name.

    An earlier one of that name is removed.
    """
    _ARCHIVES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        code = pack_code(folder).read_bytes() + (ROOT / "constraints.txt").read_bytes()
    archive = _ARCHIVES / f"{name}-{hashlib.sha256(code).hexdigest()[:12]}.tar.gz"
    if not archive.exists():
        for earlier in _ARCHIVES.glob(f"{name}-*.tar.gz"):
            earlier.unlink()
        pack(archive, extras, level=1)  # half a minute of a core is in the rest
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive as a user does."""
    folder.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)

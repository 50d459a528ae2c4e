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


def pack_once(path: Path, *extras: str) -> Path:
    """An archive with these extras: `path` with a digest of the code in its name."""
    with tempfile.TemporaryDirectory() as folder:
        code = pack_code(folder).read_bytes() + (ROOT / "constraints.txt").read_bytes()
    name = path.name.removesuffix(".tar.gz")
    archive = path.with_name(f"{name}-{hashlib.sha256(code).hexdigest()[:12]}.tar.gz")
    if not archive.exists():
        pack(archive, extras)
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive as a user does."""
    folder.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)

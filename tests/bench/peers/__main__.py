"""Makes environments for contenders that need other versions of packages than this project: 2 GB.

    python -m tests.bench.peers

Each list peers/NAME.txt becomes .venv-peers/NAME. One that does not install is left out with a
line that says so, and the benchmarks run without that contender.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.fresh_clone import ROOT


def main() -> None:
    """Make an environment for each list of packages."""
    for packages in sorted(Path(__file__).parent.glob("*.txt")):
        folder = ROOT / ".venv-peers" / packages.stem
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        try:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([*pip, "install", "--quiet", "--requirement", packages], check=True)
        except subprocess.CalledProcessError:
            print(f"{folder}: left out, for {packages} did not install", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

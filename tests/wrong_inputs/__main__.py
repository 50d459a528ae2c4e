"""`python -m tests.wrong_inputs` tries every wrong input and prints how many end as they should."""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.wrong_inputs import sdk
from tests.wrong_inputs.rows import fault_of


def main() -> int:
    """Print each fault, a table by kind, and the total; returns 1 if there is a fault."""
    tried, good = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.chdir(root)
        with sdk.environment(root) as env:
            for row in sdk.rows(env):
                fault = fault_of(row, [root])
                tried[row.kind] += 1
                good[row.kind] += not fault
                if fault:
                    print(f"{row.title}: {fault}")
    for kind, count in tried.items():
        print(f"{kind}: {good[kind]} of {count}")
    print(f"{good.total()} of {tried.total()}")
    return int(good.total() < tried.total())


if __name__ == "__main__":
    sys.exit(main())

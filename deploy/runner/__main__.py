"""`python -m deploy.runner FOLDER`: what the service starts for each attempt."""

import sys
from pathlib import Path

from deploy.runner.attempt import run_attempt
from shards.errors import DownpourError


def main() -> int:
    """Run the attempt that the command line names."""
    try:
        return run_attempt(Path(sys.argv[1]))
    except DownpourError as error:
        sys.stderr.write(f"downpour: error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())

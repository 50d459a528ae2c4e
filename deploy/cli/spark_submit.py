"""The application for `spark-submit`: a command of `downpour`, on the Spark of the submission.

    spark-submit [its options] spark_submit.py train --solver solver.prototxt ...

It takes what `downpour` takes. `--spark submitted` is added to the commands that compute on Spark,
unless they name one. Spark's own options decide where executors and driver run.
"""

import sys
from pathlib import Path

_ON_SPARK = {"train", "test", "features"}


def main() -> None:
    """Run the command that the arguments name."""
    # Spark puts the folder of its application first: modules next to it are no modules to import.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
    words = sys.argv[1:]
    named = any(word == "--spark" or word.startswith("--spark=") for word in words)
    if words and words[0] in _ON_SPARK and not named and "--resume" not in words:
        sys.argv[1:] = [words[0], "--spark", "submitted", *words[1:]]
    from deploy.cli.app import main as run_command

    run_command()


_HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    main()

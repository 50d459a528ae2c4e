"""The tables of docs/measurements/choice.md, and the figures that `downpour doctor` quotes.

python -m tests.bench.bench_choice [--jobs 2] [--out runs/experiments/choice]
"""

import argparse
import re
from pathlib import Path

from deploy.experiments.choices import choices_of, keep, table
from deploy.experiments.runner import run_sweep
from deploy.experiments.sweeps import read_sweep

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measurements" / "choice.md"


def main() -> None:
    """Run the sweep, or what is left of it, and write the page and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "experiments" / "choice")
    given = parser.parse_args()
    sweep = read_sweep(ROOT / "deploy" / "examples" / "choice.toml")
    run_sweep(sweep, given.out, jobs=given.jobs)
    choices = choices_of(sweep, given.out)
    keep(choices, ROOT / "deploy" / "experiments")
    shown = f"<!-- choices -->\n\n{table(choices)}\n\n<!-- /choices -->"
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(r"<!-- choices -->.*<!-- /choices -->", lambda _: shown, text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()

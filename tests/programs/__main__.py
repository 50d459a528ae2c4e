"""Runs a long check or an experiment, or lists all: `make check`, `make experiment`.

python -m tests.programs check C=chaos KILLS=300 LEVEL=memory
"""

import sys

from tests.programs.checks import CHECKS
from tests.programs.experiments import EXPERIMENTS
from tests.programs.table import check_request, list_programs, run_program

TABLES = {"check": ("C", CHECKS), "experiment": ("E", EXPERIMENTS)}


def main(target: str, *assignments: str) -> int:
    """Run the program that the assignments name; without a name, list the table of `target`."""
    variable, programs = TABLES[target]
    given = dict(text.split("=", 1) for text in assignments)
    if not given.get(variable):
        print("\n".join(list_programs(programs, variable, target)))
        return 0
    return run_program(*check_request(programs, variable, given))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

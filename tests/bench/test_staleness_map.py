"""The map of rate and delay: stability ends where the formula says, and the files are written."""

import math
from pathlib import Path

import pytest
from PIL import Image

from tests.bench.staleness_map import (
    Cell,
    draw,
    find_border,
    find_largest_rate,
    measure_cells,
    write_cells,
)


@pytest.mark.parametrize("workers", [1, 2, 5, 17])
def test_stability_ends_at_the_border(workers: int) -> None:
    """A tenth below it the quadratic problem is learnt, a tenth above it diverges."""
    border = find_border(workers - 1)
    below, above = measure_cells("quad", (workers,), (0.9 * border, 1.1 * border))
    assert below.error < 20
    assert above.error == 100


def test_the_border_of_no_delay_and_of_one() -> None:
    """The known limits: 2 for prompt gradients, 1 for gradients that are one update old."""
    assert find_border(0) == pytest.approx(2)
    assert find_border(1) == pytest.approx(1)
    assert find_border(1000) == pytest.approx(math.pi / 2001, rel=1e-3)


def test_the_largest_rate_is_below_the_first_failure() -> None:
    """A rate above one that fails does not count, though it may succeed by luck."""
    errors = {0.1: (5.0, 6.0, 90.0), 0.2: (90.0, 90.0, 7.0), 0.4: (8.0, 8.0, 8.0)}
    cells = [
        Cell("mlp", 3, rate, seed, error)
        for rate, seeds in errors.items()
        for seed, error in enumerate(seeds)
    ]
    assert find_largest_rate(cells, 3, 50.0) == 0.1


def test_files(tmp_path: Path) -> None:
    """The table has a row a trial, the picture a panel a workload."""
    cells = [
        Cell(name, workers, rate, 1, 10.0 if rate * workers < 0.5 else 100.0)
        for name in ("quad", "mlp")
        for workers in (1, 2)
        for rate in (0.2, 0.4)
    ]
    write_cells(cells, tmp_path / "atlas.csv")
    rows = (tmp_path / "atlas.csv").read_text().splitlines()
    assert rows[:2] == ["workload,workers,rate,seed,error", "quad,1,0.2,1,10"]
    assert len(rows) == 9
    draw({"left": cells[:4], "right": cells[4:]}, tmp_path / "atlas.png")
    with Image.open(tmp_path / "atlas.png") as picture:
        assert picture.width > 2 * picture.height

"""Which combinations of its values a sweep keeps: those with a meaning, each once."""

import re
from pathlib import Path

import pytest

from deploy.experiments.sweeps import read_sweep
from shards.errors import BadInput
from tests.support.cli_in_process import command


def written(path: Path, text: str) -> Path:
    file = path / "sweep.toml"
    file.write_text(text)
    return file


def points(path: Path, text: str) -> list[str]:
    head = 'name = "x"\nworkload = "quad"\nseeds = [0, 0]\n'
    return [point.label for point in read_sweep(written(path, head + text)).points]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'strategy = "{kind}"\n[grid]\nkind = ["asp", "ssp", "bsp"]',
            ["kind asp", "kind ssp", "kind bsp"],
        ),
        (
            'strategy = "{kind}"\nstaleness = 4\n[grid]\nkind = ["asp", "ssp", "bsp"]',
            ["kind asp", "kind ssp", "kind bsp"],
        ),
        (
            'strategy = "{kind}"\n[grid]\nkind = ["asp", "ssp", "bsp"]\nstaleness = [1, 4, "inf"]',
            [
                "kind asp, staleness inf",
                "kind ssp, staleness 1",
                "kind ssp, staleness 4",
                "kind bsp",
            ],
        ),
        (
            '[grid]\nstrategy = ["asp", "ssp"]\nstaleness = ["usual", 4, inf]',
            [
                "strategy asp, staleness usual",
                "strategy ssp, staleness usual",
            ],
        ),
        (
            '[grid]\nstrategy = ["downpour", "easgd"]\nn_push = [1, 2]\ntau = [5, 10]',
            [
                "strategy downpour, n_push 1",
                "strategy downpour, n_push 2",
                "strategy easgd, tau 5",
                "strategy easgd, tau 10",
            ],
        ),
        (
            '[grid]\nstrategy = ["asp", "easgd:tau={t}"]\nt = [5, 10]',
            ["strategy asp", "strategy easgd:tau={t}, t 5", "strategy easgd:tau={t}, t 10"],
        ),
        (
            'rule = "{r}:momentum={m}"\n[grid]\nr = ["sgd", "momentum"]\nm = [0.5, 0.9]',
            ["r sgd", "r momentum, m 0.5", "r momentum, m 0.9"],
        ),
        (
            'strategy = "bsp:b=4"\n[grid]\n"cluster.workers" = [4, 8]',
            ["cluster.workers 8"],
        ),
        (
            'strategy = "downpour"\n[grid]\nn_push = [1, 9]\nstaleness = [2, 16]',
            ["n_push 1, staleness 2", "n_push 1, staleness 16", "n_push 9, staleness 16"],
        ),
        (
            '[grid]\nstrategy = ["asp", "bsp"]\non_stale = ["wait", "drop:3"]',
            [
                "strategy asp, on_stale wait",
                "strategy asp, on_stale drop:3",
                "strategy bsp, on_stale wait",
            ],
        ),
        (
            '[[list]]\nstrategy = "asp"\nrate = 0.1\n[[list]]\nstrategy = "easgd"\ntau = 5',
            ["strategy asp, rate 0.1", "strategy easgd, tau 5"],
        ),
    ],
)  # fmt: skip
def test_a_grid_over_kinds_keeps_what_makes_sense(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    """Bounds and options that a kind lacks are taken out, and what is then the same is run once."""
    assert points(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bound = 4", "bound: expected staleness, the present name of this key"),
        ("[grid]\nbound = [4]", "bound: expected staleness, the present name of this key"),
        ("[grid]\nstaleness = ['many']", "staleness: expected a whole number .*, got 'many'"),
        ("staleness = -1", "staleness: expected a whole number of steps, .*, got -1"),
        ("staleness = 4.5", "staleness: expected a whole number of steps, .*, got 4.5"),
        ('strategy = "asp"\nstaleness = 4', "strategy asp: expected no staleness bound, got 4"),
        ('strategy = "bsp"\nstaleness = 4', "strategy bsp: expected staleness bound 0, got 4"),
        ('strategy = "asp"\ntau = 4', "tau: expected one of .*, got an unknown key"),
        ('[grid]\nstrategy = ["asp:tau=5", "easgd"]', "strategy asp: unknown option 'tau'"),
        ("grid = 4", "grid: expected a table with a list of values for each key, got 4"),
        ("[list]\nrate = 0.1", r"list: expected \[\[list\]\] tables, got"),
        ("[[zip]]\nrate = [0.1]", "zip: expected a table with a list of values"),
    ],
)
def test_a_combination_that_no_kind_takes_is_one_sentence(
    text: str, message: str, tmp_path: Path
) -> None:
    """An option or a bound that no strategy of the sweep has is a mistake, not left out."""
    with pytest.raises(BadInput, match=message) as refused:
        points(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_what_is_left_out_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run gives each combination with its reason, a run their number and its settings."""
    exp = command(capsys, monkeypatch, "exp")
    file = written(
        tmp_path,
        'name = "x"\nworkload = "quad"\ngradients = 8\nseeds = [0, 0]\n[grid]\n'
        'strategy = ["asp", "ssp"]\nstaleness = [1, "inf"]\n',
    )
    refusal = "strategy ssp: expected a staleness bound, got no bound"
    _, printed, _ = exp("run", file, "--dry-run")
    assert printed.splitlines()[:2] == [
        f"left out: strategy ssp, staleness inf: {refusal}",
        "left out: strategy asp, staleness 1: the same as strategy asp, staleness inf",
    ]
    _, printed, _ = exp("run", file, "--out", tmp_path / "out")
    lines = printed.splitlines()
    assert lines[0] == "2 of 4 combinations are left out, which --dry-run lists"
    assert lines[1].startswith("1 of 2: strategy asp, staleness inf, seed 0: done in ")


def test_the_page_s_sweeps_are_as_it_says(tmp_path: Path) -> None:
    """Each whole sweep of the page can be read, and has the number of points that it names."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "experiments.md").read_text()
    sweeps = [
        text for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "name =" in text
    ]
    found = {
        sweep.name: sweep for sweep in (read_sweep(written(tmp_path, text)) for text in sweeps)
    }
    counts = {name: len(sweep.points) for name, sweep in found.items()}
    assert counts == {"slow-link": 12, "three-ways": 3, "kinds": 10}
    assert len(found["kinds"].left_out) == 24 - 10

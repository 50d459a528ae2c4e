"""The pages agree with each other and with the code: links, file names, tables of names."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

import ps
from ps.job import WorkerOptions
from ps.launch.launch_plan import LaunchOptions
from ps.start_job import StartOptions
from shards import errors, messages, rules, schedules
from shards.errors import BadInput
from tests.support.doc_pages import DOCS, PAGES, ROOT, prose, read, rows, section
from tests.support.reference_generator import build_page
from worker.caffe.net import Description, Network
from worker.caffe.registry import LAYERS
from worker.strategies import STRATEGIES

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:cupy_kernels|shards|ps|worker|deploy|docs|tests|\.ci)/[\w./*-]*)`")


def anchors(text: str) -> set[str]:
    """The names by which a page's headings are linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names(page: str, heading: str, column: int = 0) -> list[str]:
    """What stands in backticks in a column of the tables under a heading."""
    cells = [row[column] for row in rows(section(read(page), heading))]
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """A link within the repository names a file that exists, and a heading that it has; so does a
    link in a part that only the site has."""
    committed = _LINK.findall(prose(read(page)))
    for link in {*committed, *_LINK.findall(prose(build_page(read(page))))}:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        if anchor:
            text = target.read_text()
            assert anchor in anchors(text if link in committed else build_page(text)), link


def test_the_site_builds(tmp_path: Path) -> None:
    """Sphinx reads every page, with the parts that follow from the code, without a warning: no
    broken link, and no page that is not listed."""
    # In a process of its own, because Sphinx changes the state of docutils.
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    build += ["--builder", "dummy", "--doctree-dir", str(tmp_path / "trees"), "docs", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """A path in backticks is there; with a `*`, something matches it."""
    for path in _FILE.findall(prose(read(page))):
        assert list(ROOT.glob(path)), path


def test_the_index_lists_every_page() -> None:
    """Every page can be reached from the index, and has its row in the table of its kind."""
    listed = set(re.findall(r"^\| \[.*?\]\((.*?)\)", read("docs/index.md"), re.MULTILINE))
    assert listed == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")} - {"index.md"}


def test_pictures_are_small() -> None:
    """A picture costs a reader at most 150 KB."""
    pictures = list((DOCS / "images").iterdir())
    assert pictures
    assert all(picture.stat().st_size <= 150_000 for picture in pictures)


def test_every_message_is_told() -> None:
    """The table of the protocol names each request once and each answer."""
    page, heading = "docs/explanation/architecture.md", "## The protocol"
    requests = [kind.__name__ for kind in get_args(messages.Request | messages.Probe)]
    assert sorted(names(page, heading)) == sorted(requests)
    assert set(names(page, heading, 1)) == {kind.__name__ for kind in get_args(messages.Reply)}


def test_every_error_is_told() -> None:
    """The table of remedies names every error but the root, and the session's own."""
    tree = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.DownpourError)
    }
    tree = (tree - {"DownpourError"}) | {"ClockTimeout", "JobEnded", "NotReady", "Unreachable"}
    assert set(names("docs/reference/sdk.md", "## Errors, by remedy")) == tree
    assert set(ps.errors.__all__) - {"DownpourError"} <= tree


def test_every_method_is_explained() -> None:
    """Each method of workers and of the admin client stands on the SDK's page."""
    text = read("docs/reference/sdk.md")
    for kind in (ps.Worker, ps.WorkerStep, ps.AdminClient):
        methods = {name for name, _ in inspect.getmembers(kind, callable) if name[0] != "_"}
        assert methods <= set(re.findall(r"(?:`|\.)(\w+)\(", text)), kind


@pytest.mark.parametrize(
    ("heading", "function", "options"),
    [
        ("## A job's shards", ps.start, StartOptions),
        ("## A worker", ps.Job.worker, WorkerOptions),
        ("## Tables", ps.Dense.__init__, None),
    ],
)
def test_every_option_is_explained(heading: str, function: Any, options: type | None) -> None:
    """The table under a heading has each option of the function once."""
    table = "\n".join(
        row[0] for row in rows(section(read("docs/reference/sdk.md"), heading)) if len(row) == 3
    )
    parameters = inspect.signature(function).parameters.values()
    expected = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    expected += [] if options is None else [*inspect.get_annotations(options)]
    if options is StartOptions:
        expected += [*inspect.get_annotations(LaunchOptions)]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(set(expected))


def test_rules_and_schedules_are_told() -> None:
    """The SDK's page names every update rule and every policy."""
    text = section(read("docs/reference/sdk.md"), "## Tables")
    for kind in (*get_args(rules.Rule), *get_args(schedules.Schedule)):
        assert f"`{kind.__name__}`" in text


def test_strategies_and_layers_are_told() -> None:
    """The command line's page explains every strategy, and a page of its own names every layer."""
    (item,) = re.findall(r"^- \*\*`--strategy`\*\*.*$", read("docs/reference/cli.md"), re.MULTILINE)
    assert all(f"`{name}`" in item for name in STRATEGIES)
    page = read("docs/reference/layers.md")
    assert all(re.search(rf"\b{name}\b", page) for name in LAYERS)
    (line,) = re.findall(r"^net\.prototxt: layer conv1 .*$", page, re.MULTILINE)
    net = 'layer { name: "conv1" type: "Convolutoin" bottom: "data" top: "conv1" }'
    with pytest.raises(BadInput) as refused:
        Network(Description(net, file="net.prototxt"))
    assert str(refused.value) == line


def test_extras_are_named_as_they_are_installed() -> None:
    """The page on installing names every extra. Pages and errors install extras that exist, from a
    checkout: the distribution is on no index."""
    extras = set(tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"])
    table = section(read("docs/how-to/install.md"), "## Extras")
    assert extras - {"test", "lint", "docs", "bench", "fuzz", "compose", "targets"} <= set(
        re.findall(r"`([\w-]+)`", table)
    )
    source = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    for package in ("shards", "ps", "worker", "deploy"):
        source += [*(ROOT / package).rglob("*.py")]
    for path in source:
        text = path.read_text()
        assert "pip install 'downpour" not in text, path
        for named in re.findall(r"/path/to/downpour\[([\w,-]+)\]", text):
            assert set(named.split(",")) <= extras, path
        assert (
            set(re.findall(r'missing\([^()]*(?:\([^()]*\))?[^()]*, "([\w-]+)"\)', text)) <= extras
        )


def test_the_changelog_knows_the_version() -> None:
    """The version of the packages is released or being made."""
    assert ps.__version__ in read("CHANGELOG.md")

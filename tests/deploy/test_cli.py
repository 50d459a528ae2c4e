"""The command line as far as it goes without starting anything: help, and what it refuses.

Whatever is wrong with the input is told in one line with exit status 1, before Ray or Spark is
started, and leaves every file as it was.
"""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from struct import pack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import fields, replace
from safetensors.numpy import load_file, save_file

from deploy import cli
from deploy import train as training
from deploy.origin import Origin
from deploy.run_folder import RunFolder
from deploy.settings import TrainSettings
from ps import Console, local_shards, shard_specs
from ps.hosts import hosting
from ps.storage.snapshots import save_snapshot
from tests import tiny
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.inference import write_safetensors

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def downpour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process: its exit status, its standard output and error."""

    def started(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(training, "_start", started)
    # An embedded Ray that other tests of this process share has put its own token there.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["downpour", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with tiny's net, solver and data."""
    tiny.write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "train", "test", "features", "version"])
def test_help_fits_a_terminal(command: str, downpour: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subcommand explains itself within eighty columns."""
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = downpour(*command.split(), "--help")
    assert (status, err) == (0, "")
    assert f"Usage: downpour {command}".rstrip() in out
    assert max(map(len, out.splitlines())) <= 80


def test_help_names_every_setting_and_its_default(
    downpour: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting is an option, and each with a default of its own says it."""
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = downpour("train", "--help")
    lines = {
        found[1]: line for line in out.splitlines() if (found := re.match(r"│ +--([\w-]+)", line))
    }
    settings = {field.name.replace("_", "-"): field.default for field in fields(TrainSettings)}
    assert lines.keys() == settings.keys() | {"resume", "help"}
    for name in ("shards", "workers", "strategy", "seed", "shards-in", "bind"):
        assert f"[default: {settings[name]}]" in lines[name]
    assert "[default: 4; bsp: 0]" in lines["staleness"]
    assert "[default: 10]" in lines["lease-s"]
    assert "[default: 1]" in lines["n-push"]
    assert "[default: yes]" in lines["shuffle"]


def test_version_names_the_build(downpour: Run) -> None:
    """The build id is what both sides of a connection compare."""
    from ps import build_id

    status, out, _ = downpour("version")
    assert status == 0
    assert re.fullmatch(rf"downpour \S+ build {build_id()}\n", out)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one."""
    monkeypatch.setattr("cupy_kernels.device.gpu", lambda: None)


# --- bad input ------------------------------------------------------------------------------------

TRAIN = "train --solver solver.prototxt --data data --out run"


def refuses(downpour: Run, folder: Path, arguments: str, line: str) -> None:
    """The command says one line that matches, and leaves every file as it was."""
    before = files(folder)
    status, out, err = downpour(*arguments.split())
    assert (status, out) == (1, "")
    assert re.fullmatch(rf"downpour: error: (\S*/)?{line}.*\n", err), err
    assert files(folder) == before


def files(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


NETWORKS = [
    (
        '"Convolution"',
        '"Convulsion"',
        r"net\.prototxt: layer conv \(Convulsion\): type not supported; expected one of .*Pooling",
    ),
    ("kernel_size", "kernel_sighs", r'net\.prototxt:7: .*no field named "kernel_sighs"'),
    (
        "kernel_size: 3",
        "kernel_size: 3 axis: 2",
        r"net\.prototxt: layer conv \(Convolution\): axis 2 is not supported; expected 1",
    ),
    (
        "height: 8",
        "height: 28",
        r"net\.prototxt: layer rows .*: expected images of shape \(1, 28, 8\), the data has \(1, ",
    ),
    (
        "kernel_size: 3",
        "kernel_size: 9",
        r"net\.prototxt: layer conv \(Convolution\): .*9",
    ),
    (
        '"ip2" bottom: "label" top: "loss"',
        '"conv" bottom: "label" top: "loss"',
        r"net\.prototxt: layer loss .*: expected a label for each of 288 rows .* of shape \(8,\)",
    ),
]


@pytest.mark.parametrize(("old", "new", "line"), NETWORKS, ids=[new for _, new, _ in NETWORKS])
def test_wrong_networks(old: str, new: str, line: str, downpour: Run, job: Path) -> None:
    """Layers and fields that there are none of, and shapes that don't fit."""
    swap(job / "net.prototxt", old, new)
    refuses(downpour, job, TRAIN, line)


SOLVERS = [
    (
        "base_lr: 0.1",
        'base_lr: 0.1 type: "Sgdd"',
        r"solver\.prototxt: solver type Sgdd is not supported; expected one of SGD, ",
    ),
    (
        "base_lr: 0.1",
        "base_lr: -0.1",
        r"solver\.prototxt: learning-rate .*: base_rate: expected 0 or more, .*got -0\.1",
    ),
    ("base_lr: 0.1", "", r"solver\.prototxt: expected a base_lr, got none"),
    ("max_iter: 100", "max_iter: 0", r"solver\.prototxt: max_iter: expected at least 1, got 0"),
    ('"net.prototxt"', '"n.prototxt"', r"solver\.prototxt: net n\.prototxt: found neither as "),
    ("max_iter", "max_itr", r'solver\.prototxt:1: .*no field named "max_itr"'),
]


@pytest.mark.parametrize(("old", "new", "line"), SOLVERS, ids=[new for _, new, _ in SOLVERS])
def test_wrong_solvers(old: str, new: str, line: str, downpour: Run, job: Path) -> None:
    """What a solver file cannot say."""
    swap(job / "solver.prototxt", old, new)
    refuses(downpour, job, TRAIN, line)


PARQUET = [
    ("train", {"label": [*[0] * 20, 7, *[1] * 9]}, r"label: row 20: expected .* \[0, 3\), got 7"),
    ("test", {"label": [3] * 30}, r"label: row 0: expected a label in \[0, 3\), got 3"),
    ("train", {"label": [-1] * 30}, r"label: row 0: expected a label .*, got -1"),
    ("train", {"label": [0.5] * 30}, r"label: row 0: expected a whole number, got 0\.5"),
    ("train", {"label": None}, r"expected a column label, got image"),
    ("train", {"image": None}, r"expected a column data or image, got label"),
    ("train", {"image": [b"\x89PNG...."] * 30}, r".*a PNG file, and only raw pixels are read"),
]


@pytest.mark.parametrize(("part", "columns", "line"), PARQUET)
def test_wrong_parquet(
    part: str, columns: dict[str, list[object] | None], line: str, downpour: Run, job: Path
) -> None:
    """Columns that are missing and labels that the net has no class for, by their row."""
    table = tiny.image_table(30)
    for name, values in columns.items():
        table = table.drop_columns(name)
        if values is not None:
            table = table.append_column(name, pa.array(values))
    pq.write_table(table, job / f"data/{part}.parquet")
    refuses(downpour, job, TRAIN, rf"{part}\.parquet(, column |: ){line}")


@pytest.mark.parametrize("part", ["train", "test"])
def test_truncated_parquet(part: str, downpour: Run, job: Path) -> None:
    """A file that lost its end, with which Parquet begins."""
    path = job / f"data/{part}.parquet"
    path.write_bytes(path.read_bytes()[:500])
    refuses(downpour, job, TRAIN, rf"{part}\.parquet: expected a whole Parquet file, got ")


def write_idx(folder: Path, classes: int = 3) -> None:
    """MNIST's four files in place of Parquet: 30 images of 8x8 labelled 0, 1 ... in turn."""
    for file in folder.iterdir():
        file.unlink()
    labels = bytes(row % classes for row in range(30))
    for part in ("train", "t10k"):
        images = gzip.compress(pack(">4I", 2051, 30, 8, 8) + bytes(30 * 64))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(pack(">2I", 2049, 30) + labels)


def test_idx_labels_beyond_the_classes(downpour: Run, job: Path) -> None:
    """The net's last layer says how many classes there are."""
    write_idx(job / "data", classes=4)
    line = r"train-labels-idx1-ubyte: row 3: expected a label in \[0, 3\), got 3"
    refuses(downpour, job, TRAIN, line)


def test_truncated_idx(downpour: Run, job: Path) -> None:
    """A file whose header promises more than is there."""
    write_idx(job / "data")
    path = job / "data/t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:20])
    line = r"t10k-labels-idx1-ubyte: expected 30 bytes of data, .* got a file of 20 bytes"
    refuses(downpour, job, TRAIN, line)


OPTIONS = [
    ("--data nowhere", r"data \S*nowhere: expected a folder or a Parquet file, got nothing there"),
    ("--test-data nowhere", r"data \S*nowhere: expected a folder or a Parquet file, got nothing"),
    ("--solver nowhere", r"nowhere: cannot be read: No such file"),
    ("--solver data", r"data: cannot be read: Is a directory"),
    ("--weights nowhere", r"nowhere: cannot be read: No such file"),
    (
        "--weights net.prototxt",
        r"net\.prototxt: expected a \.caffemodel, got \d+ bytes of something",
    ),
    ("--weights x.safetensors", r"x\.safetensors: expected a \.safetensors file: No such file"),
    ("--workers -1", r"--workers: expected at least 1, got -1"),
    ("--shards 0", r"--shards: expected at least 1, got 0"),
    (
        "--shards 400",
        r"table weights has \d+ blocks of 256 floats: expected 1 to \d+ shards, got 400",
    ),
    ("--max-iter -5", r"--max-iter: expected at least 1, got -5"),
    ("--n-push -1", r"n_push: expected at least 1, got -1"),
    ("--n-push 9", r"staleness bound: pushing every 9 steps needs at least 8, got 4"),
    ("--staleness -1", r"--staleness: expected a whole number of steps or inf, got -1"),
    ("--strategy down", r"strategy: expected one of bsp, downpour, got 'down'"),
    ("--strategy bsp --n-fetch 2", r"--n-fetch: strategy bsp has no such option"),
    ("--device cuda", r"device: expected auto, cpu, gpu or gpu:N, got 'cuda'"),
    ("--device gpu:1", r"device gpu:1: expected a GPU that answers, and CuPy .*; got none"),
    ("--lease-s nan", r"--lease-s: expected more than 0 s, and finite, got nan"),
    (
        "--bind 0.0.0.0 --spark sc://192.0.2.1:1",
        r"Spark at sc://192\.0\.2\.1:1: expected ;use_ssl=true .* in the URL .* --plaintext",
    ),
    (
        "--bind 0.0.0.0 --ray 192.0.2.1:1",
        r"Ray: expected RAY_AUTH_MODE=token where shards are open to .*, got none: .* --plaintext",
    ),
    ("--port 70000", r"--port: expected 0 to 65535, got 70000"),
    ("--spark 127.0.0.1:7077", r"Spark URL: expected spark://HOST:PORT, .* got 127\.0\.0\.1:7077"),
    (
        "--spark spark://127.0.0.1:1",
        r"Spark at spark://127\.0\.0\.1:1: expected a server .*, got: Connection refused",
    ),
]


@pytest.mark.parametrize(("option", "line"), OPTIONS, ids=[option for option, _ in OPTIONS])
@pytest.mark.usefixtures("no_gpu")
def test_wrong_options(option: str, line: str, downpour: Run, job: Path) -> None:
    """Files that are not there or something else, and numbers and names that make no sense."""
    refuses(downpour, job, f"{TRAIN} {option}", line)


@pytest.mark.parametrize("missing", ["solver", "data", "out"])
def test_missing_options(missing: str, downpour: Run, job: Path) -> None:
    """The three that a new run needs."""
    arguments = re.sub(rf"--{missing} \S+", "", TRAIN)
    refuses(downpour, job, arguments, rf"train: expected --{missing}, or --resume with an earlier")


def test_weights_of_another_net(downpour: Run, job: Path) -> None:
    """A tensor of the right name and another shape is named."""
    other = job / "other.safetensors"
    save_file({"ip2/0": np.zeros((3, 5), np.float32)}, other)
    line = r"other\.safetensors: tensor ip2/0: expected shape \(3, 16\), got \(3, 5\)"
    refuses(downpour, job, f"{TRAIN} --weights {other}", line)


def test_weights_of_a_stranger(downpour: Run, job: Path) -> None:
    """A file in which not one layer is the net's is a mistake, and no start to fine-tune from."""
    save_file({"fc8/0": np.zeros((3, 5), np.float32)}, job / "other.safetensors")
    line = r"other\.safetensors: expected weights of layer conv, got a file without"
    refuses(downpour, job, f"{TRAIN} --weights other.safetensors", line)


def test_no_gpu_for_the_shards(downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shards are to live on this machine, it is found before anything is started."""
    monkeypatch.setattr(hosting, "gpu", lambda: None)
    line = "shard device gpu: expected a GPU that answers, got none here"
    for home in ("ray", "processes"):
        refuses(downpour, job, f"{TRAIN} --shards-in {home} --shard-device gpu", line)


# --- run folders ----------------------------------------------------------------------------------


@pytest.fixture
def earlier(job: Path) -> Path:
    """The folder of a run of two workers on two shards, with a snapshot of its start."""
    settings = TrainSettings(
        solver=job / "solver.prototxt", data=job / "data", out=job / "run", shards=2
    )
    model = CaffeModel(read_solver(settings.solver).train)
    specs = shard_specs(model.table, shards=2, workers=2)
    with (
        RunFolder.create(settings.out, settings.plain()) as folder,
        local_shards(specs, model.initial(1)) as cluster,
        Console(cluster) as console,
    ):
        save_snapshot(
            folder.snapshots / "7",
            console.export(),
            table=cluster.table,
            shard_map=cluster.map,
            rule="sgd",
            workers=2,
        )
        return folder.path


def test_resume_goes_on_with_the_settings_of_then(
    downpour: Run, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given now replaces what was told then, and only that; a new bound is no misfit. With
    a number it is a new run, in a folder of its own, with snapshots of its own."""
    told: list[tuple[TrainSettings, Origin | None]] = []

    def run(settings: TrainSettings, *, origin: Origin | None) -> None:
        told.append((settings, origin))

    monkeypatch.setattr(training, "run", run)
    status, out, _ = downpour("train", "--resume", "run", "--max-iter", 9, "--staleness", "inf")
    then = TrainSettings.load(earlier / "settings.json")
    shelf = str(earlier / "snapshots")
    assert told.pop() == (
        replace(then, max_iter=9, staleness=None),
        Origin(shelf, None, earlier),
    )
    assert (status, out) == (130, f"stopped; go on with: downpour train --resume {earlier}\n")
    for origin in ("run@7", "run/snapshots/7", f"file://{earlier}@7"):
        downpour("train", "--resume", origin, "--out", "new")
        new = replace(then, out=earlier.parent / "new")
        assert told.pop() == (new, Origin(shelf, "7", earlier))
    options = ("--solver", then.solver, "--data", then.data, "--out", "new", "--shards", 2)
    downpour("train", "--resume", "s3://bucket/run@40", *options)
    new = replace(then, out=earlier.parent / "new")
    assert told.pop() == (new, Origin("s3://bucket/run", "40"))


MISFITS = [
    ("--workers 3", r"resume \S*run/snapshots/7: it was made with workers 2, got 3"),
    ("--out other", r"train: expected --out or --resume, got both; a new run: --resume RUN@NUMBER"),
    ("--snapshots s", r"train: expected --snapshots or --resume, got both"),
    ("--weights w", r"train: expected --weights or --resume, got both"),
    ("--seed 1 --lease-s 0", r"--lease-s: expected more than 0 s"),
]


@pytest.mark.parametrize(("option", "line"), MISFITS, ids=[option for option, _ in MISFITS])
def test_resume_of_what_does_not_fit(
    option: str, line: str, downpour: Run, job: Path, earlier: Path
) -> None:
    """A snapshot goes on only as the job that it was made by; refusing leaves the run as it was."""
    refuses(downpour, job, f"train --resume run {option}", line)


def test_resume_with_another_rule(downpour: Run, job: Path, earlier: Path) -> None:
    """A solver that was edited in between is noticed where it matters."""
    swap(job / "solver.prototxt", "base_lr: 0.1", "base_lr: 0.1 momentum: 0.9")
    line = r"resume \S*run/snapshots/7: it was made with rule sgd, got momentum"
    refuses(downpour, job, "train --resume run", line)


def test_resume_of_a_damaged_snapshot(downpour: Run, job: Path, earlier: Path) -> None:
    """A file that lost its end is named."""
    path = earlier / "snapshots/7/shard-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    line = (
        r"snapshot \S*run/snapshots/7/shard-1\.safetensors: expected \d+ bytes, got \d+;"
        r" no other snapshot in \S*run/snapshots is whole"
    )
    refuses(downpour, job, "train --resume run", line)


def test_resume_of_nothing(downpour: Run, job: Path) -> None:
    """A folder that holds no run, and a run that has no snapshot yet."""
    line = r"data: expected a run folder or a place with snapshots, got none there"
    refuses(downpour, job, "train --resume data", line)
    settings = TrainSettings(solver=job / "solver.prototxt", data=job / "data", out=job / "run")
    RunFolder.create(settings.out, settings.plain()).close()
    refuses(downpour, job, "train --resume run", r"no snapshot in \S*run/snapshots")


def test_resume_in_a_folder_in_use(downpour: Run, job: Path, earlier: Path) -> None:
    """Two runs never share a folder."""
    then = TrainSettings.load(earlier / "settings.json")
    with RunFolder.resume(earlier, then.plain()):
        line = r"run folder \S*run: expected one that nobody writes, another run does"
        refuses(downpour, job, "train --resume run", line)


def test_an_out_that_holds_a_run(downpour: Run, job: Path, earlier: Path) -> None:
    """Results are never overwritten."""
    line = r"run folder \S*run: expected a new folder, got one that holds a run; .*--resume \S*run"
    refuses(downpour, job, TRAIN, line)


def test_an_out_that_is_not_ours(downpour: Run, job: Path) -> None:
    """Neither are files of no run."""
    line = r"run folder \S*data: expected a new folder, got one with t"
    refuses(downpour, job, TRAIN.replace("--out run", "--out data"), line)
    line = r"run folder \S*net\.prototxt: File exists"
    refuses(downpour, job, TRAIN.replace("--out run", "--out net.prototxt"), line)


def test_ctrl_c_before_the_first_step(
    downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to go on from, and the same command may be given again."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_start", interrupted)
    for _ in range(2):
        assert downpour(*TRAIN.split()) == (130, "", "stopped\n")
        assert {path.name for path in (job / "run").iterdir()} == {"settings.json", ".lock"}


# --- test and features ----------------------------------------------------------------------------


@pytest.fixture
def trained(job: Path) -> Path:
    """Weights for tiny's net, as it starts."""
    model = CaffeModel(read_solver(job / "solver.prototxt").train)
    write_safetensors(job / "w.safetensors", model.table, model.initial(1))
    return job


TEST = "test --solver solver.prototxt --weights w.safetensors --data data"
FEATURES = "features --net net.prototxt --weights w.safetensors --data data --output o --blobs ip1"


def test_test_prints_loss_and_accuracy(downpour: Run, trained: Path) -> None:
    """The figures are of the test part: those of a file with the same rows, undivided."""
    status, out, _ = downpour(*TEST.split())
    assert status == 0
    assert re.fullmatch(r"accuracy \S+  loss \S+\n", out)
    (trained / "rows.parquet").write_bytes((trained / "data/test.parquet").read_bytes())
    assert downpour(*TEST.replace("--data data", "--data rows.parquet").split())[1] == out
    (trained / "data/test.parquet").unlink()
    assert downpour(*TEST.split())[1] != out, "without a test part all rows are taken"


@pytest.mark.parametrize(
    ("options", "rows"),
    [("", 50), ("--split test", 50), ("--split train", 200), ("--data data/train.parquet", 200)],
)
def test_features_of_a_part(options: str, rows: int, downpour: Run, trained: Path) -> None:
    """A row each of the part that is asked for; all rows of data that is not divided."""
    status, out, _ = downpour(*f"{FEATURES},ip2 {options} --batch-size 32".split())
    assert (status, out) == (0, f"{rows} rows of ip1, ip2 in o/features.parquet\n")
    table = pq.read_table(trained / "o/features.parquet")
    assert table.column_names == ["SampleID", "ip1", "ip2", "label"]
    assert table["SampleID"].to_pylist() == list(range(rows))
    assert {len(row) for row in table["ip1"].to_pylist()} == {16}


def test_idx_is_tested_on_its_test_files(downpour: Run, trained: Path) -> None:
    """MNIST's t10k files, and nothing else of a folder of IDX files."""
    write_idx(trained / "data")
    (trained / "data/train-images-idx3-ubyte.gz").unlink()
    status, out, _ = downpour(*TEST.split())
    assert status == 0
    assert out.startswith("accuracy ")


REFUSED = [
    (f"{TEST} --weights net.prototxt", r"net\.prototxt: expected a \.caffemodel, got "),
    (f"{TEST} --data nowhere", r"data nowhere: expected a folder or a Parquet file"),
    (f"{FEATURES} --blobs ip1,ip3", r"net\.prototxt: expected blobs among data, .*; got ip3"),
    (f"{FEATURES} --blobs ,", r"--blobs: expected names of blobs, got none"),
    (f"{FEATURES} --blobs loss", r"blob loss: expected a value a row, got shape \(\)"),
    (f"{FEATURES} --output data", r"--output data: expected a folder to make, got one that exists"),
    (f"{FEATURES} --output net.prototxt/o", r"--output net\.prototxt/o: Not a directory"),
    (f"{FEATURES} --split half", r"--split: expected train or test, got half"),
    (f"{FEATURES} --split test --data data/test.parquet", r"test\.parquet: expected a .* test "),
    (f"{TEST} --device gpu", r"device gpu:0: expected a GPU that answers, and CuPy .*; got none"),
    (f"{FEATURES} --device gpus", r"device: expected auto, cpu, gpu or gpu:N, got 'gpus'"),
    (f"{FEATURES} --batch-size 0", r"--batch-size: expected at least 1, got 0"),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSED, ids=[line[:30] for _, line in REFUSED])
@pytest.mark.usefixtures("no_gpu")
def test_wrong_inference(arguments: str, line: str, downpour: Run, trained: Path) -> None:
    """One line, exit 1, and no output folder."""
    refuses(downpour, trained, arguments, line)


def test_weights_that_lack_a_layer(downpour: Run, trained: Path) -> None:
    """Blobs need the layers before them, and no others."""
    file = trained / "w.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if not name.startswith("ip2")}, file)
    line = r"w\.safetensors: expected weights of layer ip2, got a file without"
    refuses(downpour, trained, TEST, line)
    refuses(downpour, trained, f"{FEATURES},ip2", line)
    assert downpour(*FEATURES.split())[0] == 0


def test_labels_that_no_class_has(downpour: Run, trained: Path) -> None:
    """Told when testing, too, though the data is opened before the net."""
    pq.write_table(
        tiny.image_table(30).set_column(0, "label", pa.array([5] * 30)),
        trained / "data/test.parquet",
    )
    line = (
        r"net\.prototxt: layer accuracy \(Accuracy\): label: expected whole labels in \[0, 3\), got"
    )
    refuses(downpour, trained, TEST, line)


def test_a_solver_without_a_test_net(downpour: Run, trained: Path) -> None:
    """There is nothing to measure with."""
    swap(trained / "solver.prototxt", "test_iter: 7", "")
    line = r"solver\.prototxt: expected a test_iter, which says that it has a test net; got none"
    refuses(downpour, trained, TEST, line)


@pytest.mark.parametrize("arguments", ["train --workers two", "test", "trane", "features --nett x"])
def test_wrong_usage(arguments: str, downpour: Run) -> None:
    """What is no option or no number of the right kind is Typer's to say, with status 2."""
    status, out, err = downpour(*arguments.split())
    assert (status, out) == (2, "")
    assert "Usage: downpour" in err


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))

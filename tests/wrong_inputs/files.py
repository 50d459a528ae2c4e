"""Damaged files of each kind that is read: missing, a folder, a pipe, empty, cut, other content."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ps
from deploy.run.settings import TrainSettings
from ps.client import Client
from ps.security.keys import load_or_create_keys
from ps.snapshots.manifest import load_snapshot, save_snapshot
from ps.snapshots.worker_state import load_state
from ps.whole_files import write_private
from tests.support import tiny_job
from tests.wrong_inputs.rows import Row
from tests.wrong_inputs.sdk import Env
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import read_weights
from worker.data.sources import open_source

_GARBAGE = np.random.default_rng(1).bytes(4096)
_PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
_NESTED = b"[" * 300
_PIPE = b"a pipe"
_TEXT = b"not what you think\n\n" * 3


class Format(NamedTuple):
    """A kind of file: `read` is to name `path`, or what `names` says, when it is damaged."""

    name: str
    path: Path
    read: Callable[[], object]
    names: str = ""
    missing: bool = True  # whether one that is not there is an error
    fine: tuple[str, ...] = ()  # damages that leave a good file


def rows(env: Env) -> Iterator[Row]:
    """Every damage to every kind of file, each undone before the next."""
    for one in formats(env):
        good = one.path.read_bytes()
        contents = {
            "empty": b"",
            "half": good[: len(good) // 2],
            "garbage": _GARBAGE,
            "a picture": _PNG,
            "other text": _TEXT,
            "zeros": bytes(40),
            "brackets": _NESTED,
        }
        for damage, content in contents.items():
            if damage in one.fine:
                continue
            yield Row("file", f"{one.name}: {damage}", _with(one, content), _names(one))
        if one.missing:
            yield Row("file", f"{one.name}: missing", _with(one, None), _names(one))
        yield Row("file", f"{one.name}: a folder", _with(one, one.path), _names(one))
        yield Row("file", f"{one.name}: a pipe", _with(one, _PIPE), _names(one))


def _names(one: Format) -> str:
    return one.names or one.path.name.replace(".", r"\.")


def _with(one: Format, content: bytes | Path | None) -> Callable[[], object]:
    """Read the file with other content: these bytes, a folder or a pipe, or nothing there."""

    def act() -> object:
        good, mode = one.path.read_bytes(), one.path.stat().st_mode & 0o777
        one.path.unlink()
        try:
            if isinstance(content, Path):
                one.path.mkdir()
            elif content is _PIPE:
                os.mkfifo(one.path)
            elif content is not None:
                write_private(one.path, content)
            return one.read()
        finally:
            if one.path.is_dir():
                one.path.rmdir()
            one.path.unlink(missing_ok=True)
            one.path.write_bytes(good)
            one.path.chmod(mode)

    return act


def formats(env: Env) -> list[Format]:
    """A good file of every kind, and what reads it."""
    folder = env.folder / "files"
    folder.mkdir()
    return [*_job(folder / "job"), *_images(folder / "idx"), *_state(folder / "state", env)]


def _job(folder: Path) -> list[Format]:
    folder.mkdir()
    solver = tiny_job.write_job(folder)
    model = CaffeModel(read_solver(solver).train)
    initial = model.initial(1)
    names = ("w.caffemodel", "w.h5", "w.safetensors")
    for name in names:
        write_weights(folder / name, model.net, initial)
    settings = folder / "settings.json"
    settings.write_bytes(b'{"solver": "solver.prototxt", "data": "data", "workers": 2}')

    def weights(name: str) -> Callable[[], object]:
        return lambda: read_weights(folder / name, model.net, model.initial(1))

    return [
        Format("solver", solver, lambda: read_solver(solver)),
        Format(
            "net",
            folder / "net.prototxt",
            lambda: CaffeModel(read_solver(solver).train),
            fine=("empty",),  # a net without layers; that it cannot train is found later
        ),
        *(Format(name[2:], folder / name, weights(name)) for name in names),
        Format("settings", settings, lambda: TrainSettings.load(settings)),
        Format(
            "Parquet",
            folder / "data" / "train.parquet",
            lambda: _read(folder / "data" / "train.parquet"),
        ),
    ]


def _images(folder: Path) -> list[Format]:
    """MNIST's four files, raw: ten images of 8x8."""
    folder.mkdir()
    for part in ("train", "t10k"):
        header = np.array([2051, 10, 8, 8], ">u4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + bytes(640))
        header = np.array([2049, 10], ">u4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(10))
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    return [
        Format("IDX images", images, lambda: _read(folder)),
        Format("IDX labels", labels, lambda: _read(folder)),
    ]


def _state(folder: Path, env: Env) -> list[Format]:
    folder.mkdir()
    cluster, residual = folder / "cluster.json", folder / "residual"
    env.cluster.save(cluster)
    env.compressed.save(residual)
    snapshot = folder / "snapshots" / "1"
    save_snapshot(
        snapshot,
        env.console.export(),
        layout=env.cluster.layout,
        shard_map=env.cluster.map,
        rules=("sgd",),
        workers=1,
    )
    load_or_create_keys(folder)
    parts = sorted(path for path in snapshot.iterdir() if path.name != "manifest.json")
    return [
        Format("cluster file", cluster, lambda: ps.Cluster.load(cluster)),
        Format("client's cluster", cluster, lambda: Client(cluster, worker="w")),
        Format("residual", residual, lambda: load_state(residual)),
        Format("restored residual", residual, lambda: env.compressed.restore(residual)),
        Format("manifest", snapshot / "manifest.json", lambda: load_snapshot(snapshot), "1"),
        Format("snapshot's part", parts[0], lambda: load_snapshot(snapshot)),
        Format("shard's key", folder / "key", lambda: load_or_create_keys(folder), missing=False),
    ]


def _read(path: Path) -> int:
    return sum(len(batch) for batch in open_source(path, "train").batches())

"""`downpour convert`: weights, solver states and nets from one format into another."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli_in_process import Run
from tests.support.cli_refusals import refuses
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.solver import read_solver
from worker.caffe.solver_state import SolverState, read_solver_state, write_solver_state
from worker.caffe.text import parse_net
from worker.caffe.weight_files import read_blobs, read_caffemodel, write_weights
from worker.caffe.weights import read_weights


@pytest.fixture
def model(job: Path) -> CaffeModel:
    """The tiny job's model; its weights are in w.caffemodel."""
    model = CaffeModel(read_solver(job / "solver.prototxt").train)
    write_weights(job / "w.caffemodel", model.net, model.initial(3))
    return model


def test_weights_survive_every_format(downpour: Run, model: CaffeModel) -> None:
    """From each format into the next and back to the first: the same floats, listed by name."""
    path = [f"w.{end}" for end in ("caffemodel", "h5", "safetensors")]
    for source, target in (*pairwise(path), (path[2], "back.caffemodel")):
        status, out, err = downpour("convert", source, target)
        assert (status, err) == (0, "")
        assert out.splitlines()[0] == "conv/0  4 x 1 x 3 x 3"
        parts, numbers = len(model.table.tensors), model.table.parameters
        assert (
            out.splitlines()[-1] == f"{target}: {parts} entries, {numbers:,} numbers from {source}"
        )
    arena, _ = read_weights(Path("back.caffemodel"), model.net, model.table.empty())
    np.testing.assert_array_equal(arena, model.initial(3))
    assert [layer.type for layer in read_caffemodel(Path("back.caffemodel")).layer] == [""] * 3


def test_a_caffemodel_with_its_layers(downpour: Run, model: CaffeModel, job: Path) -> None:
    """With a net the file has all layers; with another net's weights nothing is written."""
    downpour("convert", "w.caffemodel", "w.safetensors")
    status, out, _ = downpour("convert", "w.safetensors", "n.caffemodel", "--net", "net.prototxt")
    assert status == 0
    assert "copied conv, ip1, ip2; left at their fillers: none; not used: none" in out
    types = [layer.type for layer in read_caffemodel(job / "n.caffemodel").layer]
    assert types == [node.layer.spec.type for node in model.net.nodes]
    text = (job / "net.prototxt").read_text()
    (job / "other.prototxt").write_text(text.replace('"ip2"', '"fc8"'))
    refuses(
        downpour,
        job,
        "convert w.safetensors o.caffemodel --net other.prototxt",
        "w.safetensors: expected weights of layer fc8, got a file without",
    )


def test_solver_states(downpour: Run, job: Path) -> None:
    """Both formats hold the same."""
    history = (np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32))
    write_solver_state(job / "s.solverstate", SolverState(7, history, "w.caffemodel", 1))
    status, out, _ = downpour("convert", "s.solverstate", "s.solverstate.h5")
    assert status == 0
    assert out.splitlines()[:3] == ["iter          7", "current_step  1", "history/0     2 x 3"]
    downpour("convert", "s.solverstate.h5", "back.solverstate")
    back = read_solver_state(job / "back.solverstate")
    assert (back.iteration, back.current_step, back.learned_net) == (7, 1, "w.caffemodel")
    for one, other in zip(back.history, history, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (job / "back.solverstate").read_bytes() == (job / "s.solverstate").read_bytes()


OLD = """
name: "old" input: "data" input_dim: [2, 1, 4, 4]
layers { bottom: "data" top: "pad" layer { name: "pad" type: "padding" pad: 1 } }
layers { bottom: "pad" top: "c" layer { name: "c" type: "conv" num_output: 3 kernelsize: 3 } }
"""


@pytest.mark.usefixtures("model")
def test_a_net_whose_source_states_the_shape(downpour: Run, job: Path) -> None:
    """The images that a data layer names say how large they are; a source that is not there is
    named with its layer."""
    text = (job / "net.prototxt").read_text()
    sizes = "channels: 1 height: 8 width: 8"
    assert sizes in text
    named = text.replace(sizes, 'source: "data/train.parquet"')
    (job / "net.prototxt").write_text(named)
    line = "convert w.caffemodel o.h5 --net net.prototxt"
    assert downpour(*line.split())[0] == 0
    (job / "net.prototxt").write_text(named.replace("train.parquet", "nowhere"))
    line = line.replace("o.h5", "p.h5")
    refuses(downpour, job, line, r"net\.prototxt: layer rows: data \S*nowhere: expected a folder")


def test_older_nets(downpour: Run, job: Path) -> None:
    """A net of version 0, with a padding layer, and its weights, become present ones."""
    (job / "old.prototxt").write_text(OLD)
    status, out, _ = downpour("convert", "old.prototxt", "new.prototxt")
    assert (status, out.splitlines()[:2]) == (0, ["data  Input", "c     Convolution"])
    text = (job / "new.prototxt").read_text()
    assert not parse_net(text).layers
    model = CaffeModel(Description(text))
    assert model.net.blobs["c"] == (2, 3, 4, 4)
    old = parse_net(OLD)
    entry = old.layers[1].layer
    entry.blobs.add(num=3, channels=1, height=3, width=3, data=range(27))
    entry.blobs.add(num=1, channels=1, height=1, width=3, data=range(3))
    (job / "old.caffemodel").write_bytes(old.SerializeToString())
    assert downpour("convert", "old.caffemodel", "new.caffemodel")[0] == 0
    new = read_caffemodel(job / "new.caffemodel")
    assert [layer.type for layer in new.layer] == ["Input", "Convolution"]
    assert read_blobs(job / "new.caffemodel")["c/0"].ravel().tolist() == list(range(27))


def test_a_file_is_replaced_on_purpose_only(downpour: Run, model: CaffeModel, job: Path) -> None:
    """With --force the target may exist: a file may even be converted in place."""
    line = "w.h5: expected the name of a new file, got one that exists; replace it with --force"
    (job / "w.h5").write_text("of value")
    refuses(downpour, job, "convert w.caffemodel w.h5", line)
    assert downpour("convert", "w.caffemodel", "w.h5", "--force")[0] == 0
    assert len(read_blobs(job / "w.h5")) == len(model.table.tensors)
    before = (job / "net.prototxt").read_text()
    assert downpour("convert", "net.prototxt", "net.prototxt", "--force")[0] == 0
    assert parse_net(before, "net") == parse_net((job / "net.prototxt").read_text(), "net")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("w.caffemodel w.pt", r"w\.pt: expected weights \(.*or nets \(\.prototxt\), got '\.pt'"),
        ("w.caffemodel s.solverstate", "s.solverstate: expected weights as in w.caffemodel, got a"),
        ("none.h5 n.caffemodel", r"none\.h5: cannot be read: No such file or directory"),
        ("net.prototxt n.prototxt --net net.prototxt", "--net net.prototxt: expected weights to"),
        ("w.caffemodel w.caffemodel", r"w\.caffemodel: expected the name of a new file, got one"),
    ],
)
def test_what_cannot_be_converted(
    downpour: Run, model: CaffeModel, job: Path, arguments: str, line: str
) -> None:
    """One line names the file, and nothing is written."""
    refuses(downpour, job, f"convert {arguments}", line)

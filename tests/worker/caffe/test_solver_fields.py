"""Every field of a solver file has an effect, is refused, or is named in a notice."""

from pathlib import Path

import pytest

from shards.errors import BadInput
from tests.support.doc_pages import read as read_page
from tests.support.doc_pages import rows, section
from tests.support.small_nets import SMALL
from worker.caffe.caffe_pb2 import SolverParameter
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.caffe.solver_fields import HONOURED, NOTED
from worker.caffe.weights import starting_weights

FIELDS = [field.name for field in SolverParameter.DESCRIPTOR.fields]
NET = 'net: "net.prototxt" '
RATE = "base_lr: 0.1 max_iter: 10 "
INLINE = f"{{ {SMALL} }}"
STEP = 'lr_policy: "step" gamma: 0.1 stepsize: 3 '

# For each honoured field two solvers that differ in it alone.
PAIRS = {
    "net": (NET + RATE, 'net: "other.prototxt" ' + RATE),
    "net_param": (NET + RATE, f"net_param {INLINE}" + RATE),
    "train_net": (NET + RATE, 'train_net: "other.prototxt" ' + RATE),
    "train_net_param": (NET + RATE, f"train_net_param {INLINE}" + RATE),
    "test_net": (
        NET + RATE + "test_iter: 1",
        NET + RATE + 'test_net: "other.prototxt" test_iter: 1',
    ),
    "test_net_param": (
        NET + RATE + "test_iter: 1",
        NET + RATE + f"test_net_param {INLINE} test_iter: 1",
    ),
    "train_state": (NET + RATE, NET + RATE + "train_state { level: 1 }"),
    "test_state": (
        NET + RATE + "test_iter: 1",
        NET + RATE + "test_iter: 1 test_state { level: 1 }",
    ),
    "lr_policy": (NET + RATE, NET + RATE + 'lr_policy: "poly"'),
    "gamma": (NET + RATE + STEP, NET + RATE + STEP.replace("0.1", "0.2")),
    "stepsize": (NET + RATE + STEP, NET + RATE + STEP.replace("3", "4")),
    "power": (NET + RATE + 'lr_policy: "poly"', NET + RATE + 'lr_policy: "poly" power: 2'),
    "stepvalue": (
        NET + RATE + 'lr_policy: "multistep"',
        NET + RATE + 'lr_policy: "multistep" stepvalue: 3',
    ),
    "momentum2": (NET + RATE + 'type: "Adam"', NET + RATE + 'type: "Adam" momentum2: 0.9'),
    "rms_decay": (NET + RATE + 'type: "RMSProp"', NET + RATE + 'type: "RMSProp" rms_decay: 0.9'),
    "delta": (NET + RATE + 'type: "Adam"', NET + RATE + 'type: "Adam" delta: 0.9'),
    "base_lr": (NET + RATE, NET + RATE.replace("0.1", "0.2")),
    "max_iter": (NET + RATE, NET + RATE.replace("10", "20")),
} | {
    field: (NET + RATE + extra, NET + RATE + extra + f" {field}: {value}")
    for field, extra, value in (
        ("test_iter", "", "3"),
        ("test_interval", "test_iter: 1", "5"),
        ("test_initialization", "", "false"),
        ("iter_size", "", "2"),
        ("type", "", '"Nesterov"'),
        ("solver_type", "", "NESTEROV"),
        ("momentum", "", "0.9"),
        ("weight_decay", "", "0.1"),
        ("regularization_type", "", '"L1"'),
        ("clip_gradients", "", "2"),
        ("weights", "", '"w.caffemodel"'),
        ("random_seed", "", "7"),
        ("display", "", "7"),
        ("average_loss", "", "7"),
        ("snapshot", "", "7"),
        ("snapshot_after_train", "", "false"),
        ("solver_mode", "", "CPU"),
    )
}
SET = {
    "snapshot_prefix": '"lenet"',
    "device_id": "1",
    "test_compute_loss": "true",
    "debug_info": "true",
    "layer_wise_reduce": "false",
    "snapshot_format": "HDF5",
    "snapshot_diff": "true",
}


def read(tmp_path: Path, text: str) -> Solver:
    (tmp_path / "net.prototxt").write_text(SMALL)
    (tmp_path / "other.prototxt").write_text(SMALL)
    (tmp_path / "w.caffemodel").write_bytes(b"")
    (tmp_path / "solver.prototxt").write_text(text)
    return read_solver(tmp_path / "solver.prototxt")


def test_each_field_is_in_exactly_one_table() -> None:
    """A field that is added to the protobuf message cannot be ignored in silence."""
    assert sorted([*HONOURED, *NOTED]) == sorted(FIELDS)
    assert set(PAIRS) == set(HONOURED)
    assert set(SET) == set(NOTED)


@pytest.mark.parametrize("field", HONOURED)
def test_an_honoured_field_changes_the_solver(tmp_path: Path, field: str) -> None:
    """Two files that differ in it alone are two different solvers."""
    one, other = (read(tmp_path, text) for text in PAIRS[field])
    assert one != other
    assert one.notices == other.notices == ()


@pytest.mark.parametrize("field", NOTED)
def test_a_field_without_effect_is_named_in_a_notice(tmp_path: Path, field: str) -> None:
    """The solver is the same, and one line says which field has no effect, and why."""
    plain, noted = (read(tmp_path, NET + RATE + text) for text in ("", f"{field}: {SET[field]}"))
    (notice,) = noted.notices
    assert notice.startswith(f"{tmp_path}/solver.prototxt: {field} has no effect: ")
    assert (noted.rule, noted.schedule, noted.train) == (plain.rule, plain.schedule, plain.train)


def test_tests_of_no_net_are_named_in_a_notice(tmp_path: Path) -> None:
    """An interval for tests needs a net to test."""
    (notice,) = read(tmp_path, NET + RATE + "test_interval: 5").notices
    assert "test_interval has no effect: there is no test net" in notice
    (notice,) = read(tmp_path, NET + RATE + "test_interval: 5 test_iter: 0").notices
    assert "test_interval has no effect: every test_iter is 0" in notice


def test_several_files_of_weights(tmp_path: Path) -> None:
    """Weight files are found next to the solver, in order, one an entry or separated by commas."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"")
    text = 'weights: "a, b" weights: "w.caffemodel"'
    expected = tuple(str(tmp_path / name) for name in ("a", "b", "w.caffemodel"))
    assert read(tmp_path, NET + RATE + text).weights == expected
    gone = read(tmp_path, NET + RATE + 'weights: "nowhere.caffemodel"')
    with pytest.raises(BadInput, match=f"{tmp_path}/nowhere.caffemodel: cannot be read: No such"):
        starting_weights(CaffeModel(gone.train), gone.weights, 1)


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("base_lr", "0", "more than 0"),
        ("base_lr", "-1", "more than 0"),
        ("base_lr", "nan", "a finite number"),
        ("test_interval", "-1", "at least 0"),
        ("display", "-1", "at least 0"),
        ("snapshot", "-1", "at least 0"),
        ("average_loss", "0", "at least 1"),
        ("test_iter", "-1", "at least 0"),
    ],
)
def test_numbers_that_would_do_nothing(tmp_path: Path, field: str, value: str, least: str) -> None:
    """The line has the field's name, the expected minimum, and the actual value."""
    rest = NET + "max_iter: 10 " + ("" if field == "base_lr" else "base_lr: 0.1 ")
    with pytest.raises(BadInput, match=f"{field}: expected {least}, got {value}"):
        read(tmp_path, f"{rest} {field}: {value}")


@pytest.mark.parametrize(
    ("heading", "table"),
    [("Honoured", HONOURED), ("Without effect", NOTED)],
)
def test_the_page_shows_the_tables(heading: str, table: dict[str, str]) -> None:
    """A row for each field, in the order and the words of the code."""
    told = rows(section(read_page("docs/reference/solver.md"), f"## {heading}"))
    assert told == [[f"`{field}`", meaning] for field, meaning in table.items()]

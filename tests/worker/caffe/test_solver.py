"""A solver file becomes the shards' rule and schedule, and names its nets."""

from pathlib import Path

import msgspec
import pytest

from shards import rules, schedules
from shards.errors import BadInput
from shards.rules import Decay, DecayKind
from tests.support.small_nets import SMALL
from worker.caffe.evaluator import Evaluator, needs_test_net
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.phases import Phase
from worker.caffe.solver import Solver, read_solver
from worker.job.options import TrainOptions

BASE = 'net: "net.prototxt" base_lr: 0.1 max_iter: 10 '


def read(tmp_path: Path, text: str) -> Solver:
    (tmp_path / "net.prototxt").write_text(SMALL)
    (tmp_path / "solver.prototxt").write_text(text)
    return read_solver(tmp_path / "solver.prototxt")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", rules.SGD()),
        ("momentum: 0.9", rules.Momentum(0.9)),
        ('type: "Nesterov" momentum: 0.9', rules.Nesterov(0.9)),
        ('type: "AdaGrad" delta: 1e-6', rules.Adagrad(1e-6)),
        ('type: "AdaGrad"', rules.Adagrad(1e-8)),
        ('type: "RMSProp" rms_decay: 0.98', rules.RMSProp(0.98, 1e-8)),
        ('type: "AdaDelta" momentum: 0.95 delta: 1e-6', rules.AdaDelta(0.95, 1e-6)),
        ('type: "Adam" momentum: 0.9', rules.Adam(0.9, 0.999, 1e-8)),
        ("solver_type: ADAGRAD", rules.Adagrad(1e-8)),
        ('type: "SGD" solver_type: ADAGRAD', rules.SGD()),
    ],
)
def test_a_type_becomes_a_rule(tmp_path: Path, text: str, rule: rules.Rule) -> None:
    """With Caffe's defaults; the older solver_type counts where type is not set."""
    assert read(tmp_path, BASE + text).rule == rule


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("", schedules.Fixed(base_rate=0.1)),
        ('lr_policy: "fixed"', schedules.Fixed(base_rate=0.1)),
        (
            'lr_policy: "step" gamma: 0.5 stepsize: 3',
            schedules.Step(base_rate=0.1, gamma=0.5, step_size=3),
        ),
        ('lr_policy: "exp" gamma: 0.9', schedules.Exp(base_rate=0.1, gamma=0.9)),
        (
            'lr_policy: "inv" gamma: 0.0001 power: 0.75',
            schedules.Inv(base_rate=0.1, gamma=0.0001, power=0.75),
        ),
        (
            'lr_policy: "multistep" gamma: 0.1 stepvalue: 4 stepvalue: 7',
            schedules.MultiStep(base_rate=0.1, gamma=0.1, steps=(4, 7)),
        ),
        ('lr_policy: "poly" power: 2', schedules.Poly(base_rate=0.1, power=2, max_iteration=10)),
        (
            'lr_policy: "sigmoid" gamma: -0.5 stepsize: 3',
            schedules.Sigmoid(base_rate=0.1, gamma=-0.5, step_size=3),
        ),
    ],
)
def test_a_policy_becomes_a_schedule(
    tmp_path: Path, text: str, schedule: schedules.Schedule
) -> None:
    """All seven, with floats as they are written."""
    assert read(tmp_path, BASE + text).schedule == schedule


def test_everything_else_is_carried(tmp_path: Path) -> None:
    """Decay, clipping, accumulation, and when to test, show and save."""
    solver = read(
        tmp_path,
        BASE
        + """weight_decay: 0.0005 regularization_type: "L1" clip_gradients: 35 iter_size: 2
        test_iter: 100 test_interval: 500 test_initialization: false display: 20 average_loss: 5
        snapshot: 50 snapshot_after_train: false random_seed: 7 solver_mode: CPU""",
    )
    assert solver.decay == Decay(0.0005, DecayKind.L1)
    assert (solver.clip_gradients, solver.iter_size, solver.max_iter) == (35, 2, 10)
    assert (solver.test_interval, solver.test_initialization) == (500, False)
    assert (solver.display, solver.average_loss) == (20, 5)
    assert (solver.snapshot, solver.snapshot_after_train) == (50, False)
    assert (solver.random_seed, solver.device) == (7, "cpu")
    assert (solver.seed(None), solver.seed(3)) == (7, 3)
    plain = read(tmp_path, BASE)
    assert plain.clip_gradients is None
    assert (plain.random_seed, plain.seed(None), plain.device) == (None, 1, "auto")
    assert plain.average_loss is None
    assert plain.notices == ()


def test_a_solver_and_its_nets_travel_as_plain_values(tmp_path: Path) -> None:
    """Through MessagePack and back, and the net is built from what arrived."""
    solver = read(tmp_path, BASE + "momentum: 0.9 test_iter: 3")
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(solver), type=Solver)
    assert back == solver
    table = CaffeModel(solver.train).table
    assert CaffeModel(back.train).table == CaffeModel(back.tests[0].net).table == table


def test_one_net_serves_training_and_each_test(tmp_path: Path) -> None:
    """`net` with a test_iter and a test_state a test net."""
    solver = read(
        tmp_path,
        BASE + 'test_iter: 3 test_iter: 5 test_state { stage: "a" } test_state { level: 2 }',
    )
    assert (solver.train.phase, solver.train.stages) == (Phase.TRAIN, ())
    assert [test.iterations for test in solver.tests] == [3, 5]
    assert [test.net.phase for test in solver.tests] == [Phase.TEST, Phase.TEST]
    assert [(test.net.stages, test.net.level) for test in solver.tests] == [(("a",), 0), ((), 2)]


def test_nets_may_be_apart_or_inline(tmp_path: Path) -> None:
    """train_net and test_net name files; train_net_param holds the net itself."""
    apart = 'train_net: "net.prototxt" test_net: "net.prototxt" test_iter: 2 base_lr: 1 max_iter: 1'
    assert read(tmp_path, apart).tests[0].net.file == str(tmp_path / "net.prototxt")
    inline = f"train_net_param {{ {SMALL} }} base_lr: 1 max_iter: 1"
    solver = read(tmp_path, inline)
    assert CaffeModel(solver.train).table == CaffeModel(read(tmp_path, BASE).train).table


def test_a_net_is_found_next_to_the_solver_or_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A net is found next to the solver, else where Caffe looks; else both places are named."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(there)
    path = here / "solver.prototxt"
    path.write_text(BASE)
    with pytest.raises(
        BadInput, match=r"net: expected a file, got net.prototxt, which is not in .*here or .*there"
    ):
        read_solver(path)
    (there / "net.prototxt").write_text(SMALL)
    assert read_solver(path).train.file == "net.prototxt"
    (here / "net.prototxt").write_text(SMALL)
    assert read_solver(path).train.file == str(here / "net.prototxt")


def test_a_test_iter_of_0_switches_its_net_off(tmp_path: Path) -> None:
    """No test of that net in a run; the others keep their numbers."""
    none = read(tmp_path, BASE + "test_iter: 0 test_interval: 1000000")
    assert none.active_tests == ()
    second = read(tmp_path, BASE + "test_iter: 0 test_iter: 2 test_interval: 0")
    assert [(test.number, test.iterations) for test in second.active_tests] == [(1, 2)]
    evaluator = Evaluator([(test, list) for test in second.active_tests], CaffeModel(second.train))
    assert evaluator.max_rows == 2 * CaffeModel(second.train).net.batch_size
    with pytest.raises(BadInput, match=r"data rows: expected .* got one with a test_iter of 0"):
        needs_test_net(none, "data", "rows")


@pytest.mark.parametrize("written", ["", "max_iter: 0", "max_iter: -1"])
def test_a_solver_without_max_iter_needs_one_to_train(tmp_path: Path, written: str) -> None:
    """Only there: a run that is given its steps, and a test, need none."""
    text = f'net: "net.prototxt" base_lr: 0.1 lr_policy: "poly" power: 1 {written}'
    solver = read(tmp_path, text)
    got = {"max_iter: -1": "-1"}.get(written, "0 or none")
    with pytest.raises(BadInput, match=f"solver.prototxt: max_iter: .*, got {got}; .*--max-iter"):
        caffe_job(solver, TrainOptions(), workers=1)
    job = caffe_job(solver, TrainOptions(max_iter=4), workers=1)
    assert job.plan.steps == 4
    assert job.schedule == job.plan.schedule
    assert [job.schedule.rate(step) for step in (0, 2, 4)] == pytest.approx([0.1, 0.05, 0])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (BASE + 'type: "LBFGS"', "solver type LBFGS is not supported; expected one of SGD,"),
        (BASE + 'type: "AdaGrad" momentum: 0.9', "AdaGrad has no momentum; expected 0, got 0.9"),
        (BASE + "momentum: 1.5", "momentum: expected"),
        (BASE + 'lr_policy: "warm"', "lr_policy warm is not supported; expected one of fixed,"),
        (BASE + 'lr_policy: "step" gamma: 0.1', "step: step_size: expected 1 or more, got 0"),
        (BASE + 'regularization_type: "L3"', "regularization_type: expected L1 or L2, got L3"),
        (BASE + "iter_size: 0", "iter_size: expected at least 1, got 0"),
        ('net: "net.prototxt" max_iter: 1', "expected a base_lr, got none"),
        ("base_lr: 1 max_iter: 1", "expected one training net .*, got none"),
        ("base_lr: 1 max_iter: 1 test_iter: 1", "expected one training net .*, got none"),
        (BASE + 'test_net: "gone" test_iter: 1', "test_net: expected a file, got gone, which"),
        (BASE + 'train_net: "net.prototxt"', "expected one training net .*, got net and train_net"),
        (BASE + 'test_net: "net.prototxt"', "a test_iter for each of 1 test nets, got 0"),
        (BASE + "test_state { } test_iter: 1 test_iter: 2", "a test_state for each of 2 test nets"),
        (
            f'net: "{"n" * 5000}" base_lr: 1 max_iter: 1',
            "net: expected a file, got n+.*, which is not in",
        ),
        (
            'net: "net.prototxt" max_iter: 1 base_lr: "fast"',
            "1: base_lr: expected a number, got .fast",
        ),
        (BASE + "momentun: 0.9", "no field momentun; expected one of .* of which momentum, "),
    ],
)
def test_a_solver_that_makes_no_sense_is_refused(tmp_path: Path, text: str, error: str) -> None:
    """One line names the file, the field, and the expected and actual values."""
    with pytest.raises(BadInput, match=error) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "solver.prototxt"))


def test_the_demos_solver_is_read() -> None:
    """LeNet with 431,080 parameters, batches of 64 and 100; one test is the whole test set."""
    solver = read_solver(Path(__file__).parents[3] / "deploy" / "demo" / "lenet_solver.prototxt")
    train, test = CaffeModel(solver.train), CaffeModel(solver.tests[0].net)
    assert train.table.parameters == 431_080
    assert train.table == test.table
    assert (train.net.batch_size, test.net.batch_size) == (64, 100)
    assert test.net.batch_size * solver.tests[0].iterations == 10_000

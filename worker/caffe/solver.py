"""A solver file as values: the update rule, its schedule, and when to test, show and save.

The shards do the rule's arithmetic; this file reads its settings as Caffe does, with Caffe's
defaults, and refuses what Caffe would refuse. A float in a solver file is a float32; it is read as
the shortest decimal that rounds to it, so that 0.01 stays 0.01 in every report.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from google.protobuf import text_format
from msgspec.structs import replace

from shards import argument_checks, rules, schedules
from shards.errors import BadInput, quote
from worker.caffe.blobs import beside
from worker.caffe.caffe_pb2 import TRAIN, NetParameter, NetState, SolverParameter
from worker.caffe.net import Description
from worker.caffe.net_data import with_files
from worker.caffe.phases import Phase
from worker.caffe.solver_fields import notices
from worker.caffe.text import parse_net, parse_solver, read_text
from worker.job.options import DEFAULT_SEED

DataShape = tuple[int, int, int]

_T = TypeVar("_T")


class TestNet(msgspec.Struct, frozen=True):
    """A net to measure with, and how many batches a measurement takes.

    With 0 `iterations` training does not test with it. `number` counts the solver's test nets.
    """

    __test__ = False  # pytest: this is no test

    net: Description
    iterations: int
    number: int = 0

    def with_data_shape(
        self, shape: DataShape | None, row_shapes: Mapping[str, tuple[int, ...]]
    ) -> "TestNet":
        """This for rows of other shapes than the net states, as in `Solver.with_data_shape`."""
        return replace(self, net=replace(self.net, data_shape=shape, row_shapes=dict(row_shapes)))


class Solver(msgspec.Struct, frozen=True):
    """Everything that a solver file says; `file` is its name.

    `clip_gradients` is the largest global L2 norm, or None. `iter_size` is the number of batches
    that are summed for one update. The intervals and `max_iter` count updates, and 0 means never;
    a file for tests alone needs no `max_iter`. `tests` are all test nets, `tested` those of a run.
    `average_loss` is the number of updates over which a displayed loss is averaged, None if the
    file does not set it. `weights` are the files to start from, and `device` is what the workers
    compute on (worker/training/device_selection.py). `notices` are one line for each field that is
    set and has no effect (solver_fields.py).
    """

    rule: rules.Rule
    schedule: schedules.Schedule
    decay: rules.Decay
    train: Description
    tests: tuple[TestNet, ...]
    max_iter: int
    iter_size: int = 1
    clip_gradients: float | None = None
    test_interval: int = 0
    test_initialization: bool = True
    display: int = 0
    average_loss: int | None = None
    snapshot: int = 0
    snapshot_after_train: bool = True
    random_seed: int | None = None
    weights: tuple[str, ...] = ()
    device: str = "auto"
    notices: tuple[str, ...] = ()
    file: str = "solver"

    @property
    def active_tests(self) -> tuple[TestNet, ...]:
        """The test nets that a run tests with: a test_iter of 0 leaves a net out."""
        return tuple(test for test in self.tests if test.iterations)

    def steps(self, option: int | None) -> int:
        """The steps of a run: `option`, else the file's max_iter; raises BadInput for none."""
        if option is not None:
            return option
        if self.max_iter < 1:
            got = self.max_iter or "0 or none"
            raise BadInput(
                f"{self.file}: max_iter",
                expected="at least 1",
                got=got,
                hint="write it there, or give it as --max-iter or max_iter=",
            )
        return self.max_iter

    def schedule_for(self, steps: int) -> schedules.Schedule:
        """The schedule of a run of `steps`: poly ends there if the file has no max_iter."""
        if isinstance(self.schedule, schedules.Poly) and self.max_iter < 1:
            return replace(self.schedule, max_iteration=steps)
        return self.schedule

    def seed(self, option: int | None) -> int:
        """The seed of a run: `option`, else the file's, else `DEFAULT_SEED`."""
        if option is not None:
            return option
        return DEFAULT_SEED if self.random_seed is None else self.random_seed

    def with_data_shape(
        self, shape: DataShape | None, row_shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> "Solver":
        """This solver for rows of `shape` (c, h, w), for data layers that state none.

        `row_shapes` are the shapes of a row of other columns.
        """
        shapes = dict(row_shapes or {})
        tests = tuple(test.with_data_shape(shape, shapes) for test in self.tests)
        train = replace(self.train, data_shape=shape, row_shapes=shapes)
        return replace(self, train=train, tests=tests)


def read_solver(path: Path, data_shape: DataShape | None = None) -> Solver:
    """The solver at `path` with its nets; `data_shape` (c, h, w) is for data layers without one."""
    file = str(path)
    param = parse_solver(read_text(path), file)
    _check_numbers(param, file)
    train = _train_net(param, path)
    tests = _test_nets(param, path)
    solver = Solver(
        rule=_name_errors(file, lambda: _rule(param)),
        schedule=_name_errors(file, lambda: _schedule(param)),
        decay=_decay(param, file),
        train=train,
        tests=tests,
        max_iter=param.max_iter,
        iter_size=param.iter_size,
        clip_gradients=_decimal(param.clip_gradients) if param.clip_gradients >= 0 else None,
        test_interval=param.test_interval,
        test_initialization=param.test_initialization,
        display=param.display,
        average_loss=param.average_loss if param.HasField("average_loss") else None,
        snapshot=param.snapshot,
        snapshot_after_train=param.snapshot_after_train,
        random_seed=param.random_seed if param.random_seed >= 0 else None,
        weights=_weights(param, path),
        device=_device(param),
        notices=(*notices(param, file), *_without_tests(param, tests, file)),
        file=file,
    )
    return solver if data_shape is None else solver.with_data_shape(data_shape)


def _check_numbers(param: SolverParameter, file: str) -> None:
    """Raise BadInput for numbers that would prevent training, tests or display."""
    if not param.HasField("base_lr"):
        raise BadInput(file, expected="a base_lr", got="none")
    if not param.base_lr > 0:
        raise BadInput(f"{file}: base_lr", expected="more than 0", got=f"{param.base_lr:g}")
    for field, least in (
        ("iter_size", 1),
        ("average_loss", 1),
        ("test_interval", 0),
        ("display", 0),
        ("snapshot", 0),
    ):
        value = getattr(param, field)
        if value < least:
            raise BadInput(f"{file}: {field}", expected=f"at least {least}", got=value)
    if param.test_iter and min(param.test_iter) < 0:
        raise BadInput(f"{file}: test_iter", expected="at least 0", got=min(param.test_iter))


def _without_tests(param: SolverParameter, tests: tuple[TestNet, ...], file: str) -> list[str]:
    """A notice if tests during training are requested and there is no test net."""
    if not param.test_interval or any(test.iterations for test in tests):
        return []
    why = "every test_iter is 0" if tests else "there is no test net, which takes a test_iter"
    return [f"{file}: test_interval has no effect: {why}"]


def _weights(param: SolverParameter, path: Path) -> tuple[str, ...]:
    """The files to start from; as in Caffe, one entry may name several, separated by commas.

    One that is not there is an error where it is read: --weights and --resume need none of them.
    """
    names = [name.strip() for entry in param.weights for name in entry.split(",")]
    return tuple(str(_near(name, path) or path.parent / name) for name in names if name)


def _device(param: SolverParameter) -> str:
    wants_cpu = param.HasField("solver_mode") and param.solver_mode == SolverParameter.CPU
    return "cpu" if wants_cpu else "auto"


def _rule(param: SolverParameter) -> rules.Rule:
    """The rule by `type`, or by the older `solver_type` if only that is set."""
    name = param.type
    if param.HasField("solver_type") and not param.HasField("type"):
        name = SolverParameter.SolverType.Name(param.solver_type)
    momentum, delta = _decimal(param.momentum), _decimal(param.delta)
    match name.lower():
        case "sgd":
            return rules.Momentum(momentum) if momentum else rules.SGD()
        case "nesterov":
            return rules.Nesterov(momentum)
        case "adagrad":
            _no_momentum(param, name)
            return rules.Adagrad(delta)
        case "rmsprop":
            _no_momentum(param, name)
            return rules.RMSProp(_decimal(param.rms_decay), delta)
        case "adadelta":
            return rules.AdaDelta(momentum, delta)
        case "adam":
            return rules.Adam(momentum, _decimal(param.momentum2), delta)
    known = "SGD, Nesterov, AdaGrad, RMSProp, AdaDelta, Adam"
    raise BadInput(f"solver type {name} is not supported; expected one of {known}")


def _no_momentum(param: SolverParameter, name: str) -> None:
    if param.momentum:
        raise BadInput(f"solver type {name} has no momentum; expected 0, got {param.momentum:g}")


def _schedule(param: SolverParameter) -> schedules.Schedule:
    base, gamma, power = (_decimal(x) for x in (param.base_lr, param.gamma, param.power))
    match param.lr_policy or "fixed":
        case "fixed":
            return schedules.Fixed(base_rate=base)
        case "step":
            return schedules.Step(base_rate=base, gamma=gamma, step_size=param.stepsize)
        case "exp":
            return schedules.Exp(base_rate=base, gamma=gamma)
        case "inv":
            return schedules.Inv(base_rate=base, gamma=gamma, power=power)
        case "multistep":
            steps = tuple(param.stepvalue)
            return schedules.MultiStep(base_rate=base, gamma=gamma, steps=steps)
        case "poly":
            end = max(param.max_iter, 1)  # schedule_for has the true end if the file has none
            return schedules.Poly(base_rate=base, power=power, max_iteration=end)
        case "sigmoid":
            return schedules.Sigmoid(base_rate=base, gamma=gamma, step_size=param.stepsize)
    known = ", ".join(schedules.SCHEDULES)
    raise BadInput(f"lr_policy {param.lr_policy} is not supported; expected one of {known}")


def _decay(param: SolverParameter, file: str) -> rules.Decay:
    try:
        kind = rules.DecayKind(param.regularization_type)
    except ValueError:
        raise BadInput(
            f"{file}: regularization_type", expected="L1 or L2", got=param.regularization_type
        ) from None
    expected = "a number of at least 0"
    decay = _decimal(param.weight_decay)
    return rules.Decay(
        argument_checks.number(f"{file}: weight_decay", decay, least=0, expected=expected), kind
    )


def _train_net(param: SolverParameter, path: Path) -> Description:
    fields = ("net", "net_param", "train_net", "train_net_param")
    sources = [field for field in fields if param.HasField(field)]
    if len(sources) != 1:
        got = " and ".join(sources) or "none"
        raise BadInput(path, expected=f"one training net ({', '.join(fields)})", got=got)
    source: str | NetParameter = getattr(param, sources[0])
    return _description(sources[0], source, path, Phase.TRAIN, param.train_state)


def _test_nets(param: SolverParameter, path: Path) -> tuple[TestNet, ...]:
    """The nets of test_net_param and test_net; then `net` for each test_iter that remains."""
    sources: list[tuple[str, str | NetParameter]] = [
        *(("test_net_param", net) for net in param.test_net_param),
        *(("test_net", net) for net in param.test_net),
    ]
    remaining = len(param.test_iter) - len(sources)
    for field in ("net", "net_param"):
        if remaining > 0 and param.HasField(field):
            sources += [(field, getattr(param, field))] * remaining
    if len(sources) != len(param.test_iter):
        raise BadInput(
            path,
            expected=f"a test_iter for each of {len(sources)} test nets",
            got=len(param.test_iter),
        )
    if len(param.test_state) not in {0, len(sources)}:
        raise BadInput(
            path,
            expected=f"a test_state for each of {len(sources)} test nets, or none",
            got=len(param.test_state),
        )
    states = list(param.test_state) or [NetState()] * len(sources)
    numbered_nets = enumerate(zip(sources, states, param.test_iter, strict=True))
    return tuple(
        TestNet(_description(*source, path, Phase.TEST, state), iterations, number)
        for number, (source, state, iterations) in numbered_nets
    )


def _description(
    field: str, source: str | NetParameter, solver: Path, phase: Phase, state: NetState
) -> Description:
    if isinstance(source, str):
        path = _find(source, solver, field)
        text, file = read_text(path), str(path)
    else:
        text, file = text_format.MessageToString(source), str(solver)
    net_state = parse_net(text, file).state
    if net_state.HasField("phase") and (net_state.phase == TRAIN) != (phase is Phase.TRAIN):
        raise BadInput(
            f"{file}: state: phase", expected=f"{phase} for this use of the net, or none"
        )
    return with_files(Description(text, phase, tuple(state.stage), state.level, file=file))


def _find(name: str, solver: Path, field: str) -> Path:
    """The file that a field of the solver names; raises BadInput if it is not there."""
    path = _near(name, solver)
    if path is None:
        folders = dict.fromkeys((solver.parent.absolute(), Path.cwd()))
        raise BadInput(
            f"{solver}: {field}",
            expected="a file",
            got=f"{quote(name)}, which is not in {' or '.join(map(str, folders))}",
        )
    return path


def _near(name: str, solver: Path) -> Path | None:
    """A file relative to the solver file's folder, or, as in Caffe, to the working directory."""
    path = beside(name, str(solver))
    with suppress(OSError):  # the name may be too long for a file name
        if path.is_file():
            return path
    return None


def _name_errors(file: str, read: Callable[[], _T]) -> _T:
    """The result of `read`; its errors are prefixed with the file's name."""
    try:
        return read()
    except BadInput as error:
        raise error.within(file) from None


def _decimal(value: float) -> float:
    return float(str(np.float32(value)))

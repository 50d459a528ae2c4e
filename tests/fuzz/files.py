"""Files that are almost valid: solvers, nets, weights and solver states, spoiled by a seed.

Each reader refuses what it cannot use with an error of ours that names the file; none crashes,
hangs, or takes memory that the file merely speaks of.
"""

import random
import shutil
import tempfile
from pathlib import Path

from shards.errors import DownpourError
from shards.rules import Momentum
from worker.caffe.model import CaffeModel
from worker.caffe.python_nets import load_net
from worker.caffe.solver import read_solver
from worker.caffe.solver_state import (
    SolverState,
    read_solver_state,
    slots_of,
    write_solver_state,
)
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import read_weights

_DEMO = Path(__file__).parents[2] / "deploy/demo"
_SOLVER, _NET = "lenet_solver.prototxt", "lenet_train_test.prototxt"
_STATES = ("s.solverstate", "s.solverstate.h5")
_OLD = "old.prototxt"
_OLD_NET = """
name: "old" input: "data" input_dim: [2, 1, 4, 4]
layers { bottom: "data" top: "pad" layer { name: "pad" type: "padding" pad: 1 } }
layers { bottom: "pad" top: "c" layer { name: "c" type: "conv" num_output: 3 kernelsize: 3
         weight_filler { type: "xavier" } blobs_lr: 1 blobs_lr: 2 } }
layers { bottom: "c" top: "s" name: "s" type: SOFTMAX include { phase: TEST } }
"""
_SHAPE = (1, 28, 28)
_NEAR = 600  # bytes from the front of weights: what is behind is numbers
_WORDS = (b"999999999999", b"-1", b"{" * 200, b"0", b"\xff" * 9, b"1e99", b"nan", b'"', b"}")


def run(files: int, seed: int) -> tuple[int, int]:
    """Try so many; returns how many were tried and how many could be read all the same.

    Raises with the seed at the first that crashes a reader.
    """
    dice, read = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="downpour-fuzz-") as name:
        folder = Path(name)
        for file in (_SOLVER, _NET):
            shutil.copy(_DEMO / file, folder)
        model = CaffeModel(read_solver(folder / _SOLVER, _SHAPE).train)
        weights = model.initial(1)
        for name in ("w.caffemodel", "w.h5", "w.safetensors"):
            write_weights(folder / name, model.net, weights)
        state = SolverState(7, tuple(model.table.views(weights).values()), "w.caffemodel", 1)
        for name in _STATES:
            write_solver_state(folder / name, state)
        (folder / _OLD).write_text(_OLD_NET)
        whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
        for number in range(files):
            path = dice.choice(list(whole))
            path.write_bytes(_spoiled(whole[path], dice, path.suffix != ".prototxt"))
            try:
                if path.name == _OLD:
                    load_net(path)
                elif path.suffix == ".prototxt":
                    CaffeModel(read_solver(folder / _SOLVER, _SHAPE).train)
                elif path.name in _STATES:
                    slots_of(read_solver_state(path), model.table, Momentum(), str(path))
                else:
                    read_weights(path, model.net, weights)
                read += 1
            except DownpourError as error:
                named = str(path) in str(error) or path.suffix == ".prototxt"
                if not named:
                    raise AssertionError(f"seed {seed}, file {number}, {path.name}") from error
            except Exception as error:
                raise AssertionError(f"seed {seed}, file {number}, {path.name}") from error
            path.write_bytes(whole[path])
    return files, read


def _spoiled(content: bytes, dice: random.Random, binary: bool) -> bytes:
    spoiled = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(min(len(spoiled), _NEAR) if binary else len(spoiled))
        match dice.randrange(5):
            case 0:
                spoiled[at] ^= 1 << dice.randrange(8)
            case 1:
                del spoiled[at : at + dice.randrange(30)]
            case 2:
                spoiled[at:at] = dice.choice(_WORDS)
            case 3:
                spoiled[at:at] = spoiled[max(0, at - 40) : at]
            case _:
                spoiled[at : at + 8] = dice.randbytes(8)
    return bytes(spoiled)

"""`worker.torch.export_onnx`: other runtimes predict what PyTorch does; skipped without them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker.torch
from shards.errors import BadInput, GiveUp

torch: Any = pytest.importorskip("torch", reason="needs the extra `onnx`")
onnx: Any = pytest.importorskip("onnx", reason="needs the extra `onnx`")
pytest.importorskip("onnxscript", reason="needs the extra `onnx`")


def perceptron() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    )


def convolutional() -> Any:
    """A CNN whose BatchNorm has seen data, so that its running means are not the first ones."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 5),
    )
    for _ in range(3):
        model(torch.randn(8, 1, 8, 8) + 2)
    return model


class Sum(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)

    def forward(self, one: Any, two: Any) -> Any:
        return self.one(one) + self.two(two)


def predicted(path: Path, *inputs: Any) -> Any:
    """What the reference implementation of ONNX computes."""
    from onnx.reference import ReferenceEvaluator

    content = onnx.load(path)
    onnx.checker.check_model(content)
    names = [one.name for one in content.graph.input]
    evaluator: Any = ReferenceEvaluator(content)
    return evaluator.run(None, dict(zip(names, inputs, strict=True)))[0]


@pytest.mark.parametrize(
    ("make", "shape"), [(perceptron, (6,)), (convolutional, (1, 8, 8))], ids=["MLP", "CNN"]
)
def test_another_runtime_predicts_the_same(
    make: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """For any number of rows, with trained values, in evaluation mode; the model keeps its mode."""
    model = make()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    values = {
        name: one + 0.1
        for name, one in model.state_dict().items()
        if one.dtype == torch.float32 and "running" not in name
    }
    path = tmp_path / "model.onnx"
    example = np.zeros((1, *shape), np.float32)
    assert worker.torch.export_onnx(model, example, path, values=values) == path
    assert [module.training for module in model.modules()] == modes
    model.eval()
    for rows in (1, 5):
        x = torch.randn(rows, *shape)
        expected = model(x).detach().numpy()
        np.testing.assert_allclose(predicted(path, x.numpy()), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_two_inputs(tmp_path: Path) -> None:
    """Names of inputs are those that the caller gives."""
    model, path = Sum(), tmp_path / "sum.onnx"
    inputs = torch.zeros(4, 2), torch.zeros(4, 3)
    worker.torch.export_onnx(model, inputs, path, input_names=["left", "right"])
    names = [one.name for one in onnx.load(path).graph.input]
    assert names == ["left", "right"]
    one, two = torch.randn(7, 2), torch.randn(7, 3)
    expected = model(one, two).detach().numpy()
    np.testing.assert_allclose(predicted(path, one.numpy(), two.numpy()), expected, atol=1e-5)


class Branches(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """A model whose path depends on its input, which no graph can have."""

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "inputs", "name", "message"),
    [
        (5, np.zeros((1, 2), np.float32), "m.onnx", "export_onnx: model: expected a torch.nn.Mod"),
        (Sum(), "rows", "m.onnx", "export_onnx: inputs: 0: expected a tensor or an array, rows"),
        (Sum(), np.float32(1), "m.onnx", "inputs: 0: expected rows first, got shape"),
        (Sum(), torch.zeros(0, 2), "m.onnx", r"expected rows first, got shape \(0, 2\)"),
        (Sum(), torch.zeros(1, 2), "m.onnx", "model Sum: torch.onnx cannot export it: "),
        (Branches(), torch.zeros(2, 2), "m.onnx", "model Branches: torch.onnx cannot export it"),
        (Sum(), torch.zeros(1, 2), "m.pt", "m.pt: expected .onnx, got '.pt'"),
    ],
)
def test_what_cannot_be_exported(
    model: Any, inputs: Any, name: str, message: str, tmp_path: Path
) -> None:
    """One line names what is wrong, and no file is left."""
    with pytest.raises(BadInput, match=message) as caught:
        worker.torch.export_onnx(model, inputs, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GiveUp, match=r"model.onnx: cannot be written"):
        worker.torch.export_onnx(perceptron(), torch.zeros(1, 6), tmp_path / "file" / "model.onnx")


def test_without_the_exporter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install."""
    monkeypatch.setattr("worker.torch.find_spec", lambda name: None if name == "onnxscript" else 1)
    message = r"expected onnx and onnxscript \(pip install 'downpour-sgd\[onnx\]'\), got no onnxscr"
    with pytest.raises(BadInput, match=message):
        worker.torch.export_onnx(perceptron(), torch.zeros(1, 6), tmp_path / "model.onnx")

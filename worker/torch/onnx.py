"""Exports a PyTorch model in the ONNX format; worker.torch.export_onnx writes the file."""

from importlib.util import find_spec
from typing import Any

from shards import argument_checks
from shards.errors import BadInput
from shards.extras import install_command

_MAX_QUOTED = 200  # characters of an error of the exporter


def export_model(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> bytes:
    """The model in evaluation mode, in the ONNX format; the number of rows is free."""
    import torch

    like = next(model.parameters(), torch.empty(()))
    rows, modes = [], {module: module.training for module in model.modules()}
    for index, array in enumerate(inputs):
        try:
            example = torch.as_tensor(array, device=like.device)
        except (TypeError, ValueError, RuntimeError):
            expected = "a tensor or an array, rows first, or a tuple of several"
            raise argument_checks.wrong(f"export_onnx: inputs: {index}", expected, array) from None
        if not example.ndim or not len(example):
            shape = tuple(example.shape)
            raise BadInput(
                f"export_onnx: inputs: {index}", expected="rows first", got=f"shape {shape}"
            )
        # Of one row the exporter concludes that there is always one.
        rows.append(torch.cat([example, example]))
    free = tuple({0: torch.export.Dim.DYNAMIC} for _ in rows)
    model.eval()
    try:
        options = {"dynamo": True, "verbose": False, "dynamic_shapes": free, **options}
        content: bytes = torch.onnx.export(
            model, tuple(rows), **options
        ).model_proto.SerializeToString()
    except Exception as error:  # the exporter runs the model, which may raise anything
        name, line = type(model).__name__, str(error).splitlines()[0] if str(error) else ""
        raise BadInput(
            f"export_onnx: model {name}: torch.onnx cannot export it: {type(error).__name__}:"
            f" {line[:_MAX_QUOTED]}"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training  # frozen parts may differ from the rest
    return content


def check_exporter() -> None:
    """Raise BadInput unless what `torch.onnx.export` needs is installed."""
    absent = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if absent:
        raise BadInput(
            "worker.torch.export_onnx",
            expected=f"onnx and onnxscript ({install_command('onnx')})",
            got=f"no {' and no '.join(absent)}",
        )

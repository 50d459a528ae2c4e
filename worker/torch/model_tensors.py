"""The tensors of a PyTorch model: parameters and buffers that workers share, and embeddings.

PyTorch is imported when a function of this module is called.
"""

from importlib import import_module
from typing import Any

from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing


def lazy_names(model: Any) -> list[str]:
    """The tensors of a model that have no shape yet: lazy layers take it from their first batch."""
    is_lazy = load_torch().nn.parameter.is_lazy
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]


def tensors_of(label: str, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a model by name, and the buffers that workers share."""
    torch = load_torch()
    argument_checks.instance(f"{label}: model", model, torch.nn.Module, "a torch.nn.Module")
    if lazy := lazy_names(model):
        raise BadInput(
            f"{label}: {lazy[0]}",
            expected="a parameter with a shape",
            got="one of a lazy layer: call the model on one batch first, as model(batch)",
        )
    trained = dict(model.named_parameters())
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise BadInput(
                f"{label}: {name}",
                expected="a parameter of float32",
                got=parameter.dtype,
                hint="autocast computes in shorter types",
            )
    saved = model.state_dict(keep_vars=True)
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and buffer.dtype == torch.float32
    }
    return trained, buffers


def check_names(
    label: str, trained: dict[str, Any], tensors: dict[str, Any], names: set[str]
) -> None:
    """Raise BadInput unless all parameters are given, and nothing that the model does not have."""
    missing, unknown = sorted(trained.keys() - names), sorted(names - tensors.keys())
    if missing:
        raise BadInput(label, expected=f"the parameter {missing[0]} of the model", got="none")
    if unknown:
        raise BadInput(label, expected="tensors of the model", got=unknown[0])


def embedding_names(model: Any) -> list[str]:
    """The weights of `nn.Embedding` layers, by their names in the model.

    A head that is tied to one has the same parameter, which the model may name after the head.
    """
    layer_kind = load_torch().nn.Embedding
    weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, layer_kind)}
    return [name for name, tensor in model.named_parameters() if id(tensor) in weights]


def load_layers() -> Any:
    """The module of the layers, which loads PyTorch."""
    load_torch()
    return import_module("worker.torch.embeddings")


def find_row_layers(label: str, model: Any) -> dict[str, list[Any]]:
    """The layers of a model over sparse tables, by table."""
    torch = load_torch()
    argument_checks.instance(f"{label}: model", model, torch.nn.Module, "a torch.nn.Module")
    layers: dict[str, list[Any]] = load_layers().layers_of(label, model)
    return layers


def load_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise missing("worker.torch", "PyTorch", "torch") from None
    return torch

"""One step in time of LSTM and RNN layers in kernels: one launch each way."""

from typing import Any

from cupy_kernels.launch import launch
from cupy_kernels.types import Array


def lstm_step(
    gates: Array,
    products: Array | None,
    cont: Array,
    before: Array | None,
    cells_before: Array | None,
    cells: Array,
    hidden: Array,
    counted: Array,
    state: Array,
) -> None:
    known: dict[str, Any] = {"products": products, "before": before, "cells_before": cells_before}
    written: dict[str, Any] = {"cells": cells, "hidden": hidden, "counted": counted, "state": state}
    launch("lstm_forward", gates=gates, cont=cont, **known, **written, **_sizes(hidden))


def lstm_step_backward(
    dhidden: Array,
    dproducts: Array | None,
    dcells: Array,
    gates: Array,
    cells: Array,
    cells_before: Array | None,
    cont: Array,
    dgates: Array,
    dgates_counted: Array,
) -> None:
    known: dict[str, Any] = {"gates": gates, "cells": cells, "cells_before": cells_before}
    gradients: dict[str, Any] = {"dhidden": dhidden, "dproducts": dproducts, "dcells": dcells}
    written: dict[str, Any] = {"dgates": dgates, "dgates_counted": dgates_counted}
    launch("lstm_backward", cont=cont, **gradients, **known, **written, **_sizes(dhidden))


def rnn_step(
    inputs: Array,
    products: Array | None,
    cont: Array,
    before: Array | None,
    hidden: Array,
    counted: Array,
    state: Array,
) -> None:
    known: dict[str, Any] = {"inputs": inputs, "products": products, "cont": cont, "before": before}
    written: dict[str, Any] = {"hidden": hidden, "counted": counted, "state": state}
    launch("rnn_forward", **known, **written, **_sizes(hidden))


def rnn_step_backward(
    dhidden: Array,
    dproducts: Array | None,
    hidden: Array,
    cont: Array,
    dgates: Array,
    dgates_counted: Array,
) -> None:
    gradients: dict[str, Any] = {"dhidden": dhidden, "dproducts": dproducts}
    written: dict[str, Any] = {"dgates": dgates, "dgates_counted": dgates_counted}
    launch("rnn_backward", hidden=hidden, cont=cont, **gradients, **written, **_sizes(hidden))


def _sizes(state: Array) -> dict[str, Any]:
    return dict(zip(("batch", "outputs"), state.shape, strict=True))

"""Layers of PyTorch whose weights are rows of a sparse table; exported by `worker.torch`.

The rows of a step are one leaf tensor a table, of the distinct ids that the step has gathered; its
`grad` is what the step pushes. Pooling is PyTorch's own. The last row of the tensor is zeros and
never pushed: padding reads it.

Importing this module loads PyTorch where it is installed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
from cupy_kernels.ops.rows import Ids
from ps.reader import MissingRows
from ps.step_rows import ids_of
from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing as missing_extra

try:
    import torch
except ImportError:  # the reference of the public names is built without PyTorch
    torch: Any = None  # type: ignore[no-redef]

_Module: Any = object if torch is None else torch.nn.Module
_SIGN = -(2**63)  # flipping this bit turns the order of uint64 into that of int64
_INT64 = -(2**63), 2**63 - 1
_MODES = ("sum", "mean", "max")
_SETTINGS = ("rule", "rate", "decay", "guard", "init", "seed", "rows")

Floats = NDArray[np.float32]


class _RowLayer(_Module):  # type: ignore[misc]  # PyTorch is not checked
    """A layer over the rows of a table: those of the step under way, else those of a reader."""

    def __init__(
        self, table: str, embedding_dim: int, padding_idx: int | None, settings: dict[str, Any]
    ) -> None:
        if torch is None:
            raise missing_extra("worker.torch", "PyTorch", "torch")
        super().__init__()
        kind = type(self).__name__
        argument_checks.check_names(f"{kind}: settings", settings, _SETTINGS)
        self.table = argument_checks.name(f"{kind}: table", table)
        self.sparse = ps.Sparse(embedding_dim, **settings)
        self.embedding_dim = self.sparse.dim
        if padding_idx is not None:
            padding_idx = argument_checks.whole(f"{kind}: padding_idx", padding_idx, *_INT64)
        self.padding_idx = padding_idx
        self.step_rows: Mapping[str, TableRows] | None = None
        self.reader_rows: ReaderRows | None = None

    @property
    def label(self) -> str:
        """The layer in an error."""
        return f"{type(self).__name__} {self.table}"

    def extra_repr(self) -> str:
        """The layer's settings in `repr(model)`."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}, {self.embedding_dim}{padding}"

    def find_rows(self, ids: Any) -> tuple[Any, "TableRows"]:
        """The rows that a forward pass reads, and the position among them of each id."""
        if not torch.is_tensor(ids) or ids.dtype != torch.int64:
            got = ids.dtype if torch.is_tensor(ids) else argument_checks.describe_value(ids)
            raise BadInput(f"{self.label}: input", expected="a tensor of int64 ids", got=got)
        if self.step_rows is not None:
            if self.table not in self.step_rows:
                expected = f"ids of table {self.table} in gather({{...}})"
                got = f"those of {', '.join(self.step_rows) or 'no table'}"
                raise BadInput(self.label, expected=expected, got=got)
            rows = self.step_rows[self.table]
        elif self.reader_rows is not None:
            rows = self.reader_rows.read(self, ids)
        else:
            raise BadInput(
                self.label,
                expected=(
                    "the rows of a step, of gather({...}) before the forward pass, or of a reader,"
                    " of worker.torch.attach(model, reader)"
                ),
                got="neither",
            )
        return rows.positions(self.label, ids), rows


class Embedding(_RowLayer):
    """Rows by id, as `torch.nn.Embedding`; the ids are any int64, so there is no vocabulary.

    `table` is the name of the sparse table, `settings` are those of `ps.Sparse`, such as `rule`,
    `rate` and `init`. Layers with the same `table` share its rows, and have the same settings. The
    id `padding_idx` gives zeros and is not trained. Rows are no parameters, so a `state_dict` has
    none. Raises BadInput for a setting that `ps.Sparse` does not take.
    """

    def __init__(
        self,
        table: str,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(table, embedding_dim, padding_idx, settings)

    def forward(self, input: Any) -> Any:  # noqa: A002  # PyTorch's name, which may be a keyword
        """The row of each id: int64 of any shape, (*); returns float32 (*, embedding_dim)."""
        positions, rows = self.find_rows(input)
        return torch.nn.functional.embedding(positions, rows.tensor, padding_idx=rows.count)


class EmbeddingBag(_RowLayer):
    """Sums, means or maxima of rows by id, as `torch.nn.EmbeddingBag`; ids are any int64.

    `table`, `padding_idx` and `settings` are those of `Embedding`, `mode` and `include_last_offset`
    those of PyTorch. The id `padding_idx` is left out of its bag. Raises BadInput for another mode.
    """

    def __init__(
        self,
        table: str,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(table, embedding_dim, padding_idx, settings)
        if mode not in _MODES:
            raise argument_checks.wrong("EmbeddingBag: mode", f"one of {', '.join(_MODES)}", mode)
        self.mode = mode
        self.include_last_offset = argument_checks.flag(
            "EmbeddingBag: include_last_offset", include_last_offset
        )

    def forward(
        self,
        input: Any,  # noqa: A002  # PyTorch's name, which may be a keyword
        offsets: Any = None,
        per_sample_weights: Any = None,
    ) -> Any:
        """A row for each bag of ids, float32 (bags, embedding_dim).

        `input` is int64 (bags, n), or (n,) with the `offsets` at which the bags begin.
        `per_sample_weights` are float32 of the shape of `input`, factors of the rows in `sum` mode.
        """
        positions, rows = self.find_rows(input)
        return torch.nn.functional.embedding_bag(
            positions,
            rows.tensor,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=rows.count,
        )


class TableRows:
    """The rows of distinct ids of a table: `tensor` has `count` of them, then one of zeros."""

    def __init__(self, ids: Ids, rows: Floats, *, padding: int | None, device: Any) -> None:
        """`ids` are in ascending order."""
        self.count, dim = rows.shape
        self._padding = padding
        extended = np.zeros((self.count + 1, dim), np.float32)
        extended[: self.count] = rows
        self.tensor = torch.from_numpy(extended).to(device)
        keys = np.append(ids.view(np.int64) ^ np.int64(_SIGN), np.int64(0))
        self._keys = torch.from_numpy(keys).to(device)

    def positions(self, label: str, ids: Any) -> Any:
        """The position of each id, in the shape of `ids`; raises BadInput for one without a row."""
        keys = ids.contiguous() ^ _SIGN
        at = torch.searchsorted(self._keys[: self.count], keys)
        has_row = (at < self.count) & (self._keys[at] == keys)
        accepted = has_row if self._padding is None else has_row | (ids == self._padding)
        if not accepted.all():
            missing = ids[~accepted]
            raise BadInput(
                label,
                expected="ids that gather({...}) was given",
                got=f"{len(missing)} of {ids.numel()} that it was not, such as {int(missing[0])}",
            )
        return torch.where(has_row, at, self.count)

    @property
    def gradient(self) -> Any:
        """The gradient of the rows; None where no forward pass used them."""
        return None if self.tensor.grad is None else self.tensor.grad[: self.count]


class ReaderRows:
    """The rows that forward passes read through a reader; nothing is pushed."""

    def __init__(self, reader: Any, missing: MissingRows) -> None:
        self._reader = reader
        self._missing = missing

    def read(self, layer: _RowLayer, ids: Any) -> TableRows:
        distinct = distinct_ids(layer.label, ids, layer.padding_idx)
        rows = self._reader.gather(layer.table, distinct, missing=self._missing)
        return TableRows(distinct, rows, padding=layer.padding_idx, device=ids.device)


def layers_of(label: str, model: Any) -> dict[str, list[_RowLayer]]:
    """The layers of a model over sparse tables, by table.

    Raises BadInput where two layers describe a table differently.
    """
    layers: dict[str, list[_RowLayer]] = {}
    for layer in model.modules():
        if isinstance(layer, _RowLayer):
            layers.setdefault(layer.table, []).append(layer)
    for table, (first, *others) in layers.items():
        for layer in others:
            if _describe(layer) != _describe(first):
                raise BadInput(
                    f"{label}: {layer.label}",
                    expected=f"the settings and padding_idx of the other layer of table {table}",
                    got="others",
                )
    return layers


def _describe(layer: _RowLayer) -> object:
    return layer.sparse.table(layer.table), layer.sparse.form, layer.padding_idx


def distinct_ids(label: str, value: Any, padding: int | None) -> Ids:
    """The distinct ids of a tensor or array of any shape, or of several, in ascending order.

    Without those of padding. Raises BadInput for another dtype.
    """
    flat = np.concatenate([np.empty(0, np.uint64), *_flat_parts(label, value)])
    distinct: Ids = np.unique(flat)
    if padding is not None:
        distinct = distinct[distinct != np.uint64(padding % 2**64)]
    return distinct


def _flat_parts(label: str, value: Any) -> Iterator[Ids]:
    if isinstance(value, list | tuple) and any(hasattr(part, "shape") for part in value):
        for part in value:
            yield from _flat_parts(label, part)
        return
    if torch.is_tensor(value):
        value = value.detach().cpu().numpy()
    yield ids_of(label, value.reshape(-1) if isinstance(value, np.ndarray) else value)
